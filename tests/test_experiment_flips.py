"""Flips between two orders of a double sum: counted, explained, and the literal cast's losses."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

scenes: Any = importlib.import_module("_flip_scenes")
counting: Any = importlib.import_module("_flip_count")
cost: Any = importlib.import_module("_literal_cost")
parts: Any = importlib.import_module("_parts")
flip_rate: Any = importlib.import_module("flip_rate")
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:wrap. a literal float16 cast")


def crowded() -> Any:
    case = dataclasses.replace(scenes.SCENES[0].case.tiny(), rois_per_image=24, channels=8)
    return scenes.Scene("crowded", case, crowd=0.1)


@pytest.mark.parametrize("scene", [scene.tiny() for scene in scenes.SCENES] + [crowded()])
def test_additions_are_those_of_the_kernel(scene: Any) -> None:
    # A cell without additions gets a zero gradient and the others, with weights above zero, none.
    number = scenes.additions(scene)
    ones = torch.ones(scenes.Sums(scene, CPU).fresh().shape)
    touched = scenes.Sums(scene, CPU).once(ones)[:, 0] > 0
    assert not bool((touched & (number == 0)).any())
    # Corners of weight zero are additions too; they are few.
    assert float((~touched & (number > 0)).sum()) <= 0.1 * float(touched.sum())
    # Four corners a sample, all samples inside the map in these scenes or cut at its border.
    case = scene.case
    extent = (scene.boxes[:, 3:] - scene.boxes[:, 1:3]).double() * case.spatial_scale / case.bins
    samples = extent.ceil() if case.sampling_ratio <= 0 else torch.full_like(extent, 2)
    most = 4 * case.bins**2 * samples.prod(1).sum()
    assert 0.5 * float(most) <= float(number.sum()) <= float(most)


def test_flips_are_counted_follow_the_model_and_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting, "BITS", (48, 46, 44, 42, 11))
    found = counting.count(crowded(), CPU, 1e9, 40)
    cells = [row["cells_differing"] for row in found["rows"]]
    assert cells[0] > cells[1] > cells[2] > cells[3] and cells[-1] == 0
    # Two bits less, four times as rare, and not quite so where sums that nearly cancel are certain
    # to differ at the larger number of bits. The pairs are the same in every run.
    for more, fewer in itertools.pairwise(cells[1:4]):
        assert 2.5 < more / fewer < 4.5
    assert 0.01 < found["c"] < 1
    assert found["flips_among_proved_cells"] == 0 and found["fixed_point_differing"] == 0
    unproved = [row["unproved_cells"] for row in found["rows"]]
    assert unproved == sorted(unproved, reverse=True) and unproved[-1] == 0
    assert all(many >= few / 40 for many, few in zip(unproved, cells, strict=True))


def test_a_flip_of_a_proved_cell_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "BITS", (51,))
    nothing = lambda total, *rest: torch.zeros(total.shape, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(counting, "unproved_cells", nothing)
    found = counting.count(crowded(), CPU, 1e9, 5)
    assert found["flips_among_proved_cells"] > 0
    result = {"scenes": [found], "size": "tiny", "underflow": []}
    missed = [check["name"] for check in flip_rate.check(result) if not check["passed"]]
    assert "crowded: every flip is among the unproved cells" in missed


def test_equal_orders_are_not_taken_for_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes.Sums, "again", scenes.Sums.once)
    found = counting.count(crowded(), CPU, 1e9, 2)
    result = {"scenes": [found], "size": "full", "underflow": []}
    missed = [check["name"] for check in flip_rate.check(result) if not check["passed"]]
    assert missed == ["crowded: orders differ", "24 bits differ somewhere"]


def test_wilson_intervals_are_those_of_the_formula() -> None:
    # 10 of 100: Brown, Cai and DasGupta (Stat. Sci. 16, 2001) print 0.055 to 0.174.
    assert counting.wilson(10, 100) == pytest.approx([0.0552, 0.1744], abs=5e-5)
    assert counting.wilson(0, 10)[0] == 0.0 and counting.wilson(10, 10)[1] == 1.0


def test_the_first_flip_is_extrapolated_from_24_bits() -> None:
    row = {"bits": 24, "probability": 0.02, "interval": [0.01, 0.04]}
    found = counting.first_flip([{"rows": [row]}], 11)
    assert found["steps"] == pytest.approx(8192 / 0.0202027, rel=1e-5)
    assert found["low"] < found["steps"] < found["high"]
    none = {"bits": 24, "probability": 0.0, "interval": [0.0, 0.04]}
    assert counting.first_flip([{"rows": [none]}], 24)["steps"] is None


def test_the_literal_cast_loses_what_truncation_keeps() -> None:
    rows = cost.underflow(CPU, channels=2)
    assert [row["scale"] for row in rows] == list(cost.SCALES)
    assert all(row["truncate"] == 1.0 for row in rows)
    assert rows[0]["literal"] > 0.9 and rows[-1]["literal"] == 0.0
    overflow = cost.overflow()
    assert [row["literal"] == 1.0 for row in overflow] == [True, True, False, False]
    assert all(row["truncate"] == 1.0 for row in overflow)
    moved = cost.moved_boxes()
    # Half has 11 bits: steps of 1 px above 1024 and of 4 px above 4096, half of it by rounding.
    assert moved[0]["largest_shift"] <= 0.5 and 1.5 < moved[-1]["largest_shift"] <= 2.0
    assert moved[-1]["smallest_iou"] < 0.9 < moved[0]["smallest_iou"]


def test_finished_parts_survive_an_interruption(tmp_path: Path) -> None:
    head = dict.fromkeys(("schema", "experiment", "command", "commit", "dirty", "versions"), "x")
    head["device"] = "GPU X"
    first = parts.Parts(tmp_path, head)
    assert first.get("one", lambda: [1.5, None]) == [1.5, None]
    with pytest.raises(KeyboardInterrupt):
        first.get("two", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))

    def never() -> None:
        raise AssertionError("computed again")

    second = parts.Parts(tmp_path, head)
    assert second.get("one", never) == [1.5, None]
    assert parts.Parts(tmp_path, {**head, "commit": "y"}).found == {}
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    assert parts.Parts(tmp_path, head).found == {}
    second.forget()
    assert list(tmp_path.iterdir()) == []


def test_it_runs_on_a_cpu_and_writes_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--pairs", "3", "--out", str(tmp_path)]
    assert flip_rate.main(arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"flip_rate_cpu.json", "flip_rate_cpu.png"}
    result = json.loads((tmp_path / "flip_rate_cpu.json").read_text())
    assert [scene["pairs"] for scene in result["scenes"]] == [3, 3, 3]
    out = capsys.readouterr().out
    assert "box head, crowded" in out and "conditions met" in out


@pytest.mark.parametrize("wrong", [["--pairs", "1"], ["--budget", "0"], ["--budget", "nan"]])
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        flip_rate.main(["--device", "cpu", "--size", "tiny", *wrong])
