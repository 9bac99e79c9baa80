"""The deformable section of overhead.py: it runs, its conditions can fail, its table is filled."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section = importlib.import_module("_deform_section")
render = importlib.import_module("_render")


def a_row(**ours):
    """A row that meets every limit exactly."""
    truncdet = {
        "forward_ms": 1.0,
        "backward_ms": 3.0,
        "bits_equal": True,
        "backward_peak_bytes": 1400,
        "output_bytes": 400,
        **ours,
    }
    native = {**truncdet, "backward_ms": 2.0, "bits_equal": False, "backward_peak_bytes": None}
    return {
        "name": "case",
        "torchvision": native,
        "truncdet": truncdet,
        "forward_ratio": 1.0,
        "backward_ratio": truncdet["backward_ms"] / 2.0,
        "limit": section.LIMIT,
        "scratch_limit": 1000,
    }


def missed(row, with_limits=True):
    return [c["name"] for c in section.check_deform(row, with_limits) if not c["passed"]]


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_cases_run_on_a_cpu(case):
    row = section.measure_deform(case.tiny(), torch.device("cpu"), 3)
    assert not missed(row, with_limits=False)
    assert row["backward_ratio"] > 0 and row["forward_ratio"] > 0


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_what_is_compared_is_the_same_operator(case):
    calls = case.tiny().calls(torch.device("cpu"))
    for theirs, ours in zip(calls["torchvision"], calls["truncdet"], strict=True):
        for a, b in zip(ours(), theirs(), strict=True):
            assert a.shape == b.shape
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_columns_and_two_words_a_cell_are_the_limit_of_memory():
    case = section.Deform("plain", images=5)
    image = 256 * 100 * 168
    assert section.chunk_images(9 * image) == 1
    assert case.scratch_limit - section.ALLOCATOR_SLACK == 40 * image + 16 * 5 * image
    small = case.tiny()
    assert small.scratch_limit - section.ALLOCATOR_SLACK == (40 + 16) * small.cells


def test_conditions_can_fail():
    assert not missed(a_row())
    assert missed(a_row(backward_ms=3.1)) == ["deform_conv2d, case: backward"]
    bits = "deform_conv2d, case: bits repeat"
    assert missed(a_row(bits_equal=False), with_limits=False) == [bits]
    beyond = "deform_conv2d, case: bytes beyond the output"
    assert missed(a_row(backward_peak_bytes=1401)) == [beyond]


def test_the_table_is_filled():
    table = render.deform_times({"deform": [a_row()]})
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert line[:8] == ["case", "1.000", "1.000", "1.00", "2.000", "3.000", "1.50", "1.50"]
    assert line[-1] == "no / yes"
    assert len(render.deform_times({}).splitlines()) == 2
