"""RoI pooling over whole cells in plain tensor operations: roi_pool, and the bins of ps_roi_pool.

A box becomes bins of size RoI / bins; bin p of an axis has the cells from floor(p * bin) to
ceil((p + 1) * bin), the end left out, counted from the RoI's start and clipped to the map. Rules:

    INCLUSIVE  torchvision's roi_pool: both corners are rounded, halves away from zero, and inside
    EXACT      mmcv's roi_pool: from x1 * scale to (x2 + 1) * scale, and only edges of bins round
    HALF_OPEN  torchvision's ps_roi_pool: corners are rounded, the second one is outside

    output[p, q]   = the largest cell f[y, x] of the bin, the first of equals row by row
    gradient[y, x] = sum over the bins that chose the cell of g[p, q]

RoI pooling: Girshick, "Fast R-CNN", ICCV 2015, section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import fixedpoint
from truncdet._roi_align_reference import (
    check_batch_indices,
    empty_gradient,
    image_of,
    narrow,
    rois_by_image,
)
from truncdet._roi_sums import Sums
from truncdet._sticky import ROI_POOL

INCLUSIVE, EXACT, HALF_OPEN = range(3)

FARTHEST_CORNER = 2.0**30
"""Rounded corners beyond this count as this; torchvision's integers overflow there."""

LOWEST = torch.finfo(torch.float32).min
"""No cell of a bin is below this, whatever its type."""


class Bins(NamedTuple):
    """The bins of one axis: start [K], size of a bin [K], cells of the map, start rounded."""

    start: Tensor
    size: Tensor
    cells: int
    rounded: bool
    usable: Tensor

    def ranges(self, number: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """First cell and end [K, number] of every bin, clipped to [0, limit]."""
        p = torch.arange(number, device=self.start.device).to(self.start.dtype)
        low, high = (n * self.size[:, None] for n in (p, p + 1))
        start = self.start[:, None]
        if self.rounded:
            # Whole numbers: added as integers, exactly.
            edges = [low.floor().to(torch.int64), high.ceil().to(torch.int64)]
            edges = [edge + start.to(torch.int64) for edge in edges]
        else:
            edges = [(low + start).floor(), (high + start).ceil()]
        top = self.cells if limit is None else max(limit, 0)
        first, end = (torch.where(self.usable[:, None], e.clamp(0, top), 0) for e in edges)
        return first.to(torch.int64), end.to(torch.int64)


def pool_bins(
    boxes: Tensor,
    images: int,
    cells: tuple[int, int],
    bins: tuple[int, int],
    scale: float,
    rule: int,
) -> tuple[Bins, Bins]:
    """The bins of boxes [K, 5] along y and x; a RoI that is none has no cells."""
    corner = boxes[:, 1:] * scale
    usable = (image_of(boxes, images) >= 0) & corner.isfinite().all(1)
    usable = usable & (cells[0] > 0 and cells[1] > 0)
    corner = torch.where(usable[:, None], corner, 0)
    if rule == EXACT:
        low = corner[:, :2]
        length = torch.where(usable[:, None], (boxes[:, 3:] + 1) * scale - low, 0)
        usable = usable & ((length > 0) & length.isfinite()).all(1)
        length = torch.where(usable[:, None], length, 1)
    else:
        whole = corner.trunc()
        whole = whole + torch.where((corner - whole).abs() >= 0.5, corner.sign(), 0)
        whole = whole.clamp(-FARTHEST_CORNER, FARTHEST_CORNER)
        low, high = whole[:, :2], whole[:, 2:].to(torch.int64)
        length = high - low.to(torch.int64) + (1 if rule == INCLUSIVE else 0)
        length = length.clamp(min=1).to(corner.dtype)
    # Tensors as divisors: dividing by a number may become a multiplication by its reciprocal.
    size = length / length.new_tensor([bins[1], bins[0]]).expand_as(length)
    y, x = (Bins(low[:, i], size[:, i], cells[1 - i], rule != EXACT, usable) for i in (1, 0))
    return y, x


def forward(
    input: Tensor,
    boxes: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Output and chosen cells [K, C, PH, PW] of input [N, C, H, W] and boxes [K, 5]."""
    check_batch_indices(boxes, len(input), "roi_pool", ROI_POOL)
    cells, bins = (input.shape[2], input.shape[3]), (pooled_height, pooled_width)
    rule = INCLUSIVE if rounded else EXACT
    axes = pool_bins(boxes, len(input), cells, bins, spatial_scale, rule)
    rows, columns = axes[0].ranges(pooled_height), axes[1].ranges(pooled_width)
    image = image_of(boxes, len(input))
    out = input.new_zeros(
        len(boxes), input.shape[1], *bins, dtype=fixedpoint.compute_dtype(input.dtype)
    )
    argmax = torch.full(out.shape, -1, dtype=torch.int32, device=input.device)
    number = torch.arange(cells[0] * cells[1], device=input.device).reshape(cells)
    for k in range(len(boxes)):
        for p in range(pooled_height):
            for q in range(pooled_width):
                ys = slice(int(rows[0][k, p]), int(rows[1][k, p]))
                xs = slice(int(columns[0][k, q]), int(columns[1][k, q]))
                if ys.start >= ys.stop or xs.start >= xs.stop:
                    continue
                plane = input[image[k]].to(out.dtype)[:, ys, xs].flatten(1)
                value, cell = _largest(plane, number[ys, xs].flatten())
                out[k, :, p, q], argmax[k, :, p, q] = value, cell.to(torch.int32)
    return narrow(out, input.dtype), argmax


def _largest(values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of values [C, n] above LOWEST and its number, the first of equals, or -1."""
    candidate = torch.where(values > LOWEST, values, LOWEST)
    best = candidate.amax(1, keepdim=True)
    place = torch.arange(len(number), device=number.device)
    first = torch.where(candidate == best, place, len(number)).amin(1)
    # The value of that place, since zeros of both signs are equal.
    value = candidate.gather(1, first[:, None])[:, 0]
    return value, torch.where(value > LOWEST, number[first], -1)


def backward(
    grad: Tensor,
    argmax: Tensor,
    boxes: Tensor,
    images: int,
    channels: int,
    height: int,
    width: int,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    rounded: bool,
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C, PH, PW] and the chosen cells of the forward."""
    check_batch_indices(boxes, images, "roi_pool", ROI_POOL)
    rule = INCLUSIVE if rounded else EXACT
    bins = (pooled_height, pooled_width)
    axes = pool_bins(boxes, images, (height, width), bins, spatial_scale, rule)
    # A cell outside the RoI is none that the forward gives, and receives nothing.
    cell = argmax.to(torch.int64)
    inside = cell >= 0
    places = (cell // max(width, 1), cell % max(width, 1))
    for axis, place, number in zip(axes, places, bins, strict=True):
        first, end = axis.ranges(number)
        inside &= (place >= first[:, :1, None, None]) & (place < end[:, -1:, None, None])
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    out = empty_gradient(grad, (images, channels, height, width), channels_last)
    plane = torch.arange(channels, device=grad.device)[:, None, None] * (height * width)
    for image, own in rois_by_image(image_of(boxes, images), out):
        sums = Sums((channels, height, width), values[own], bins[0] * bins[1])
        raw = values[own][inside[own]]
        sums.add((plane + cell[own])[inside[own]], sums.scaled(raw), raw)
        out[image] = sums.finish(out.dtype)
    return out
