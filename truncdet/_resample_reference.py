"""The gradient of interpolation and of adaptive average pooling in plain tensor operations.

What _resample.py defines, one axis after the other, inner sums first: the reference of the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import fixedpoint
from truncdet._roi_align_reference import narrow

LINEAR, CUBIC, AVERAGE = range(3)
_TAPS = (2, 4, 1)


class Axis(NamedTuple):
    """One axis: its sizes, the caller's scale (0 if none) and whether it is copied."""

    cells: int
    outputs: int
    scale: float
    copied: bool


class Weights(NamedTuple):
    """By output: the first cell it uses and the weights from there on; by cell: its outputs."""

    first: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor


def backward(
    grad: Tensor,
    depth: int,
    height: int,
    width: int,
    kind: int,
    align_corners: bool,
    scale_depth: float,
    scale_height: float,
    scale_width: float,
    copied: int,
) -> Tensor:
    """The primitive, one axis after the other: x, y and then z."""
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    cells, scales = (depth, height, width), (scale_depth, scale_height, scale_width)
    for number in (2, 1, 0):
        axis = Axis(
            cells[number], grad.shape[number + 1], scales[number], bool(copied >> number & 1)
        )
        weights = axis_weights(axis, kind, align_corners, values)
        values = _gather_axis(values, number + 1, kind, weights)
    return narrow(values, grad.dtype).contiguous()


def _gather_axis(values: Tensor, dim: int, kind: int, weights: Weights) -> Tensor:
    """Replaces the outputs along `dim` by the cells, adding in ascending order of the outputs."""
    shape = list(values.shape)
    shape[dim] = len(weights.begin)
    sums = values.new_zeros(shape)
    cell = torch.arange(shape[dim], device=values.device)
    along = [1] * values.dim()
    along[dim] = -1
    longest = int((weights.end - weights.begin).max()) if sums.numel() else 0
    for step in range(longest):
        inside = weights.begin + step < weights.end
        output = (weights.begin + step).masked_fill(~inside, 0)
        tap = torch.zeros_like(cell) if kind == AVERAGE else cell - weights.first[output]
        inside &= (tap >= 0) & (tap < _TAPS[kind])
        weight = weights.values[output, tap.masked_fill(~inside, 0)].masked_fill(~inside, 0)
        weight = weight.reshape(along)
        picked = values.index_select(dim, output)
        term = picked / weight if kind == AVERAGE else weight * picked
        sums = torch.where(weight != 0, sums + term, sums)
    return sums


def axis_weights(axis: Axis, kind: int, align_corners: bool, like: Tensor) -> Weights:
    """Every weight of an axis, in the type and on the device of `like`."""
    output = torch.arange(axis.outputs, device=like.device)
    cell = torch.arange(axis.cells, device=like.device)
    if axis.copied:
        values = torch.zeros(axis.outputs, _TAPS[kind], dtype=like.dtype, device=like.device)
        values[:, 0] = 1
        return Weights(output, values, cell, cell + 1)
    if kind == AVERAGE:
        begin, end = windows(axis.outputs, axis.cells, like.device)
        size = (end - begin).to(like.dtype)
        return Weights(begin, size[:, None], *windows(axis.cells, axis.outputs, like.device))
    at = _source_position(axis, kind, align_corners, output, like)
    below = at.floor()
    t, u = at - below, 1 - (at - below)
    steps: tuple[int, ...]
    if kind == LINEAR:
        steps, parts = (0, 1), [u, t]
    else:
        steps, parts = (-1, 0, 1, 2), [_far(t + 1), _near(t), _near(u), _far(u + 1)]
    # Neighbours outside are the border cell, whose weight is the sum of theirs.
    inside = [(below.to(torch.int64) + step).clamp(0, axis.cells - 1) for step in steps]
    values = torch.zeros(axis.outputs, len(parts), dtype=like.dtype, device=like.device)
    for neighbour, part in zip(inside, parts, strict=True):
        values[output, neighbour - inside[0]] += part
    # The first cell of an output never decreases with the output: each step that leads to it is
    # monotone, and so is rounding. The outputs that reach a cell are therefore one range.
    begin = torch.searchsorted(inside[0], cell - len(parts) + 1, right=False)
    end = torch.searchsorted(inside[0], cell, right=True)
    return Weights(inside[0], values, begin, end)


def _source_position(
    axis: Axis, kind: int, align_corners: bool, output: Tensor, like: Tensor
) -> Tensor:
    """Where the centres of the outputs fall among the cells, as torch computes it."""
    cells, outputs = (torch.tensor(n, dtype=like.dtype) for n in axis[:2])
    if align_corners:
        scale = (cells - 1) / (outputs - 1) if axis.outputs > 1 else torch.zeros_like(cells)
    elif axis.scale > 0:
        scale = torch.tensor(1.0 / axis.scale, dtype=like.dtype)
    else:
        scale = cells / outputs
    step = output.to(like.dtype)
    at = scale.item() * step if align_corners else scale.item() * (step + 0.5) - 0.5
    if kind == LINEAR:
        at = at.clamp(min=0)
    beyond = (cells + 1).item()
    return torch.where(at < beyond, at, beyond)


def _near(x: Tensor) -> Tensor:
    """Keys' cubic convolution with A = -0.75, |x| <= 1."""
    return ((1.25 * x - 2.25) * x) * x + 1


def _far(x: Tensor) -> Tensor:
    """The same for 1 < |x| < 2."""
    return ((-0.75 * x + 3.75) * x - 6) * x + 3


def windows(count: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """floor(o * size / count) and ceil((o + 1) * size / count) for o < count."""
    o = torch.arange(count, device=device)
    return o * size // max(count, 1), ((o + 1) * size + count - 1) // max(count, 1)
