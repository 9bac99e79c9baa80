"""Interpolation as products of one-dimensional taps, in plain tensor operations.

What csrc/taps.h states for one sample, for all samples at once. Axis 0 is x, the innermost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """Taps along one axis: lists over the taps, of tensors of any one shape."""

    cell: list[Tensor]  # -1 outside
    weight: list[Tensor]
    slope: list[Tensor]  # d weight / d coordinate


def make_axis(cell: list[Tensor], weight: list[Tensor], slope: list[Tensor], ok: Tensor) -> Axis:
    """An axis whose samples outside `ok` have no taps, and zeros for weights and slopes."""
    return Axis(
        [c.masked_fill(~ok, -1) for c in cell],
        [w.masked_fill(~ok, 0) for w in weight],
        [s.masked_fill(~ok, 0) for s in slope],
    )


def linear_taps(x: Tensor, size: Tensor | int) -> Axis:
    """The two cells beside the coordinates `x`, in units of cells.

    At -1 the weights are zero but a slope is not, as in PyTorch.
    """
    ok = (x >= -1) & (x < size)  # false for NaN
    base = x.masked_fill(~ok, 0).floor()
    first = base.to(torch.int64)
    right = x - base
    second = torch.where(first + 1 < size, first + 1, -1)
    return make_axis(
        [first, second],
        [1 - right, right],
        [torch.full_like(x, -1), torch.full_like(x, 1)],
        ok,
    )


def each_tap(
    axes: Sequence[Axis], sizes: Sequence[Tensor | int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(cell, weight, inside) of every tap; the weight multiplies the outermost axis first."""
    outward = list(zip(axes, sizes, strict=True))[::-1]
    for chosen in itertools.product(*(range(len(axis.cell)) for axis, _ in outward)):
        (outermost, _), k = outward[0], chosen[0]
        cell, weight = outermost.cell[k], outermost.weight[k]
        inside = cell >= 0
        for (axis, size), k in zip(outward[1:], chosen[1:], strict=True):
            cell = cell * size + axis.cell[k]
            weight = weight * axis.weight[k]
            inside = inside & (axis.cell[k] >= 0)
        yield cell.masked_fill(~inside, 0), weight, inside


def interpolate(
    axes: Sequence[Axis],
    sizes: Sequence[Tensor | int],
    read: Callable[[Tensor, Tensor], Tensor],
    spread: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The interpolated values and their derivatives along every axis.

    `read(cell, inside)` gives the values of a tap, zero where it is outside; `spread` brings a
    weight to their shape.
    """
    values = (read(cell, inside) for cell, _, inside in each_tap(axes, sizes))

    def along(a: int) -> tuple[Tensor, list[Tensor]]:
        """Contracts axis `a` and all inside it; `values` come in the order of these loops."""
        if a < 0:
            return next(values), []
        total: Tensor | None = None
        slopes: list[Tensor] = []
        for weight, slope in zip(axes[a].weight, axes[a].slope, strict=True):
            inner, inner_slopes = along(a - 1)
            terms = [inner_slope * spread(weight) for inner_slope in inner_slopes]
            terms.append(inner * spread(slope))
            if total is None:
                total, slopes = torch.zeros_like(inner), [torch.zeros_like(inner)] * (a + 1)
            total = total + inner * spread(weight)
            slopes = [slope + term for slope, term in zip(slopes, terms, strict=True)]
        assert total is not None
        return total, slopes

    return along(len(axes) - 1)
