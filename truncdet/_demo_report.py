"""`report.json` of the demo: its layout, and how it is written without harming foreign files."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import truncdet
from truncdet._atomic import write_text
from truncdet._demo_options import DemoError, DemoOptions
from truncdet._demo_record import RunRecord, compare_modes

SCHEMA = 1
PROGRAM = "truncdet demo"
REPORT = "report.json"
PICTURE = "loss_difference.png"
_PACKAGES = ("truncdet", "torch", "torchvision", "numpy", "pillow", "pycocotools", "matplotlib")


@dataclass
class Report:
    """All that is written; `write` may be called at any time and leaves a valid file.

    `perturbation` says what is different in run B (None: nothing); `peak_memory` what `peak_bytes`
    counts; `data` which images were trained on and which the AP is of.
    """

    options: DemoOptions
    device: str
    device_name: str
    data: dict[str, Any]
    perturbation: str | None
    peak_memory: str
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.runs) == 2 * len(self.options.modes) and all(r.complete for r in self.runs)

    def as_json(self) -> dict[str, Any]:
        compared = compare_modes(self.runs, self.options.modes)
        return {
            "schema": SCHEMA,
            "program": PROGRAM,
            "complete": self.complete,
            "command": self.options.command(),
            "device": self.device,
            "device_name": self.device_name,
            "versions": _versions(),
            "seed": self.options.seed,
            "steps": self.options.steps,
            "batch": self.options.batch,
            "image_size": self.options.image_size,
            "data": self.data,
            "perturbation": self.perturbation,
            "peak_memory": self.peak_memory,
            "runs": [run.as_json() for run in self.runs],
            # null means "none among the steps compared"; in a partial report these may be few.
            "first_difference": {mode: found.first for mode, found in compared.items()},
            "first_weights_difference": {mode: c.weights_step for mode, c in compared.items()},
            "compared_steps": {mode: found.steps for mode, found in compared.items()},
        }

    def write(self) -> None:
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        try:
            write_text(self.options.out / REPORT, text + "\n")
        except OSError as error:
            raise DemoError(
                f"truncdet demo: --out must be a folder to write in, got {self.options.out}"
                f" ({error.strerror})"
            ) from error


def prepare_out(folder: Path) -> None:
    """Creates the folder, and makes sure that what would be replaced is an earlier demo's.

    An earlier picture is removed: it must not stand beside the report of another run.

    Raises:
        DemoError: the folder cannot be made or holds a file of that name from someone else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"truncdet demo: --out must be a folder, got {folder} ({error.strerror})"
        ) from error
    for name, is_ours in ((REPORT, _is_our_report), (PICTURE, _is_our_picture)):
        path = folder / name
        if path.exists() and not is_ours(path):
            raise DemoError(
                f"truncdet demo: --out must not hold a {name} of other origin, got {path}"
            )
    (folder / PICTURE).unlink(missing_ok=True)


def _is_our_report(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("program") == PROGRAM


def _is_our_picture(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            # The text chunk that the plot writes comes right after the header.
            return PROGRAM.encode() in file.read(4096)
    except OSError:
        return False


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # What was loaded counts, not what the installer says.
    versions["torch"] = str(torch.__version__)
    versions["cuda"] = torch.version.cuda
    versions["truncdet_extension"] = str(truncdet.build_info()["extension"])
    return versions
