"""The flags of torch and cuBLAS that a repeatable program needs, set so that they can be undone.

TF32 stays as the user set it: it changes accuracy, not repeatability. The global
`torch.use_deterministic_algorithms` stays too: it is much slower in detectors, and replaces
torchvision's RoIAlign by one with other values outside the map.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_FIXED = (":4096:8", ":16:8")  # the two that NVIDIA documents as deterministic

_cuda: Any = torch.cuda


def set_flags(undo: ExitStack) -> list[str]:
    """Sets them, registers with `undo` what puts them back, and returns what is to be said."""
    _set(undo, torch.backends.cudnn, "deterministic", True)
    _set(undo, torch.backends.cudnn, "benchmark", False)
    # Filling every new tensor costs time and makes no sum repeatable.
    _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
    found = os.environ.get(CUBLAS)
    if found is None:
        os.environ[CUBLAS] = CUBLAS_FIXED[0]
        undo.callback(os.environ.pop, CUBLAS, None)
        if _cuda.is_initialized():
            return [
                f"{CUBLAS} was set after CUDA was initialised: too late if a matrix product ran "
                "before; set it before Python starts"
            ]
    elif found not in CUBLAS_FIXED:
        return [f"{CUBLAS} is {found}, not {' or '.join(CUBLAS_FIXED)}, and is left as set"]
    return []


def _set(undo: ExitStack, owner: Any, name: str, value: bool) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
