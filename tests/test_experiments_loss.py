"""The loss section of overhead.py: it runs, its condition can fail, its table is filled."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section = importlib.import_module("_loss_section")
render = importlib.import_module("_render")


def a_row(**ours):
    truncdet = {"ms": 3.0, "bits_equal": True, "peak_bytes": 3 << 20, **ours}
    native = {"ms": 2.0, "bits_equal": False, "peak_bytes": 1 << 20}
    slow = {"ms": 9.0, "bits_equal": True, "peak_bytes": None}
    return {
        "name": "case",
        "native": {"kernel": native, "composition": slow},
        "native_name": "kernel",
        "truncdet": truncdet,
        "ratio": truncdet["ms"] / 2.0,
    }


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_cases_run_on_a_cpu(case):
    row = section.measure_loss(case.tiny(), torch.device("cpu"), 3)
    assert all(check["passed"] for check in section.check_loss(row))
    assert row["ratio"] > 0 and row["native_name"] in row["native"]


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.name)
def test_what_is_compared_is_the_same_operator(case):
    """Values; where scores are equal, indices may differ from the native ones."""
    calls = case.tiny().calls(torch.device("cpu"))
    ours = calls.pop("truncdet")()
    for call in calls.values():
        for a, b in zip(ours, call(), strict=True):
            if b.is_floating_point():
                assert (a - b).norm() <= 1e-5 * b.norm()
            else:
                assert a.shape == b.shape


def test_the_condition_can_fail():
    assert section.check_loss(a_row())[0]["passed"]
    (check,) = section.check_loss(a_row(bits_equal=False))
    assert (check["name"], check["passed"]) == ("case: bits repeat", False)


def test_the_table_names_the_native_kernel_and_the_others():
    table = render.loss_times({"loss": [a_row()]})
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert line[:6] == ["case", "kernel", "2.000", "3.000", "1.50", "composition 9.000"]
    assert line[6:] == ["1.0", "3.0", "no / yes"]
    assert len(render.loss_times({}).splitlines()) == 2
