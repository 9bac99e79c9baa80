"""Where the samples of rotated boxes lie and what they weigh, in plain tensor operations.

The formulas are in _roi_align_rotated_reference.py; csrc/roi_align_rotated.h states them for one
sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from truncdet._roi_align_reference import MAX_GRID, SMALLEST_COORDINATE
from truncdet._sine_cosine import LARGEST_ANGLE, sine_cosine

FARTHEST = 1 << 22
"""Boxes whose centre and sides add up to more cells than this count as not finite."""

SMALLEST_SIDE = 2.0**-100
"""Sides below this are zero, so that they are zero or not whatever the denormal mode is."""


class BoxAxis(NamedTuple):
    """One axis of the boxes, each field [K]: where they start, a bin's size and its samples."""

    start: Tensor
    bin: Tensor
    grid: Tensor

    def coordinates(self, k: int, bins: int) -> tuple[Tensor, Tensor]:
        """Number of the bin and place of every sample of RoI k, both [bins * grid]."""
        count = int(self.grid[k])
        number = torch.arange(bins, device=self.bin.device).repeat_interleave(count)
        i = torch.arange(count, device=self.bin.device).repeat(bins)
        size, kind = self.bin[k], self.bin.dtype
        along = (i.to(kind) + 0.5) * size / self.grid[k].to(kind)
        return number, (self.start[k] + number.to(kind) * size) + along


class RotatedGeometry(NamedTuple):
    """What a RoI is on the feature map; every tensor has shape [K]."""

    image: Tensor  # -1: the batch index is outside the batch
    y: BoxAxis
    x: BoxAxis
    centre_y: Tensor
    centre_x: Tensor
    sine: Tensor
    cosine: Tensor
    samples: Tensor


def geometry(
    rois: Tensor,
    images: int,
    cells: tuple[int, int],
    bins: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> RotatedGeometry:
    """Rows [K, 6] of batch index, centre x, centre y, width, height, angle in radians."""
    index = rois[:, 0]
    known = (index > -1) & (index < images)
    offset = 0.5 if aligned else 0.0
    centre_x, centre_y = (rois[:, 1:3] * spatial_scale - offset).unbind(1)
    sides = rois[:, 3:5] * spatial_scale
    if not aligned:
        sides = torch.where(sides < 1, 1, sides)
    sides = torch.where(sides.abs() < SMALLEST_SIDE, 0, sides)
    width, height = sides.unbind(1)
    angle = rois[:, 5].to(torch.float64)
    reach = centre_y.abs() + centre_x.abs() + height.abs() + width.abs()
    usable = known & (reach <= FARTHEST) & (angle.abs() <= LARGEST_ANGLE)  # false for NaN
    usable = usable & (cells[0] > 0 and cells[1] > 0)
    turned = torch.where(usable, -angle if clockwise else angle, 0)
    sine, cosine = (x.to(rois.dtype) for x in sine_cosine(turned))
    # Tensors as divisors: dividing by a number may become a multiplication by its reciprocal.
    bin_y = height / torch.full_like(height, bins[0])
    bin_x = width / torch.full_like(width, bins[1])

    def grid(size: Tensor) -> Tensor:
        if sampling_ratio > 0:
            return torch.full_like(size, sampling_ratio)
        cell_count = size.ceil()
        return torch.where(cell_count >= 1, cell_count.clamp(max=MAX_GRID), 0)

    grid_y, grid_x = (torch.where(usable, grid(size), 0) for size in (bin_y, bin_x))
    empty = (grid_y == 0) | (grid_x == 0)
    grid_y, grid_x = (torch.where(empty, 0, g).to(torch.int64) for g in (grid_y, grid_x))
    samples = grid_y.to(rois.dtype) * grid_x.to(rois.dtype)
    return RotatedGeometry(
        torch.where(known, index, -1).to(torch.int64),
        BoxAxis(-0.5 * height, bin_y, grid_y),
        BoxAxis(-0.5 * width, bin_x, grid_x),
        centre_y,
        centre_x,
        sine,
        cosine,
        torch.where(empty, 1, samples),
    )


class Beside(NamedTuple):
    """The two cells beside coordinates along one axis, and their weights."""

    cells: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, at: Tensor, size: int) -> Beside:
        """For coordinates on the map; at the border the first cell has all the weight."""
        at = torch.where(at < SMALLEST_COORDINATE, 0, at)
        low = at.to(torch.int64).clamp(max=size - 1)
        border = low == size - 1
        fraction = torch.where(border, 0, at - low.to(at.dtype))
        return cls((low, torch.where(border, low, low + 1)), (1 - fraction, fraction))


class Samples(NamedTuple):
    """The samples of one RoI on the map, [S], by bin and in ascending order within a bin."""

    bin: Tensor
    y: Beside
    x: Beside

    def turns(self) -> list[Tensor]:
        """Samples of which no two are of one bin: the first of every bin, the second, ..."""
        counts = torch.bincount(self.bin) if len(self.bin) else self.bin
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(self.bin), device=self.bin.device) - starts[self.bin]
        most = int(counts.max()) if len(counts) else 0
        return [(rank == turn).nonzero()[:, 0] for turn in range(most)]

    def corners(self, width: int) -> list[tuple[Tensor, Tensor]]:
        """Cell and weight of the four corners, each [S], in the order in which they are read."""
        return [
            (row * width + column, row_weight * column_weight)
            for row, row_weight in zip(self.y.cells, self.y.weights, strict=True)
            for column, column_weight in zip(self.x.cells, self.x.weights, strict=True)
        ]


def samples_of(
    roi: RotatedGeometry, k: int, cells: tuple[int, int], bins: tuple[int, int]
) -> Samples:
    """The samples of RoI k on a map of these sizes."""
    number_y, along_y = roi.y.coordinates(k, bins[0])
    number_x, along_x = roi.x.coordinates(k, bins[1])
    sine, cosine = roi.sine[k], roi.cosine[k]
    centre_y, centre_x = roi.centre_y[k], roi.centre_x[k]
    # Of a huge box's samples only those near the map, seen from the box, can be on it.
    from_y, from_x = 0.5 * cells[0] - centre_y, 0.5 * cells[1] - centre_x
    near = cells[0] + cells[1] + 64
    keep_y = ((along_y - (from_y * cosine + from_x * sine)).abs() <= near).nonzero()[:, 0]
    keep_x = ((along_x - (from_x * cosine - from_y * sine)).abs() <= near).nonzero()[:, 0]
    yy, xx = along_y[keep_y, None], along_x[None, keep_x]
    y = (yy * cosine - xx * sine) + centre_y
    x = (yy * sine + xx * cosine) + centre_x
    inside = (y >= -1) & (y <= cells[0]) & (x >= -1) & (x <= cells[1])
    bin_of = number_y[keep_y, None] * bins[1] + number_x[None, keep_x]
    order = bin_of[inside].sort(stable=True)
    return Samples(
        order.values,
        Beside.of(y[inside][order.indices], cells[0]),
        Beside.of(x[inside][order.indices], cells[1]),
    )
