"""The rows of interpolate and the adaptive pools in overhead.py: what is measured, and limits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section: Any = importlib.import_module("_resample_section")
render: Any = importlib.import_module("_render")

TINY = [case.tiny() for case in section.CASES]
each_case = pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.operator} {case.sizes}")


@each_case
def test_both_sides_of_a_row_compute_the_same_gradient(case: Any) -> None:
    calls = section.Calls.make(case, torch.device("cpu"))
    ours, native = calls.ours()(), calls.native()()
    assert ours.shape == calls.input.shape
    torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(calls.deterministic()(), native, rtol=1e-4, atol=1e-4)
    assert calls.double().native()().dtype == torch.float64


def a_row(**changes: Any) -> dict[str, Any]:
    """A row that meets every limit exactly."""
    row = {
        **{f"{side}_ms": 1.0 for side in ("native", "deterministic", "truncdet")},
        **{f"{side}_bits_equal": True for side in ("native", "deterministic", "truncdet")},
        **{f"{side}_peak_bytes": 1 << 20 for side in ("native", "truncdet")},
        "operator": "bilinear",
        "shape": "1x2x3x4 to 6x8",
        "ratio": section.LIMIT,
        "errors": {"native": {"max": 4.0, "l2": 8.0}, "truncdet": {"max": 5.0, "l2": 10.0}},
    }
    return {**row, **changes}


def missed(row: dict[str, Any], with_limits: bool = True) -> list[str]:
    return [c["name"] for c in section.check_resample(row, with_limits) if not c["passed"]]


def test_a_row_at_the_limits_passes() -> None:
    assert missed(a_row()) == []
    assert len(section.check_resample(a_row(), True)) == 4


def test_a_row_beyond_a_limit_is_missed() -> None:
    name = "bilinear backward, 1x2x3x4 to 6x8: "
    worse = {"native": {"max": 4.0, "l2": 8.0}, "truncdet": {"max": 5.1, "l2": 10.0}}
    for changes, what in (
        ({"ratio": 0.81}, "time"),
        ({"truncdet_bits_equal": False}, "bits repeat"),
        ({"errors": worse}, "error, max"),
    ):
        assert missed(a_row(**changes)) == [name + what]
    assert missed(a_row(ratio=9.0, errors=worse), with_limits=False) == []


def test_the_table_shows_a_row_and_needs_none() -> None:
    text = render.resample_times({"resample": [a_row(deterministic_ms=None)]})
    assert "| bilinear" in text
    assert "1.0 / 1.0" in text
    assert len(render.resample_times({}).splitlines()) == 2
