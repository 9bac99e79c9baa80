"""doctor: what it reports, and that each piece of advice appears when there is reason for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import truncdet
from truncdet import _doctor as module
from truncdet._cli import main

GOOD = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}


def advised(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> list[str]:
    for name, value in {**GOOD, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return [item.about for item in truncdet.doctor().advice]


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_nothing_is_advised_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advised(monkeypatch) == []
    assert "advice\n  none" in str(truncdet.doctor())


@pytest.mark.parametrize("value", [None, ":0:0"])
def test_cublas(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    assert advised(monkeypatch, CUBLAS_WORKSPACE_CONFIG=value) == ["CUBLAS_WORKSPACE_CONFIG"]


@pytest.mark.parametrize("value", [None, "random"])
def test_hashes(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    assert advised(monkeypatch, PYTHONHASHSEED=value) == ["PYTHONHASHSEED"]


def test_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert advised(monkeypatch) == ["cudnn.deterministic", "cudnn.benchmark"]


def test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.seed()
    assert torch.initial_seed() > module._PROBABLY_CHOSEN
    assert advised(monkeypatch) == ["seeds"]


def test_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._FLAGS, "use_deterministic_algorithms", lambda: True)
    monkeypatch.setitem(module._FLAGS, "fill_uninitialized_memory", lambda: True)
    assert advised(monkeypatch) == ["fill_uninitialized_memory"]


def test_it_reports_versions_and_operators_and_changes_nothing() -> None:
    before = torch.backends.cudnn.deterministic, torch.get_rng_state().tolist()
    report = truncdet.doctor()
    assert (torch.backends.cudnn.deterministic, torch.get_rng_state().tolist()) == before
    found = json.loads(json.dumps(report.as_dict()))
    assert found["schema"] == 1 and found["versions"]["torch"] in torch.__version__
    operators = {row["operator"] for row in found["operators"]["rows"]}
    assert "truncdet.roi_align" in operators
    for heading in ("machine", "versions", "variables", "flags", "seeds", "operators", "advice"):
        assert f"\n{heading}\n" in f"\n{report}"


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "CUBLAS_WORKSPACE_CONFIG" in run(main, ["doctor"]).output
    path = tmp_path / "d.json"
    assert run(main, ["doctor", "--json", str(path)]).exit_code == 0
    assert json.loads(path.read_text())["schema"] == 1
    assert json.loads(run(main, ["doctor", "--json", "-"]).output)["schema"] == 1


def test_under_enable_the_flags_are_set() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "truncdet", "doctor", "--enable", "--json", "-"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    found = json.loads(done.stdout)
    assert found["flags"]["cudnn.deterministic"] is True
    assert found["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
