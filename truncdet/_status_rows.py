"""The rows of the status table: what each framework has, and which of it is covered now.

Of torch and torchvision, whose operators go through the dispatcher, what is not covered is what the
strict checker's table has beyond the patches'.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

import torch

from truncdet._frameworks import integration, mode_of
from truncdet._operators import BY_KERNEL, ROWS

_ROI_ALIGN = "T1 T2 T3o T3c"
NOT_COVERED = "not covered"


@dataclass(frozen=True)
class Row:
    """One operator: what it promises now, and through what."""

    operator: str
    framework: str
    tier: str
    covered_by: str
    mode: str


TIERS = {
    "fixed_point": (_ROI_ALIGN, "patch: truncdet.roi_align"),
    "truncate": ("T0", "patch: truncdet.wrap"),
}


@dataclass(frozen=True)
class _Parts:
    """A framework's operators: those that a patch covers, and those that nothing does."""

    patched: tuple[str, ...]
    holes: tuple[str, ...]


PARTS = {
    "torchvision": _Parts(
        ("RoIAlign, roi_align", "MultiScaleRoIAlign", "detection models: box and mask heads"),
        (),  # by their kernels, see _torchvision_rows
    ),
    "mmcv": _Parts(
        ("RoIAlign, roi_align (avg and max)",),
        (
            "PrRoIPool, RiRoIAlignRotated, DeformRoIPool: backward",
            "other operators with atomics: backward",
        ),
    ),
    "mmdet": _Parts(
        ("RoI extractors: box, mask and keypoint heads", "mask targets"),
        (),
    ),
    "detectron2": _Parts(
        ("ROIAlign, roi_align", "ROIPooler: box, mask and keypoint heads", "mask targets"),
        ("nms_rotated: order of equal scores",),
    ),
    "nvdiffrast": _Parts((), ("rasterize, interpolate, texture, antialias backward",)),
}


def own_rows() -> tuple[Row, ...]:
    """truncdet's own operators, whatever is patched."""
    return tuple(
        Row(f"truncdet.{row.name}", "truncdet", row.tier, "own kernel", row.mode) for row in ROWS
    )


def _holes(namespace: str) -> dict[str, list[str]]:
    """What the strict checker knows of a namespace, less what is covered for all arguments.

    Lines of the table, each with its kernels: those that differ in the number of dimensions alone.
    """
    from truncdet._strict_table import TABLE
    from truncdet.integrations._aten_table import BY_NAME

    alike: dict[tuple[str, str], list[str]] = {}
    for kernel, entry in TABLE.items():
        operator = BY_NAME.get(kernel)
        if kernel.startswith(f"{namespace}::") and (operator is None or operator.left):
            calls = entry.calls if operator is None else operator.left
            alike.setdefault((re.sub(r"\dd(?=_|$)", "", kernel), calls), []).append(kernel)
    return {_line(kernels, calls): kernels for (_, calls), kernels in alike.items()}


def _line(kernels: list[str], calls: str) -> str:
    names = [kernel.partition("::")[2].removeprefix("_") for kernel in kernels]
    what = ": backward" if names[0].endswith("_backward") else ""
    plain = ", ".join(n.removesuffix("_backward").removesuffix("_forward") for n in names)
    return f"{plain} {calls}".rstrip() + what


def torch_rows() -> tuple[Row, ...]:
    """torch's own operators: those of the patch, and those of the strict checker beyond them."""
    # Late: the rows come with the kernels, which need all of truncdet.
    from truncdet.integrations._aten_table import OPERATORS

    mode = mode_of("torch")
    covered = tuple(
        Row(operator.part, "torch", operator.tier, f"patch: {operator.by}", mode)
        if mode != "off"
        else Row(operator.part, "torch", "-", NOT_COVERED, mode)
        for operator in OPERATORS.values()
    )
    return covered + tuple(Row(name, "torch", "-", NOT_COVERED, "off") for name in _holes("aten"))


def _torchvision_rows(mode: str) -> list[Row]:
    """torchvision's other operators, which its patch covers by their kernels."""
    module = integration("torchvision")
    rows = []
    for name, kernels in _holes("torchvision").items():
        ours = BY_KERNEL.get(kernels[0])
        if ours is not None and ours.name == "roi_align":
            continue  # has rows of its own
        covered = mode != "off" and module.covers(kernels[0], torch.float32)
        if covered and ours is not None:
            rows.append(Row(name, "torchvision", ours.tier, f"patch: truncdet.{ours.name}", mode))
        else:
            rows.append(Row(name, "torchvision", "-", NOT_COVERED, "off"))
    return rows


# Modules with a table of operators that a patch covers in mode 'fixed_point' alone.
_TABLES = {name: f"truncdet.integrations._{name}_table" for name in ("mmcv", "detectron2")}


def _substituted_rows(framework: str, mode: str, otherwise: str) -> list[Row]:
    """A framework's operators beside RoIAlign; `otherwise` says what holds where nothing does."""
    if framework not in _TABLES:
        return []
    table = importlib.import_module(_TABLES[framework]).TABLE
    if mode == "fixed_point":
        return [
            Row(row.part, framework, row.tier, f"patch: {row.by}", mode)
            for row in table
            if not row.lacking
        ]
    return [Row(row.part, framework, "-", otherwise, "off") for row in table]


def framework_rows(framework: str, error: str | None) -> list[Row]:
    """The operators of an installed framework; `error` if it could not be imported."""
    parts, mode = PARTS[framework], mode_of(framework)
    otherwise = NOT_COVERED if error is None else f"{NOT_COVERED}: {error}"
    tier, by = TIERS.get(mode, ("-", otherwise))
    if framework == "mmdet" and (mode, error) == ("off", None) and mode_of("mmcv") != "off":
        mode = mode_of("mmcv")
        tier, by = TIERS[mode][0], "patch: mmcv; boxes rounded under autocast"
    return (
        [Row(name, framework, tier, by, mode) for name in parts.patched]
        + _substituted_rows(framework, mode, otherwise)
        + [Row(name, framework, "-", NOT_COVERED, "off") for name in parts.holes]
        + (_torchvision_rows(mode) if framework == "torchvision" else [])
    )
