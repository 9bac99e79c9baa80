"""Where a figure comes from: command, commit, versions, hardware; and how a result is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

import truncdet
from truncdet._atomic import write_text

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
COMMIT_VARIABLE = "TRUNCDET_COMMIT"
_FOLDERS = ("--out", "--work")  # options with a value
_FLAT_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")


def pick_device(name: str, size: str) -> torch.device:
    """The device of a command line's `--device`; 'auto' is the GPU where there is one.

    Full size on a CPU would take hours, and its figures would lie beside those of GPUs.
    """
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise SystemExit("--device: a GPU must be present for cuda, found none")
    if name == "auto":
        name = "cuda" if present else "cpu"
    if name == "cpu" and size == "full":
        found = "--device cpu" if present else "no GPU"
        raise SystemExit(
            f"--size: full must run on a CUDA GPU, got {found}; to see whether everything runs, "
            "pass --device cpu --size tiny"
        )
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def describe(experiment: str, arguments: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The head of every result file."""
    commit, dirty = find_commit()
    gpu = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "command": command_line(experiment, arguments),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "driver": _driver() if gpu else None,
        "versions": _versions(),
    }


def command_line(experiment: str, arguments: Sequence[str]) -> str:
    """What to type to get the same figures; what changes none of them is left out."""
    kept, skip = [], False
    for argument in arguments:
        name, given, _ = argument.partition("=")
        if not skip and name not in (*_FOLDERS, "--resume"):
            kept.append(argument)
        skip = not skip and name in _FOLDERS and not given
    return shlex.join(["python", f"experiments/{experiment}.py", *kept])


def find_commit() -> tuple[str | None, bool | None]:
    """The measured commit, and whether the tree differed from it (None: not known)."""
    if (ROOT / ".git").exists():
        commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        # A result of an earlier run does not change what is measured.
        status = ("status", "--porcelain", "--", ".", ":(exclude)experiments/results")
        changes = _output("git", "-C", str(ROOT), *status)
        if commit:
            return commit, None if changes is None else bool(changes)
    return os.environ.get(COMMIT_VARIABLE) or None, None


def slug(name: str) -> str:
    """A device's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_result(folder: Path, result: dict[str, Any], name: str | None = None) -> Path:
    """Writes `<name>.json`, all or nothing, and returns its path.

    The name, if none is given, is that of the experiment with the device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or '_'.join((result['experiment'], slug(result['device'])))}.json"
    # JSON has no NaN: a loss that is not finite must have been turned into null before.
    text = json.dumps(result, indent=1, allow_nan=False)
    # Lists of numbers on one line. A line break in JSON is never inside a string.
    text = _FLAT_LIST.sub(lambda found: "[" + re.sub(r"\n *", " ", found[1].strip()) + "]", text)
    write_text(path, text + "\n")
    return path


def _versions() -> dict[str, str | None]:
    build = truncdet.build_info()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "truncdet": build["truncdet"],
        "truncdet_extension": build["extension"],
        "truncdet_cuda_archs": build["cuda_archs"],
        "platform": sys.platform,
    }


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _output(*command: str) -> str | None:
    """The program's output, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
