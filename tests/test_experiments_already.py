"""The section on what PyTorch repeats as it is: it runs, can fail, and fills its tables."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section = importlib.import_module("_already_section")
render = importlib.import_module("_render")

CPU = torch.device("cpu")


def a_row(**changes):
    row = {"operator": "index_put", "case": "x[index]", "native_ms": 0.5, "truncdet_ms": 0.25}
    return {**row, "native_bits_equal": True, "truncdet_bits_equal": True, **changes}


@pytest.mark.parametrize("case", section.CASES, ids=lambda c: c.case)
def test_cases_run_on_a_cpu_and_repeat(case):
    row = section.measure_already(case.tiny(), CPU, 3)
    assert all(check["passed"] for check in section.check_already(row))
    assert row["native_ms"] > 0 and row["native_bits_equal"] is not None
    assert (row["truncdet_ms"] is None) == (not case.patched)


@pytest.mark.parametrize(
    "case", [c for c in section.CASES if c.patched], ids=lambda c: f"{c.operator} {c.case}"
)
def test_what_is_compared_is_the_patched_operator(case):
    call = case.tiny().call(CPU)
    plain = call()
    with section.aten.patched():
        ours = call()
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert plain.dtype == torch.float32


def test_bits_of_ours_that_differ_are_a_miss_and_those_of_pytorch_are_not():
    def missed(row):
        return [c["name"] for c in section.check_already(row) if not c["passed"]]

    assert missed(a_row(native_bits_equal=False)) == []
    assert missed(a_row(truncdet_bits_equal=False)) == ["index_put, x[index]: bits repeat"]
    assert section.check_already(a_row(truncdet_bits_equal=None)) == []


def test_the_operators_table_says_what_was_measured_and_is_silent_where_nothing_was():
    header, _, *rows = render.operators({}).splitlines()
    assert "repeated" not in header and len(rows) == len(render.ROWS)
    none = render.operators({"a": {"already": [a_row(native_bits_equal=False)]}})
    assert none == render.operators({"a": {}}) == render.operators({})
    header, _, *rows = render.operators({"a": {"already": [a_row()]}}).splitlines()
    assert header.rstrip(" |").endswith("PyTorch's own repeated as well")
    ends = [row.rstrip("|").split("|")[-1].strip() for row in rows]
    assert [end for end in ends if end != "-"] == ["x[index]: 0.500 ms"]
    assert "`index_put`" in rows[ends.index("x[index]: 0.500 ms")]


def test_the_table_of_the_section():
    (_, _, row) = render.already_times({"already": [a_row(truncdet_ms=None)]}).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["index_put", "x[index]", "0.500", "-", "yes / yes"]
    assert len(render.already_times({}).splitlines()) == 2
