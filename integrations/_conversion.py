"""The report of `convert`: what changed, what was left and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One converted layer: its name in the model, the mode it had, the mode it has, its class."""

    name: str
    was: str
    mode: str
    layer: str


@dataclass(frozen=True)
class Left:
    """One layer that was left as it is: its name in the model, why, its class."""

    name: str
    reason: str
    layer: str


@dataclass(frozen=True)
class Conversion:
    """What `convert` did; `len()` and iteration are those of `changed`, `str()` is a table.

    Example:
        >>> print(Conversion((Change("pool", "off", "fixed_point", "torchvision.ops.RoIAlign"),)))
        layer  class                     was  mode
        pool   torchvision.ops.RoIAlign  off  fixed_point
    """

    changed: tuple[Change, ...] = ()
    skipped: tuple[Left, ...] = ()  # RoI layers that it cannot convert
    not_covered: tuple[Left, ...] = ()  # other layers whose gradients vary from run to run
    precise: tuple[str, ...] = ()  # extractors that no longer round boxes to the features' type

    def __len__(self) -> int:
        return len(self.changed)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changed)

    def __str__(self) -> str:
        cells = [("layer", "class", "was", "mode")]
        cells += [(_shown(c.name), c.layer, c.was, c.mode) for c in self.changed]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        if not self.changed:
            lines = ["no layer changed"]
        lines += [f"skipped: {_shown(s.name)} ({s.layer}): {s.reason}" for s in self.skipped]
        lines += [f"not covered: {_shown(n.name)} ({n.layer})" for n in self.not_covered]
        return "\n".join(lines)


def _shown(name: str) -> str:
    return name or "(the model itself)"
