"""The four ways in overhead.py: measured, checked, drawn."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
section: Any = importlib.import_module("_ways_section")
picture: Any = importlib.import_module("_ways_picture")
render: Any = importlib.import_module("_render")


def a_row(**ms: float | None) -> dict[str, Any]:
    times = {"native": 1.0, "truncdet": 0.5, "trick": 2.0, "switch": 50.0, **ms}
    return {"name": "case", "ms": times, "why": {}}


def missed(row: dict[str, Any], with_limits: bool = True) -> list[str]:
    return [check["name"] for check in section.check_ways(row, with_limits) if not check["passed"]]


@pytest.mark.parametrize("case", section.CASES, ids=lambda case: case.name)
def test_both_functions_of_a_case_are_the_same_operator(case: Any) -> None:
    torch.manual_seed(0)
    leaf, rest = case.make(torch.device("cpu"), True)
    leaf.requires_grad_()
    outputs = [function(leaf, *rest) for function in (case.native, case.ours)]
    torch.testing.assert_close(*outputs)
    grad = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(out, leaf, grad)[0] for out in outputs]
    torch.testing.assert_close(*gradients)


def test_ways_that_are_slower_than_others_are_missed() -> None:
    assert not missed(a_row()) and not missed(a_row(switch=None))
    assert missed(a_row(truncdet=2.1)) == ["case: time by the trick's"]
    assert missed(a_row(truncdet=1.9, switch=1.8)) == ["case: time by the switch's"]
    assert missed(a_row(truncdet=0.0), False) == ["case: timed"]


def test_the_table_gives_ratios_and_reasons(tmp_path: Path) -> None:
    without = a_row(switch=None) | {"why": {"switch": "no deterministic form"}}
    text = render.ways_times({"ways": [a_row(), without]})
    assert "0.500 (0.50)" in text and "50.000 (50.00)" in text
    assert "none: no deterministic form" in text
    picture.save(tmp_path / "x.png", [a_row(), without])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
