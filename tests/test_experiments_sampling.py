"""The sampling section of overhead.py: it runs, its conditions can fail, its table is filled."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section = importlib.import_module("_sampling_section")
render = importlib.import_module("_render")


def a_row(**ours):
    """A row that meets every limit exactly."""
    truncdet = {
        "backward_ms": 3.0,
        "bits_equal": True,
        "backward_peak_bytes": 400 + 800 + section.ALLOCATOR_SLACK,
        **ours,
    }
    native = {"backward_ms": 2.0, "bits_equal": False, "backward_peak_bytes": None}
    slow = {"backward_ms": 9.0, "bits_equal": True, "backward_peak_bytes": None}
    return {
        "name": "case",
        "cells": 100,
        "output_bytes": 400,
        "native": {"kernel": native, "composition": slow},
        "native_name": "kernel",
        "truncdet": truncdet,
        "ratio": truncdet["backward_ms"] / 2.0,
        "limit": section.LIMIT,
    }


def missed(row, with_limits=True):
    return [c["name"] for c in section.check_sampling(row, with_limits) if not c["passed"]]


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_cases_run_on_a_cpu(case):
    row = section.measure_sampling(case.tiny(), torch.device("cpu"), 3)
    assert not missed(row, with_limits=False)
    assert row["ratio"] > 0 and row["native_name"] in row["native"]


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_what_is_compared_is_the_same_operator(case):
    _, calls = case.tiny().calls(torch.device("cpu"))
    ours = calls.pop("truncdet")()
    for call in calls.values():
        for a, b in zip(ours, call(), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_conditions_can_fail():
    assert not missed(a_row())
    assert missed(a_row(backward_ms=3.1)) == ["case: backward"]
    assert missed(a_row(bits_equal=False), with_limits=False) == ["case: bits repeat"]
    beyond = 401 + 800 + section.ALLOCATOR_SLACK
    assert missed(a_row(backward_peak_bytes=beyond)) == ["case: bytes beyond the output"]


def test_the_table_names_the_native_kernel_and_the_others():
    table = render.sampling_times({"sampling": [a_row()]})
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert line[:7] == ["case", "kernel", "2.000", "3.000", "1.50", "1.50", "composition 9.0"]
    assert line[-1] == "no / yes"
    assert len(render.sampling_times({}).splitlines()) == 2
