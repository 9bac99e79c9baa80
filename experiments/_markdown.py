"""Tables in markdown, and how numbers stand in them."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1 << 20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it also reads as plain text."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def error(value: float) -> str:
    return f"{value:.1e}"


def mib(value: float | None) -> str:
    return number(None if value is None else value / MIB, 1)


def yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]
