"""What experiments/frameworks.py does around the frameworks, tried on one that is a linear layer.

tests/integrations/test_frameworks_experiment.py runs it on the real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT / "experiments"))
frameworks: Any = importlib.import_module("frameworks")
detectors: Any = importlib.import_module("_detectors")
render: Any = importlib.import_module("_render")
train_run: Any = importlib.import_module("_train_run")


class Linear:
    """A framework whose configs are the names of its faults."""

    CHANGES = "none"

    def __init__(self) -> None:
        self.trained: list[tuple[str, int]] = []
        self.noise = itertools.count()

    def build(self, config: str, size: str, mode: str) -> nn.Module:
        if config == "fails":
            raise ImportError(f"{config}: no operators\nand a second line")
        torch.manual_seed(1 if config == "starts" and mode != "off" else 0)
        model: Any = nn.Linear(3, 1)
        model.fault = config
        return model  # type: ignore[no-any-return]

    def batch_of(self, model: nn.Module, size: str, device: torch.device) -> Tensor:
        return torch.ones(2, 3, device=device)

    def losses_of(self, model: Any, batch: Tensor) -> dict[str, Tensor]:
        if model.fault == "interrupted":
            raise KeyboardInterrupt
        if model.fault == "breaks":
            raise RuntimeError("broken")
        noise = next(self.noise) if model.fault == "noisy" else 0
        return {"square": model(batch).square().mean() + noise}

    def scope(self, mode: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Run = Callable[..., tuple[int, dict[str, Any]]]
RESULT = "frameworks_cpu.json"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the program on linear layers with these faults: its exit code and its result."""
    # Full size, too, is tried on a CPU here.
    monkeypatch.setattr(frameworks, "pick_device", lambda name, size: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "linear_framework", Linear())  # type: ignore[arg-type]
    # A walk over everything that the test process holds, before each of many short runs.
    monkeypatch.setattr(train_run, "gc", types.SimpleNamespace(collect=lambda: 0))
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))

    def run(*faults: str, arguments: tuple[str, ...] = ("--size", "tiny")) -> Any:
        known = {
            fault: detectors.Detector("linear_framework", fault, ("torch",)) for fault in faults
        }
        for module in (detectors, frameworks):
            monkeypatch.setattr(module, "DETECTORS", known)
        line = ["--device", "cpu", "--steps", "3", *arguments, "--out", str(tmp_path)]
        if not any(argument.startswith("--models") for argument in arguments):
            line.append(f"--models={','.join(known)}")
        path = tmp_path / RESULT
        path.unlink(missing_ok=True)
        try:
            code = frameworks.main(line)
        except KeyboardInterrupt:
            code = 130
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run


def missed(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["passed"]]


def test_every_detector_is_trained_twice_in_both_modes_by_turns(run: Run) -> None:
    code, result = run("one", "two")
    assert (code, result["complete"]) == (0, True)
    turns = [("off", 0), ("fixed_point", 0), ("off", 1), ("fixed_point", 1)]
    assert [(r["detector"], r["mode"], r["repeat"]) for r in result["runs"]] == [
        (name, *turn) for name in ("one", "two") for turn in turns
    ]
    assert all(len(r["loss_digests"]) == 3 for r in result["runs"])
    assert result["steps"] == {"one": 3, "two": 3}
    assert result["detectors"]["two"] == {"config": "two", "changes": "none"}
    assert result["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("fault", "conditions"),
    [
        ("noisy", ["noisy: patched losses repeat"]),
        ("starts", ["starts: plain and patched start equal"]),
        ("fails", ["fails: trains"]),
        ("breaks", ["breaks: trains"]),
    ],
)
def test_a_fault_is_a_missed_condition_and_the_others_are_measured(
    run: Run, fault: str, conditions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run(fault, "sound")
    assert code == 1 and missed(result) == conditions
    assert f"MISSED {conditions[0]}" in capsys.readouterr().out
    assert "sound" in result["comparisons"]
    assert result["complete"] == (fault not in ("fails", "breaks"))
    if fault == "fails":
        assert result["failures"] == {"fails": "ImportError: fails: no operators"}


def test_what_was_measured_before_an_interruption_is_in_the_file(run: Run) -> None:
    code, result = run("first", "interrupted", "third")
    assert code == 130
    assert list(result["comparisons"]) == ["first"] and len(result["runs"]) == 4
    assert not result["complete"]


def test_a_result_without_all_detectors_is_not_complete(run: Run) -> None:
    code, result = run("one", "two", arguments=("--size", "tiny", "--models=two"))
    assert code == 0 and not result["complete"]
    assert list(result["comparisons"]) == ["two"]


def test_nothing_measured_is_not_a_success_and_writes_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fails") == (1, {})
    assert "MISSED fails: trains" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_end_the_program_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("mmcv", "mmdet"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(frameworks, "Built", None)
    line = ("--device", "cpu", "--size", "tiny", "--models=mmdet-mask-rcnn", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match=r"mmcv,.* mmdet must be installed.*`make frameworks`"):
        frameworks.main(line)
    assert list(tmp_path.iterdir()) == []


def test_packages_of_other_models_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"detectron2"}
    monkeypatch.setattr(detectors, "installed", lambda package: package in present)
    detectors.check_packages(["detectron2-mask-rcnn"])
    with pytest.raises(SystemExit, match=r"^--models: mmcv, mmengine, mmdet must be installed"):
        detectors.check_packages(list(detectors.DETECTORS))


@pytest.mark.parametrize("value", ["nothing", "one,one", ""])
def test_unknown_detectors_are_refused(
    run: Run, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("one", "two", arguments=(f"--models={value}",))
    assert "--models must be of one, two, got" in capsys.readouterr().err


def test_the_budget_cuts_the_steps_of_all_detectors(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[dict[str, Any]] = []

    def probe(train: Callable[[int], dict[str, Any]]) -> tuple[float, float]:
        probed.append(train(2))
        return 0.1, 1.0

    monkeypatch.setattr(frameworks, "probe", probe)
    monkeypatch.setattr(frameworks.Experiment, "seconds", lambda self: 10.0)
    full = ("--steps", "60", "--budget")
    _, result = run("one", "two", arguments=(*full, "1000"))
    assert result["steps"] == {"one": 60, "two": 60}
    assert [len(found["losses"]) for found in probed] == [2, 2]
    # 8 runs of 1 s and 6 s each, after 10 s: half of the steps fit beside the fixed seconds.
    _, result = run("one", "two", arguments=(*full, str(10 + (8 + 24) / 0.95 + 0.01)))
    assert result["steps"] == {"one": 30, "two": 30}
    _, result = run("one", "two", arguments=(*full, "0"))
    assert result["steps"] == {"one": 20, "two": 20} and result["requested_steps"] == 60


def a_run(mode: str, **changes: Any) -> dict[str, Any]:
    run = {
        "mode": mode,
        "finite": True,
        "trained": True,
        "losses": [3.0, 2.0, 2.0],
        "loss_digests": ["a", "b", mode],
        "weights_digest": "w",
        "step_ms": [900.0, 10.0, 10.0],
        "peak_bytes": 100 << 20,
    }
    return {**run, **changes}


def some_runs(plain: dict[str, Any], patched: dict[str, Any]) -> list[dict[str, Any]]:
    """Two plain runs that differ and two patched ones; the last of each is changed."""
    first, second = a_run("off"), a_run("off", loss_digests=["a", "c", "d"])
    return [first, a_run("fixed_point"), {**second, **plain}, a_run("fixed_point", **patched)]


def test_runs_at_the_limits_pass() -> None:
    found = frameworks.check("x", some_runs({}, {}), True, with_limits=True)
    assert len(found) == 8 and not missed({"checks": found})


@pytest.mark.parametrize(
    ("plain", "patched", "name"),
    [
        ({}, {"loss_digests": ["a", "b", "x"]}, "patched losses repeat"),
        ({}, {"weights_digest": "x"}, "patched weights repeat"),
        ({"finite": False}, {}, "all losses finite"),
        ({}, {"trained": False}, "parameters change"),
        ({}, {"losses": [3.0, 3.0, 3.0]}, "losses fall"),
        ({}, {"losses": [3.0, 2.0, None]}, "losses fall"),
        ({"loss_digests": ["a", "b", "off"]}, {}, "plain runs differ"),
        ({}, {"step_ms": [900.0, 11.0, 11.0]}, "step time"),
    ],
)
def test_runs_beyond_a_condition_are_missed(
    plain: dict[str, Any], patched: dict[str, Any], name: str
) -> None:
    found = frameworks.check("x", some_runs(plain, patched), True, with_limits=True)
    assert missed({"checks": found}) == [f"x: {name}"]


def test_the_table_has_a_row_for_every_detector_and_the_caption_all_versions() -> None:
    versions = {"torch": "2.11.0", "torchvision": "0.26.0", "mmdet": "3.3.0", "mmengine": "0.10.7"}
    head = {"experiment": "frameworks", "device": "GPU X", "commit": "ab" * 20, "dirty": False}
    result = {**head, "command": "python x.py", "versions": versions, "steps": {"x": 3}}
    result["comparisons"] = {"x": frameworks.compare(some_runs({}, {"peak_bytes": 101 << 20}))}
    text = render.region("frameworks", {"frameworks_x.json": result})
    assert "GPU X, torch 2.11.0, torchvision 0.26.0, mmdet 3.3.0, commit abababababab" in text
    row = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    same = ["10.0", "10.0", "1.000", "100.0", "101.0", "1.010"]
    assert row == ["x", "3", *same, "differ from step 1", "equal"]
