"""Checkpoints from which a run goes on as if it had not been stopped."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _coco_spec import Spec

from truncdet._atomic import write_bytes

NAME = "checkpoint.pt"


def save(folder: Path, spec: Spec, state: dict[str, Any]) -> None:
    """Writes state and random states, all or nothing; the one before is replaced."""
    content = io.BytesIO()
    torch.save({"training": spec.training(), "random": _random_states(), **state}, content)
    write_bytes(folder / NAME, content.getvalue())


def load(folder: Path, spec: Spec) -> dict[str, Any] | None:
    """The state of the last checkpoint, with the random states put back; None if there is none.

    Raises:
        ValueError: it is of another training.
    """
    path = folder / NAME
    if not path.exists():
        return None
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    if found["training"] != spec.training():
        raise ValueError(f"--resume: {path} must be of the same training, got another's")
    states = found["random"]
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    return found


def remove(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
