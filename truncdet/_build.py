"""Loads the compiled extension if there is one, and says which one it is."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_EXTENSION = Path(__file__).with_name("_C.abi3.so")
_CHOICES = ("auto", "none", "cpu", "cuda")


def requested() -> str:
    """The value of TRUNCDET_EXT: auto, none, cpu or cuda; at run time only `none` has an effect.

    Raises:
        ValueError: if the variable has another value.
    """
    choice = os.environ.get("TRUNCDET_EXT", "auto").strip().lower() or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"TRUNCDET_EXT must be one of {', '.join(_CHOICES)}, got {choice!r}")
    return choice


def _load() -> str:
    if requested() == "none" or not _EXTENSION.exists():
        return "none"
    torch.ops.load_library(str(_EXTENSION))
    return str(torch.ops.truncdet._build_info())


_LOADED = _load()


def has_extension(device_type: str) -> bool:
    """True if compiled kernels for "cpu" or "cuda" are loaded."""
    return _LOADED != "none" if device_type == "cpu" else _LOADED.startswith("cuda")


def build_info() -> dict[str, str]:
    """What is loaded: compiled kernels or the pure-PyTorch reference, which gives the same bits.

    Example:
        >>> truncdet.build_info()["extension"] in ("none", "cpu", "cuda")
        True

    Returns:
        A dictionary of strings: "extension" ("none", "cpu" or "cuda"), "cuda_archs" (compute
        capabilities the CUDA kernels were compiled for, empty without them), "path" of the loaded
        file (empty if none), "torch" and "truncdet" versions.
    """
    from truncdet._version import __version__

    kind, _, archs = _LOADED.partition(":")
    return {
        "extension": kind,
        "cuda_archs": archs,
        "path": "" if kind == "none" else str(_EXTENSION),
        "torch": str(torch.__version__),
        "truncdet": __version__,
    }
