"""The names of the modes, the same in functions, configs, command lines and reports."""

from __future__ import annotations

from collections.abc import Iterable

MODES = ("fixed_point", "truncate", "snap", "off")


def check_mode(mode: object, where: str, allowed: Iterable[str] = MODES) -> str:
    """Returns `mode` if it is one of `allowed`; else ValueError naming `where` and the choices."""
    names = tuple(allowed)
    if mode not in names:
        raise ValueError(f"{where}: mode must be one of {', '.join(names)}, got {mode!r}")
    return str(mode)
