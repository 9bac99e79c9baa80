"""RoIAlign of rotated boxes in plain tensor operations: the definition the kernels must meet.

A box has its samples as an upright one around the origin would, at

    yy = -height / 2 + p * bin + (i + 1/2) * bin / grid, and xx alike along the width,

turned by the angle and moved to the box's centre:

    y = (yy * cos - xx * sin) + cy,    x = (yy * sin + xx * cos) + cx

A sample between two cells gives them the weights 1 - l and l of linear interpolation; outside
[-1, size] it gives nothing. With samples in ascending order of (i, j), products wy * wx that are
zero left out, and n the samples of a bin,

    output[b]      = (sum over samples of ((w f + w' f') + w'' f'') + w''' f''') / n
    weight[b, y, x] = (sum over samples of wy * wx) / n
    gradient[y, x] = sum over bins b, ascending, of weight[b, y, x] * g[b]

The gradient of one RoI at one cell is quantised once (see truncdet.fixedpoint). Semantics are those
of mmcv's operator; detectron2's is the same with angles in degrees and aligned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import fixedpoint
from truncdet._roi_align_reference import MAX_GRID, SMALLEST_COORDINATE, empty_gradient, narrow
from truncdet._sine_cosine import LARGEST_ANGLE, sine_cosine
from truncdet._sticky import ROI_ALIGN_ROTATED, note_out_of_range

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


def forward(
    input: Tensor,
    rois: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> Tensor:
    """Output [K, C, PH, PW] of input [N, C, H, W] and rois [K, 6]."""
    bins, cells = (pooled_height, pooled_width), (input.shape[2], input.shape[3])
    rest = (spatial_scale, sampling_ratio, aligned, clockwise)
    roi = geometry(rois, len(input), cells, bins, *rest)
    check_batch_indices(roi, rois, len(input))
    dtype = fixedpoint.compute_dtype(input.dtype)
    out = input.new_zeros(len(rois), input.shape[1], pooled_height * pooled_width, dtype=dtype)
    for k in range(len(rois)):
        if int(roi.y.grid[k]) == 0:
            continue
        plane = input[roi.image[k]].to(dtype).flatten(1)
        samples = samples_of(roi, k, cells, bins)
        value = plane.new_zeros(len(plane), len(samples.bin))
        for cell, weight in samples.corners(cells[1]):
            value = value + torch.where(weight != 0, weight * plane[:, cell], 0)
        for own in samples.turns():
            out[k, :, samples.bin[own]] += value[:, own]
        out[k] = out[k] / roi.samples[k].expand_as(out[k])
    return narrow(out.reshape(len(rois), input.shape[1], *bins), input.dtype)


def check_batch_indices(roi: RotatedGeometry, rois: Tensor, images: int) -> None:
    """Raises on the CPU if a batch index is outside the batch; on CUDA the sticky flag is set."""
    if rois.device.type == "cpu":
        raise_outside(rois, images)
    else:
        note_out_of_range(ROI_ALIGN_ROTATED, roi.image < 0)


def raise_outside(rois: Tensor, images: int) -> None:
    """Raises if a batch index of rois [K, 6] on the CPU is outside the batch, or a NaN."""
    index = rois[:, 0]
    bad = ~((index > -1) & (index < images))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"roi_align_rotated: the batch index of rois must be in [0, {images}), "
            f"got {float(index[row]):g} in row {row}"
        )


def backward(
    grad: Tensor,
    rois: Tensor,
    images: int,
    channels: int,
    height: int,
    width: int,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C, PH, PW], accumulated in fixed point."""
    bins, cells = (pooled_height, pooled_width), (height, width)
    rest = (spatial_scale, sampling_ratio, aligned, clockwise)
    roi = geometry(rois, images, cells, bins, *rest)
    check_batch_indices(roi, rois, images)
    values = grad.to(fixedpoint.compute_dtype(grad.dtype)).flatten(2)
    out = empty_gradient(grad, (images, channels, height, width), channels_last)
    for image in range(images if out.numel() else 0):
        own = (roi.image == image).nonzero()[:, 0].tolist()
        if own:
            matrices = [weights_of(roi, k, cells, bins) for k in own]
            out[image] = _image_gradient(values[own], matrices, out.dtype).reshape(out.shape[1:])
    return out


def weights_of(
    roi: RotatedGeometry, k: int, cells: tuple[int, int], bins: tuple[int, int]
) -> Tensor:
    """The matrix of RoI k, [bins, cells]."""
    matrix = roi.centre_y.new_zeros(bins[0] * bins[1], cells[0] * cells[1])
    if int(roi.y.grid[k]) == 0:
        return matrix
    samples = samples_of(roi, k, cells, bins)
    corners = samples.corners(cells[1])
    for own in samples.turns():
        for cell, weight in corners:
            # One element of a bin, so that there is no order to choose.
            matrix[samples.bin[own], cell[own]] += weight[own]
    return matrix / roi.samples[k].expand_as(matrix)


def _image_gradient(grad: Tensor, matrices: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sums of grad [K, C, bins] of one image, [C, cells]."""
    exponent = fixedpoint.exponent_above(fixedpoint.amax_word(grad), grad.dtype)
    bits = fixedpoint.headroom(grad.shape[0] * grad.shape[2])
    headroom = torch.tensor(bits, device=grad.device)
    scaled = fixedpoint.scale_exponent(grad, -exponent)
    flags = fixedpoint.nonfinite_flags(grad)
    shape = (grad.shape[1], matrices[0].shape[1])
    high = torch.zeros(shape, dtype=torch.int64, device=grad.device)
    low, seen = torch.zeros_like(high), torch.zeros_like(high)
    for k, matrix in enumerate(matrices):
        touched = matrix.any(0).nonzero()[:, 0]
        contribution = scaled.new_zeros(shape[0], len(touched))
        for b in range(len(matrix)):
            weight = matrix[b, touched]
            contribution = contribution + weight * scaled[k, :, b, None]
            seen[:, touched] |= torch.where(weight != 0, flags[k, :, b, None], 0)
        quantised = fixedpoint.quantise(contribution, headroom)
        high[:, touched] += quantised
        if dtype == torch.float64:
            low[:, touched] += fixedpoint.quantise_rest(contribution, quantised, headroom)
    two_limbs = low if dtype == torch.float64 else None
    return fixedpoint.finish(high, two_limbs, exponent, headroom, dtype, flags=seen)
