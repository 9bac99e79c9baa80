"""record_cost: it runs, and each of its conditions can be missed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
experiment: Any = importlib.import_module("record_cost")

EQUAL = {"equal": True, "steps_compared": 100}
NAMED = {"equal": False, "phase": "backward", "op": "GeneratedBackwardFor_torchvision_roi_align"}
GOOD = {
    "steps": 100,
    "truncdet_verdict": EQUAL,
    "plain_verdict": NAMED,
    "ratio": 1.25,
    "more_bytes": 64 << 20,
}


def missed(**changes: Any) -> list[str]:
    found = experiment.check({**GOOD, **changes}, True)
    return [check["name"] for check in found if not check["passed"]]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"truncdet_verdict": {**EQUAL, "equal": None}}, "under truncdet the recordings are equal"),
        ({"truncdet_verdict": {**EQUAL, "steps_compared": 99}}, "all steps were compared"),
        (
            {"plain_verdict": {**NAMED, "op": "ConvolutionBackward0"}},
            "plain: roi_align's backward is named first",
        ),
        (
            {"plain_verdict": {**NAMED, "phase": "forward"}},
            "plain: roi_align's backward is named first",
        ),
        ({"ratio": 1.26}, "recorded step by the plain one"),
        ({"more_bytes": (64 << 20) + 1}, "bytes more at the peak"),
    ],
)
def test_conditions_can_be_missed(changes: dict[str, Any], name: str) -> None:
    assert missed() == []
    assert missed(**changes) == [name]


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--steps", "2", "--out", str(tmp_path)]
    assert experiment.main(arguments) == 0
    result = json.loads((tmp_path / "record_cost_cpu.json").read_text())
    assert result["observations_per_step"] > 500
    assert "equal in all 2 steps" in capsys.readouterr().out
