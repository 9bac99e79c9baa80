"""What is covered and what is not, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from truncdet._frameworks import installed, mode_of

_OWN = "T1 T2 T3o"
_ROI_ALIGN = "T1 T2 T3o T3c"
_NOT_COVERED = "not covered"


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

    Rows are about the whole process; how many layers `convert` has converted is a note.

    Example:
        >>> import truncdet
        >>> truncdet.status().rows[0].operator
        'truncdet.roi_align'

    Returns:
        A `Status` with `rows` (operator, framework, tier, covered_by, mode), `notes`, `print()`
        and `as_dict()`; `covered_by` is 'not covered' where nothing holds.
    """
    from truncdet._switch import failures, notes
    from truncdet.integrations._alive import converted_notes

    own = (
        Row("truncdet.roi_align", "truncdet", _ROI_ALIGN, "own kernel", "fixed_point"),
        Row("truncdet.scatter_add", "truncdet", _OWN, "own kernel", "fixed_point"),
        Row("truncdet.index_add", "truncdet", _OWN, "own kernel", "fixed_point"),
    )
    failed = failures()
    rows = [row for name in _PARTS if installed(name) for row in _rows(name, failed.get(name))]
    return Status(own + _torch_rows() + tuple(rows), (*notes(), *converted_notes()))


_TIERS = {
    "fixed_point": (_ROI_ALIGN, "patch: truncdet.roi_align"),
    "truncate": ("T0", "patch: truncdet.wrap"),
}


@dataclass(frozen=True)
class _Parts:
    """A framework's operators: those that a patch covers, and those that nothing does."""

    patched: tuple[str, ...]
    holes: tuple[str, ...]


_PARTS = {
    "torchvision": _Parts(
        ("RoIAlign, roi_align", "MultiScaleRoIAlign", "detection models: box and mask heads"),
        (
            "RoIPool backward",
            "PSRoIAlign, PSRoIPool backward",
            "deform_conv2d backward",
        ),
    ),
    "mmcv": _Parts(
        ("RoIAlign, roi_align (avg and max)",),
        (
            "RoIPool, RoIAlignRotated, PrRoIPool backward",
            "DeformConv2d, ModulatedDeformConv2d backward",
            "MultiScaleDeformableAttention backward",
            "other operators with atomics, backward",
        ),
    ),
    "mmdet": _Parts(
        ("RoI extractors: box, mask and keypoint heads", "mask targets"),
        ("SimpleRoIAlign, point_sample backward",),
    ),
    "detectron2": _Parts(
        ("ROIAlign, roi_align", "ROIPooler: box, mask and keypoint heads", "mask targets"),
        ("ROIAlignRotated backward", "DeformConv, ModulatedDeformConv backward"),
    ),
    "nvdiffrast": _Parts((), ("rasterize, interpolate, texture, antialias backward",)),
}


# Of torch's own operators; strict=True knows them one by one.
_TORCH_HOLES = (
    "grid_sample: backward",
    "interpolate with antialias: backward",
    "reflect and replicate padding: backward",
    "adaptive_max_pool3d, max_pool3d, avg_pool3d, fractional pooling: backward",
    "ctc_loss, nll_loss of images, embedding: backward",
    "scatter and scatter_reduce with sums, index_reduce, put_",
    "histc, weighted bincount, cumsum, median with indices",
)


def _torch_rows() -> tuple[Row, ...]:
    # Late: the rows come with the kernels, which need all of truncdet.
    from truncdet.integrations._aten_table import OPERATORS

    mode = mode_of("torch")
    covered = tuple(
        Row(operator.part, "torch", operator.tier, f"patch: {operator.by}", mode)
        if mode != "off"
        else Row(operator.part, "torch", "-", _NOT_COVERED, mode)
        for operator in OPERATORS.values()
    )
    return covered + tuple(Row(name, "torch", "-", _NOT_COVERED, "off") for name in _TORCH_HOLES)


def _rows(framework: str, error: str | None) -> list[Row]:
    parts, mode = _PARTS[framework], mode_of(framework)
    tier, by = _TIERS.get(
        mode, ("-", _NOT_COVERED if error is None else f"{_NOT_COVERED}: {error}")
    )
    if framework == "mmdet" and (mode, error) == ("off", None) and mode_of("mmcv") != "off":
        mode = mode_of("mmcv")
        tier, by = _TIERS[mode][0], "patch: mmcv; boxes rounded under autocast"
    return [Row(name, framework, tier, by, mode) for name in parts.patched] + [
        Row(name, framework, "-", _NOT_COVERED, "off") for name in parts.holes
    ]
