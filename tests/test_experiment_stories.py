"""The stories from the field: they run, and what they claim can fail."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
sys.path.append(str(EXPERIMENTS))

equal_runs: Any = importlib.import_module("_equal_runs")
story: Any = importlib.import_module("_story")
conv_cases: Any = importlib.import_module("_conv_cases")
batch_norm: Any = importlib.import_module("batch_norm")
digits: Any = importlib.import_module("digits")
message_passing: Any = importlib.import_module("message_passing")
CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--size", "tiny", "--repeats", "2")


def missed(checks: list[dict[str, Any]]) -> list[str]:
    return [check["name"] for check in checks if not check["passed"]]


@pytest.mark.parametrize("module", [digits, message_passing])
def test_a_story_runs_on_a_cpu_and_writes_its_result(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module.__name__
    arguments = [*TINY, "--out", str(tmp_path)]
    assert story.main(name, "test accuracy", "Doc.", arguments, module.train) == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}_cpu.json", f"{name}_cpu.png"}
    result = json.loads((tmp_path / f"{name}_cpu.json").read_text())
    assert [(r["mode"], r["repeat"]) for r in result["runs"]] == [
        ("plain", 0),
        ("plain", 1),
        ("truncdet", 0),
        ("truncdet", 1),
    ]
    for run in result["runs"]:
        assert len(set(run["loss_digests"])) == len(run["losses"]) == 8  # it trains
    # The two modes went through different kernels.
    weights = {r["mode"]: r["weights_digest"] for r in result["runs"]}
    assert weights["plain"] != weights["truncdet"]
    assert "conditions met" in capsys.readouterr().out


def test_runs_that_differ_are_counted_and_missed() -> None:
    same = {"loss_digests": ["a", "b"], "weights_digest": "w", "score": 0.5, "ms_per_step": 1.0}
    apart = {**same, "loss_digests": ["a", "c"], "weights_digest": "v", "score": 0.6}
    equal, different = equal_runs.summary([same, same]), equal_runs.summary([same, same, apart])
    assert different["distinct_weights"] == different["distinct_scores"] == 2
    assert different["first_difference"] == 1 and equal["first_difference"] is None
    assert (different["lowest_score"], different["highest_score"]) == (0.5, 0.6)
    assert not missed(story.check({"plain": different, "truncdet": equal}, True))
    assert missed(story.check({"plain": different, "truncdet": different}, True)) == [
        "truncdet: one set of weights",
        "truncdet: one score",
        "truncdet: all losses equal",
    ]
    assert missed(story.check({"plain": equal, "truncdet": equal}, True)) == [
        "plain: weights differ"
    ]
    assert not missed(story.check({"plain": equal, "truncdet": equal}, False))


def test_every_run_of_a_mode_starts_from_the_same_seed() -> None:
    def train() -> dict[str, Any]:
        return {"draw": torch.rand(()).item()}

    for mode in equal_runs.MODES:
        draws = {run["draw"] for run in equal_runs.repeat(train, mode, 3)}
        assert len(draws) == 1


def test_the_digits_are_those_of_the_recorded_sums() -> None:
    folder = EXPERIMENTS / "data" / "digits"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        expected, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    images, labels = digits.images()
    assert images.shape == (1797, 1, 8, 8) and labels.unique().tolist() == list(range(10))
    assert float(images.min()) == 0 and float(images.max()) == 1


def test_the_graph_is_the_same_in_every_call_and_has_communities() -> None:
    edges, x, community = message_passing.graph(500, 12)
    again = message_passing.graph(500, 12)
    assert all(torch.equal(a, b) for a, b in zip((edges, x, community), again, strict=True))
    assert int(edges.min()) >= 0 and int(edges.max()) < 500
    inside = (community[edges[0]] == community[edges[1]]).double().mean()
    # Drawn inside for certain, or by chance.
    expected = message_passing.SAME + (1 - message_passing.SAME) / message_passing.COMMUNITIES
    assert abs(float(inside) - expected) < 0.05


def test_batch_norm_runs_on_a_cpu_and_says_that_nothing_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch_norm.main([*TINY, "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"batch_norm_cpu.json", "batch_norm_cpu.png"}
    result = json.loads((tmp_path / "batch_norm_cpu.json").read_text())
    assert len(result["trainings"]) == 4 * len(conv_cases.SETTINGS)
    assert "chose no algorithm here whose bits move" in capsys.readouterr().out


def test_cudnn_is_set_as_named_and_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    for name, expected in conv_cases.SETTINGS.items():
        with contextlib.suppress(KeyError), conv_cases.setting(name):
            assert (cudnn.benchmark, cudnn.deterministic) == expected
            raise KeyError
        assert (cudnn.benchmark, cudnn.deterministic) == before


def test_an_operator_whose_bits_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    class Moving(conv_cases.Norm):
        def gradients(self, device: torch.device) -> dict[str, Any]:
            steady = super().gradients(device)["batch norm, weight gradient"]
            return {"convolution, weight gradient": lambda: steady() + next(calls) % 7}

    case = conv_cases.CASES[-1].tiny()
    moving = Moving(case.dimensions, case.batch, case.channels, case.size)
    rows = conv_cases.moving("heuristics", CPU, [moving, case])
    assert [(row["operator"], row["moving"]) for row in rows] == [
        ("convolution, weight gradient", 1),
        ("batch norm, weight gradient", 0),
        ("batch norm, input gradient", 0),
    ]
    assert rows[0]["which"] == [case.name]
    result = {"operators": rows, "trainings": [], "versions": {"cudnn": "9"}}
    assert batch_norm.verdict(result) == "Bits move in: convolution, weight gradient."
    assert not missed(batch_norm.check(result))


def test_a_blamed_batch_norm_or_a_switch_without_effect_is_missed() -> None:
    row = {"operator": "batch norm, input gradient", "setting": "heuristics", "moving": 1}
    switched = {"operator": "convolution", "setting": "deterministic", "moving": 2}
    training = {"dimensions": 3, "batch_norm": True, "setting": "deterministic"}
    result = {"operators": [row, switched], "trainings": [{**training, "distinct_weights": 2}]}
    assert missed(batch_norm.check(result)) == [
        "3-D, batch norm, deterministic: one set of weights",
        "batch norm, input gradient, heuristics: bits repeat",
        "convolution, deterministic: bits repeat",
    ]


@pytest.mark.parametrize("main", [batch_norm.main, lambda a: story.main("x", "y", None, a, None)])
def test_one_run_is_no_comparison(main: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--size", "tiny", "--repeats", "1"])
