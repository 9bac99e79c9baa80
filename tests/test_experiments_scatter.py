"""The scatter part of experiments/overhead.py: its cases run, and its conditions can fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section: Any = importlib.import_module("_scatter_section")

CELLS = 1000


def a_row(**changes: Any) -> dict[str, Any]:
    """A row that meets every limit exactly."""
    row = {
        "operator": "scatter_add",
        "indices": "uniform",
        "rows": 5000,
        "width": 1,
        "cells": CELLS,
        "limit": 1.3,
        "switch_limit": 0.125,
        "ratio": 1.3,
        "deterministic_ms": 8.0,
        "truncdet_ms": 1.0,
        "truncdet_bits_equal": True,
        "truncdet_peak_bytes": 20 * CELLS + section.ALLOCATOR_SLACK,
        "indices_bytes": 0,
    }
    return {**row, **changes}


def missed(row: dict[str, Any], with_limits: bool = True) -> list[str]:
    found = section.check_scatter(row, with_limits)
    return [check["name"].rpartition(": ")[2] for check in found if not check["passed"]]


@pytest.mark.parametrize("case", section.CASES, ids=lambda case: f"{case.operator} {case.indices}")
def test_both_libraries_add_the_same(case: Any) -> None:
    calls = section.calls(case.tiny(), torch.device("cpu"))
    expected = calls["native"]()
    for side in ("deterministic", "truncdet"):
        torch.testing.assert_close(calls[side](), expected)


def test_a_row_at_the_limits_passes() -> None:
    assert missed(a_row()) == []
    assert len(section.check_scatter(a_row(), True)) == 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"truncdet_bits_equal": False}, "bits repeat"),
        ({"ratio": 1.31}, "time by the atomics'"),
        ({"deterministic_ms": 7.9}, "time by the switch's"),
        ({"truncdet_peak_bytes": 20 * CELLS + section.ALLOCATOR_SLACK + 1}, "peak bytes"),
    ],
)
def test_a_row_beyond_a_limit_is_missed(changes: dict[str, Any], name: str) -> None:
    assert missed(a_row(**changes)) == [name]


def test_without_limits_only_the_bits_count() -> None:
    slow = a_row(ratio=9.0, truncdet_peak_bytes=None, deterministic_ms=None)
    assert missed(slow, False) == []
    assert missed({**slow, "truncdet_bits_equal": False}, False) == ["bits repeat"]
    free = a_row(limit=None, switch_limit=None, ratio=9.0, deterministic_ms=0.1)
    assert missed(free) == []


def test_a_row_that_lacks_the_switch_has_no_limit_on_it() -> None:
    assert missed(a_row(deterministic_ms=None)) == []
