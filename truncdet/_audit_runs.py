"""`truncdet audit -- COMMAND`: the command run several times under recording, and the verdict."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from truncdet._compare import Verdict, compare
from truncdet._trace_file import Trace, read
from truncdet._trace_launch import TAKEN, environment, written
from truncdet._trace_recorder import Place
from truncdet._trace_ulp import difference


@dataclass(frozen=True)
class Settings:
    """What `truncdet audit` was asked for."""

    runs: int = 2
    level: str = "module"
    every: int = 1
    steps: int | None = None
    values: bool = True


@dataclass
class Outcome:
    """The verdict of all runs, their traces and exit statuses."""

    verdict: Verdict
    traces: list[Trace] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


def audit_command(command: Sequence[str], settings: Settings, folder: Path) -> Outcome:
    """Runs the command as often as asked, compares each run with the first, and, where two differ,
    runs it twice more to keep the values that differ.

    Args:
        command: program and arguments; what is recorded is the Python process that trains.
        settings: see `Settings`.
        folder: where the traces go, `run-0.trace` and so on; they must not exist yet.
    """
    outcome = Outcome(Verdict(None, "could not tell: nothing ran"))
    paths = [folder / f"run-{number}.trace" for number in range(settings.runs)]
    for path in paths:
        outcome.statuses.append(_run(command, settings, path, None))
        trace = written(path)
        if trace is None:
            status = outcome.statuses[-1]
            outcome.verdict = Verdict(
                None,
                "could not tell: no training was recorded (no optimizer whose parameters a called "
                f"module has); the command ended with status {status}",
            )
            return outcome
        outcome.traces.append(read(trace))
    verdicts = [compare(outcome.traces[0], trace) for trace in outcome.traces[1:]]
    outcome.verdict = _worst(verdicts, outcome.statuses)
    if outcome.verdict.equal is False and outcome.verdict.place is not None and settings.values:
        outcome.verdict = _with_values(outcome.verdict, command, settings, folder)
    return outcome


def _worst(verdicts: list[Verdict], statuses: list[int]) -> Verdict:
    """The earliest difference; else doubt; else equality."""
    apart = [v for v in verdicts if v.equal is False]
    if apart:
        return min(apart, key=lambda v: v.place.step if v.place else 0)
    doubt = next((v for v in verdicts if v.equal is None), None)
    if doubt is not None:
        return doubt
    failed = next((status for status in statuses if status != 0), None)
    if failed is not None:
        steps = verdicts[0].steps
        return Verdict(
            None,
            f"could not tell: a run ended with status {failed}, equal in all {steps} steps before",
            steps=steps,
        )
    return verdicts[0]


def _with_values(
    verdict: Verdict, command: Sequence[str], settings: Settings, folder: Path
) -> Verdict:
    """Two more runs that keep the values of the observation that differed."""
    place = verdict.place
    assert place is not None
    kept = []
    for number in range(2):
        path = folder / f"values-{number}.trace"
        _run(command, replace(settings, steps=place.step + 1), path, place)
        trace = written(path)
        values = Path(f"{trace}.values")
        if trace is None or not values.exists():
            return verdict
        kept.append(torch.load(values, weights_only=True)["values"])
    try:
        found = difference(*kept)
    except ValueError:
        return verdict
    return verdict if found.elements == 0 else replace(verdict, difference=found)


def _run(command: Sequence[str], settings: Settings, trace: Path, keep: Place | None) -> int:
    wanted: dict[str, Any] = {
        "level": settings.level,
        "every": settings.every,
        "steps": settings.steps,
        "keep": None if keep is None else [keep.step, list(keep.key), keep.occurrence],
    }
    with tempfile.TemporaryDirectory(prefix="truncdet-") as start:
        env = environment(Path(start), trace, wanted, dict(os.environ))
        try:
            return subprocess.run(list(command), env=env, check=False).returncode
        finally:
            for taken in trace.parent.glob(f"{trace.name}*{TAKEN}"):
                taken.unlink(missing_ok=True)
