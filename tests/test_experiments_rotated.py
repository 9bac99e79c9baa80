"""The rotated section of overhead.py: it runs, its conditions can fail, its table is filled."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from _frameworks import requires

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section = importlib.import_module("_rotated_section")
render = importlib.import_module("_render")

CPU = torch.device("cpu")


def a_row(error=5.0, native=True, **ours):
    """A row that meets every limit exactly."""
    truncdet = {
        "forward_ms": 1.0,
        "backward_ms": 1.6,
        "bits_equal": True,
        "backward_peak_bytes": 400 + 3 * section.SCRATCH_PER_ROI + section.ALLOCATOR_SLACK,
        **ours,
    }
    theirs = {
        "forward_ms": 2.0,
        "backward_ms": 2.0,
        "bits_equal": False,
        "backward_peak_bytes": None,
    }
    errors = {
        side: {part: {"max": value, "l2": value} for part in ("forward", "backward")}
        for side, value in (("truncdet", error), ("native", 4.0))
    }
    return {
        "name": "case",
        "rois": 3,
        "output_bytes": 400,
        "native": theirs if native else None,
        "native_name": "mmcv" if native else None,
        "note": None if native else section.NO_NATIVE,
        "truncdet": truncdet,
        "forward_ratio": 0.5 if native else None,
        "ratio": truncdet["backward_ms"] / 2.0 if native else None,
        "limit": section.LIMIT,
        "errors": errors if native else {"truncdet": errors["truncdet"]},
    }


def missed(row, with_limits=True):
    return [c["name"] for c in section.check_rotated(row, with_limits) if not c["passed"]]


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_cases_run_on_a_cpu(case):
    row = section.measure_rotated(case.tiny(), CPU, 3)
    assert not missed(row, with_limits=False)
    assert row["truncdet"]["backward_ms"] > 0
    assert row["errors"]["truncdet"]["backward"]["l2"] < 1e-4
    assert (row["native"] is None) == (row["note"] == section.NO_NATIVE)


@requires("mmcv")
@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_what_is_compared_is_the_same_operator(case):
    tensors = case.tiny().tensors(CPU)
    sides = (make(case.tiny(), *tensors) for make in (section.ours, section.native))
    for a, b in zip(*sides, strict=True):
        assert (a() - b()).norm() <= 1e-5 * b().norm()


def test_rois_turn_around_the_centres_of_the_upright_boxes():
    rois = section.CASES[0].rois()
    boxes = section.make_boxes(section.CASES[0].upright)
    assert rois.shape == (1024, 6)
    assert torch.allclose(rois[:, 1:3] * 2, boxes[:, 1:3] + boxes[:, 3:5])
    assert torch.allclose(rois[:, 3:5], boxes[:, 3:5] - boxes[:, 1:3])
    assert -1.58 < rois[:, 5].min() < -1.5 < 1.5 < rois[:, 5].max() < 1.58


def test_conditions_can_fail():
    assert not missed(a_row())
    assert missed(a_row(backward_ms=1.7)) == ["case: backward"]
    assert missed(a_row(bits_equal=False), with_limits=False) == ["case: bits repeat"]
    beyond = a_row()["truncdet"]["backward_peak_bytes"] + 1
    for native in (True, False):
        row = a_row(native=native, backward_peak_bytes=beyond)
        assert missed(row) == ["case: bytes beyond the output"]
    parts = [f"{part} error, {norm}" for part in ("forward", "backward") for norm in ("max", "l2")]
    assert missed(a_row(error=5.1)) == [f"case: {part}" for part in parts]


def test_without_mmcv_times_are_not_compared():
    assert not missed(a_row(error=9.0, native=False, backward_ms=99.0))


def test_the_table_is_filled_with_and_without_a_native_kernel():
    table = render.rotated_times({"rotated": [a_row(), a_row(native=False)]})
    first, second = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]
    )
    assert first[:8] == ["case", "2.000", "1.000", "0.50", "2.000", "1.600", "0.80", "0.80"]
    assert first[-2:] == ["4.0e+00 / 5.0e+00", "no / yes"]
    assert second[:8] == ["case", "-", "1.000", "-", "-", "1.600", "-", "0.80"]
    assert second[-2:] == ["- / 5.0e+00", "- / yes"]
    assert len(render.rotated_times({}).splitlines()) == 2
