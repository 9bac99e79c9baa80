"""Runs in processes of their own, one after the other or several at once, with progress bars."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from _coco_record import PROGRESS
from _coco_run import RUN, SPEC, STOPPED
from _coco_spec import Spec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from truncdet._atomic import write_text

PROGRAM = Path(__file__).with_name("_coco_run.py")
LOG = "log.txt"
POLL_S = 0.2
PATIENCE_S = 60.0  # for a child that was told to end and writes its checkpoint
TAIL = 20  # lines of the log of a run that failed


@dataclasses.dataclass(frozen=True)
class Job:
    """A run and the name of its folder."""

    name: str
    spec: Spec


@dataclasses.dataclass
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    bar: Any


class Children:
    """Starts runs and waits for them.

    Args:
        work: the folder with a folder for every run.
        origin: commit, versions and device, which must be equal for a finished run to be kept.
        keep_going: False ends everything; unfinished runs can be resumed.
        say: prints a line.
    """

    def __init__(
        self,
        work: Path,
        origin: dict[str, Any],
        keep_going: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.work, self.origin = work, origin
        self.keep_going, self.say = keep_going, say

    def finished(self, job: Job) -> dict[str, Any] | None:
        """The run, if an earlier command left it.

        Raises:
            ValueError: the folder holds another run than the one that is wanted.
        """
        folder = self.work / job.name
        if not (folder / SPEC).exists():
            return None
        left, wanted = _left(folder / SPEC, ("spec", "origin")), self._description(job)
        for part in (left, wanted):
            part["spec"].pop("stop_at", None)
        if left != wanted:
            odd = _differences({**left["spec"], **left["origin"]}, wanted["spec"] | self.origin)
            raise ValueError(f"--resume: {folder} must hold the same run, got another {odd}")
        path = folder / RUN
        return _left(path, ("versions",)) if path.exists() else None

    def run(
        self, jobs: Sequence[Job], at_once: int, done: Callable[[Job, dict[str, Any]], None]
    ) -> dict[str, str]:
        """Carries out what is not finished yet; calls `done` after each, in the order of the ends.

        Returns:
            What went wrong, by the name of the run: '' for one that stopped, as it was told to.
        """
        waiting, troubles = [], dict[str, str]()
        for job in jobs:
            found = self.finished(job)
            if found is None:
                waiting.append(job)
            else:
                self.say(f"{job.name}: kept")
                done(job, found)
        active: list[_Child] = []
        with _progress() as progress:
            try:
                while active or (waiting and self.keep_going()):
                    while waiting and len(active) < at_once and self.keep_going():
                        active.append(self._start(waiting.pop(0), progress))
                    time.sleep(POLL_S)
                    for child in [c for c in active if c.process.poll() is not None]:
                        active.remove(child)
                        self._conclude(child, progress, done, troubles)
                    for child in active:
                        self._show(child, progress)
                    if not self.keep_going():
                        break
            finally:
                self._end(active)
        return troubles

    def _description(self, job: Job) -> dict[str, Any]:
        return {"spec": job.spec.as_json(), "origin": self.origin}

    def _start(self, job: Job, progress: Progress) -> _Child:
        folder = self.work / job.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROGRESS).unlink(missing_ok=True)
        write_text(folder / SPEC, json.dumps(self._description(job)))
        # Whatever happens, its lines are read from the log. A session of its own: Ctrl-C reaches
        # the command alone, which then ends its children in order.
        log = (folder / LOG).open("wb")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(job.spec),
        )
        bar = progress.add_task(job.name, total=job.spec.steps, note="starts")
        return _Child(job, process, log, bar)

    def _conclude(
        self,
        child: _Child,
        progress: Progress,
        done: Callable[[Job, dict[str, Any]], None],
        troubles: dict[str, str],
    ) -> None:
        child.log.close()
        progress.remove_task(child.bar)
        job, code = child.job, child.process.returncode
        folder = self.work / job.name
        if code == 0:
            found = json.loads((folder / RUN).read_text())
            self.say(f"{job.name}: done in {found['seconds']:.0f} s{_ap(found)}")
            done(job, found)
        elif code == STOPPED:
            troubles[job.name] = ""
        else:
            lines = (folder / LOG).read_text(errors="replace").splitlines()[-TAIL:]
            self.say("\n".join([f"{job.name}: FAILED with exit status {code}", *lines]))
            troubles[job.name] = f"exit status {code}: {lines[-1] if lines else 'no output'}"

    def _show(self, child: _Child, progress: Progress) -> None:
        try:
            note = json.loads((self.work / child.job.name / PROGRESS).read_text())
        except (OSError, ValueError):
            return  # not there yet, or being written
        loss = "" if note["loss"] is None else f", loss {note['loss']:.3f}"
        progress.update(child.bar, completed=note["step"], note=f"{note['phase']}{loss}")

    def _end(self, active: list[_Child]) -> None:
        for child in active:
            child.process.terminate()
        until = time.monotonic() + PATIENCE_S
        for child in active:
            try:
                child.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.log.close()


def _left(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """What an earlier command wrote to a file, if it is whole."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(key in found for key in keys):
        raise ValueError(
            f"--resume: {path} must be a file that coco_map.py wrote, got something else; without "
            "its folder that run is made anew"
        )
    return found


def _progress() -> Progress:
    console = Console()
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        # A bar is for eyes; a log gets one line per run instead.
        disable=not console.is_terminal,
        transient=True,
    )


def _environment(spec: Spec) -> dict[str, str]:
    changed = {"PYTHONHASHSEED": str(spec.seed), "PYTHONUNBUFFERED": "1"}
    if spec.device == "cpu":
        changed["CUDA_VISIBLE_DEVICES"] = ""  # mmengine takes a GPU where it sees one
    return {**os.environ, **changed}


def _ap(found: dict[str, Any]) -> str:
    figures = found.get("stats", {}).items()
    return "".join(f", {kind} AP {stats['AP']}" for kind, stats in figures)


def _differences(left: dict[str, Any], wanted: dict[str, Any]) -> str:
    odd = [key for key in wanted if left.get(key) != wanted[key]]
    return ", ".join(f"{key} ({left.get(key)}, wanted {wanted[key]})" for key in odd)
