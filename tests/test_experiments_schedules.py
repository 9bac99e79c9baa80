"""schedules.py: what it picks, what it refuses and what it prints."""

import importlib
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
schedules = importlib.import_module("schedules")


def a_row(*times):
    """A row of (schedule, time, whether bits are equal)."""
    names = ("schedule", "backward_ms", "bits_equal")
    found = [dict(zip(names, time, strict=True)) for time in times]
    return {"name": "case", "native_ms": 2.0, "schedules": found}


USUAL, OTHER = list(schedules.USUAL), [0, 0, 4]


def test_the_fastest_of_equal_bits_is_best():
    row = a_row((USUAL, 3.0, True), (OTHER, 1.0, True))
    assert schedules.best(row)["schedule"] == OTHER
    row = a_row((USUAL, 3.0, True), (OTHER, 1.0, False))
    assert schedules.best(row)["schedule"] == USUAL
    assert schedules.unequal([row]) == [f"case: {OTHER}"]
    with pytest.raises(ValueError, match="must have a schedule of equal bits"):
        schedules.best(a_row((USUAL, 3.0, False)))


def test_the_table_has_ratios():
    console = Console(record=True, width=120)
    console.print(schedules.tabulate([a_row((USUAL, 3.0, True), (OTHER, 1.0, True))]))
    text = console.export_text()
    assert "1.500" in text and "0.500" in text and str(OTHER) in text


def test_cases_and_schedules():
    cases = schedules.pick_cases()
    assert {case.operator for case in cases} == {"ps_roi_align", "ps_roi_pool"}
    assert schedules.USUAL in schedules.SCHEDULES


def test_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(schedules.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        schedules.main([])
    assert "a GPU must be present" in capsys.readouterr().err
