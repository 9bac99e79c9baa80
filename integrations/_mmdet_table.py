"""The status table as one run of mmdet sees it: its model's own layers, then open patches."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from truncdet.integrations._alive import converted_notes
from truncdet.integrations._convert import Conversion
from truncdet.integrations._layers import kind_of_class, swap_of
from truncdet.integrations._roi import Recipe

from truncdet._status import Row, Status
from truncdet._status_rows import NOT_COVERED, TIERS

_HERE = "this model"
_CALLED = "mmcv's functions that a model calls, such as mmcv.ops.deform_conv2d, have no row here"


def table(model: nn.Module, conversion: Conversion, status: Status) -> Status:
    """Returns the rows of one model, its holes included, and those of patches that are open."""
    rows = _covered(model)
    rows += [
        Row(f"{left.name} ({left.layer}): {left.reason}", _HERE, "-", NOT_COVERED, "off")
        for left in conversion.skipped
    ]
    rows += [
        Row(f"{left.name} ({left.layer})", _HERE, "-", NOT_COVERED, "off")
        for left in conversion.not_covered
    ]
    # The count of converted layers is about the whole process; the model's have rows.
    notes = [note for note in status.notes if note not in converted_notes()]
    if not rows:
        notes.append("the model has no layer to swap")
    # What a framework has and the model does not is no hole of this run.
    rows += [
        row
        for row in status.rows
        if row.framework in ("torch", "mmcv", "mmdet")
        and not row.covered_by.startswith(NOT_COVERED)
    ]
    return Status(tuple(rows), (*notes, _CALLED))


def _covered(model: nn.Module) -> list[Row]:
    """One row for the layers with the same parent: an extractor has one for each level."""
    count: dict[tuple[str, type, Recipe], int] = {}
    for name, module in model.named_modules():
        swap = swap_of(module)
        if swap is not None:
            key = (name.rpartition(".")[0], swap.original, swap.recipe)
            count[key] = count.get(key, 0) + 1
    return [
        _promised(layer, recipe, _row(parent, layer.__name__, recipe, number))
        for (parent, layer, recipe), number in count.items()
    ]


def _promised(layer: type, recipe: Recipe, row: Row) -> Row:
    """The row of a layer beside RoIAlign; only 'fixed_point' has such ones."""
    kind = kind_of_class(layer)
    if kind is None or recipe.mode != "fixed_point":
        return row
    return replace(row, tier=kind.tier, covered_by=f"swapped in: {kind.by}")


def _row(parent: str, layer: str, recipe: Recipe, number: int) -> Row:
    tier, by = TIERS[recipe.mode]
    mode = f"{recipe.mode} (literal)" if recipe.literal else recipe.mode
    return Row(
        f"{parent} ({number} {layer})", _HERE, tier, by.replace("patch:", "swapped in:"), mode
    )
