"""What is covered and what is not, as a table."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict, dataclass
from typing import Any

_OWN = "T1 T2 T3o"
_ROI_ALIGN = "T1 T2 T3o T3c"
_NOT_COVERED = "not covered"
# Frameworks whose kernels bypass the dispatcher; found without importing them.
_KERNELS_ELSEWHERE = {
    "mmcv": ("RoIAlign, RoIPool, DeformConv, MultiScaleDeformableAttention backward",),
    "detectron2": ("ROIAlign", "ROIAlignRotated, DeformConv backward"),
    "nvdiffrast": ("rasterize, interpolate, texture, antialias backward",),
}


@dataclass(frozen=True)
class Row:
    """One operator: what it promises now, and through what."""

    operator: str
    framework: str
    tier: str
    covered_by: str
    mode: str


@dataclass(frozen=True)
class Status:
    """The table that `truncdet.status()` returns; `str()` of it is plain text."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns rows and notes as plain lists and dicts, ready for JSON."""
        return {"rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}

    def print(self) -> None:
        """Prints the table, through rich where it is installed."""
        try:
            from rich.console import Console
            from rich.table import Column, Table
        except ImportError:
            print(self)
            return
        table = Table(*(Column(name, overflow="fold") for name in _HEADER))
        for cells in self._cells():
            table.add_row(*cells)
        console = Console(markup=False)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")

    def __str__(self) -> str:
        cells = [_HEADER, *self._cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row.operator, row.framework, row.tier, row.covered_by, row.mode) for row in self.rows
        ]


_HEADER: tuple[str, ...] = ("operator", "framework", "tier", "covered by", "mode")


def status() -> Status:
    """Returns what truncdet covers right now, operator by operator; it imports no framework.

    Example:
        >>> import truncdet
        >>> truncdet.status().rows[0].operator
        'truncdet.roi_align'

    Returns:
        A `Status` with `rows` (operator, framework, tier, covered_by, mode), `notes`, `print()`
        and `as_dict()`; `covered_by` is 'not covered' where nothing holds.
    """
    from truncdet._switch import notes

    own = (
        Row("truncdet.roi_align", "truncdet", _ROI_ALIGN, "own kernel", "fixed_point"),
        Row("truncdet.scatter_add", "truncdet", _OWN, "own kernel", "fixed_point"),
        Row("truncdet.index_add", "truncdet", _OWN, "own kernel", "fixed_point"),
    )
    return Status(own + _torchvision_rows() + _elsewhere_rows(), notes())


def _torchvision_rows() -> tuple[Row, ...]:
    if not _installed("torchvision"):
        return ()
    integration = sys.modules.get("truncdet.integrations.torchvision")
    mode = integration.mode() if integration is not None else "off"
    tier, by = {
        "fixed_point": (_ROI_ALIGN, "patch: truncdet.roi_align"),
        "truncate": ("T0", "patch: truncdet.wrap"),
        "off": ("-", _NOT_COVERED),
    }[mode]
    patched = ("RoIAlign, roi_align", "MultiScaleRoIAlign", "detection models: box and mask heads")
    others = ("RoIPool", "PSRoIAlign, PSRoIPool", "deform_conv2d")
    return tuple(Row(name, "torchvision", tier, by, mode) for name in patched) + tuple(
        Row(f"{name} backward", "torchvision", "-", _NOT_COVERED, "off") for name in others
    )


def _elsewhere_rows() -> tuple[Row, ...]:
    return tuple(
        Row(operator, framework, "-", _NOT_COVERED, "off")
        for framework, operators in _KERNELS_ELSEWHERE.items()
        if _installed(framework)
        for operator in operators
    )


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
