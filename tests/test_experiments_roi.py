"""The section of the other RoI operators in overhead.py: it runs, its conditions can fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section: Any = importlib.import_module("_roi_section")
render: Any = importlib.import_module("_render")

each_case = pytest.mark.parametrize("case", section.CASES, ids=lambda case: case.name)


def a_row(ratio: float = 0.8, worse: float = 1.25, **ours: Any) -> dict[str, Any]:
    """A row that meets every limit exactly."""
    beyond = section.SCRATCH_PER_ROI * 10 + section.ALLOCATOR_SLACK
    side = {"forward_ms": 1.0, "backward_ms": 2.0, "backward_peak_bytes": 400 + beyond}
    return {
        "name": "case",
        "rois": 10,
        "output_bytes": 400,
        "limit": section.LIMIT,
        "native": {**side, "bits_equal": False},
        "truncdet": {**side, "bits_equal": True, **ours},
        "forward_ratio": 1.0,
        "backward_ratio": ratio,
        "errors": {
            "native": {"max": 4.0, "l2": 8.0},
            "truncdet": {"max": 4.0 * worse, "l2": 8.0 * worse},
        },
    }


def missed(row: dict[str, Any], with_limits: bool = True) -> list[str]:
    return [c["name"] for c in section.check_pooling(row, with_limits) if not c["passed"]]


@each_case
def test_cases_run_on_a_cpu(case: Any) -> None:
    row = section.measure_pooling(case.tiny(), torch.device("cpu"), 3)
    assert not missed(row, with_limits=False)
    assert row["backward_ratio"] > 0
    assert (row["errors"] is None) == (case.operator == "ps_roi_pool")


@each_case
def test_what_is_compared_is_the_same_operator(case: Any) -> None:
    calls = section.Calls.make(case.tiny(), torch.device("cpu"))
    for part in (calls.forward, calls.backward):
        ours, native = part("truncdet")(), part("native")()
        assert ours.count_nonzero() > 0
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-5)


def test_conditions_can_fail() -> None:
    assert not missed(a_row())
    assert missed(a_row(ratio=0.81)) == ["case: backward"]
    assert missed(a_row(bits_equal=False), with_limits=False) == ["case: bits repeat"]
    beyond = a_row()["truncdet"]["backward_peak_bytes"] + 1
    assert missed(a_row(backward_peak_bytes=beyond)) == ["case: bytes beyond the output"]
    assert missed(a_row(worse=1.26)) == ["case: error, max", "case: error, l2"]
    assert not missed({**a_row(), "errors": None})


def test_the_table_shows_both_sides() -> None:
    table = render.pooling_times({"pooling": [a_row()]})
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert line[:8] == ["case", "1.000", "1.000", "1.00", "2.000", "2.000", "0.80", "0.80"]
    assert line[-2:] == ["4.0e+00 / 5.0e+00", "no / yes"]
    assert " - " in render.pooling_times({"pooling": [{**a_row(), "errors": None}]})
    assert len(render.pooling_times({}).splitlines()) == 2
