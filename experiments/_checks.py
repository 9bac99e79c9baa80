"""Conditions that a measurement must meet, kept in the result together with what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Check = dict[str, Any]


def at_most(name: str, value: float, limit: float) -> Check:
    """`value` must not be above `limit`; a NaN fails."""
    return {"name": name, "value": value, "limit": limit, "passed": bool(value <= limit)}


def holds(name: str, value: bool) -> Check:
    """`value` must be true."""
    return {"name": name, "value": value, "limit": True, "passed": value is True}


def missed(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for every condition that is not met."""
    return [
        f"MISSED {check['name']}: {_text(check['value'])}, must be "
        + ("true" if check["limit"] is True else f"at most {_text(check['limit'])}")
        for check in checks
        if check["passed"] is not True
    ]


def conclude(checks: list[Check]) -> int:
    """Prints what was missed and returns the exit code: 1 if anything was, or nothing checked."""
    lines = missed(checks)
    print("\n".join(lines) if lines else f"{len(checks)} conditions met")
    return 1 if lines or not checks else 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
