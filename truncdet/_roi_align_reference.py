"""RoIAlign with average pooling in plain tensor operations: the definition the kernels must meet.

Each axis of a bin has samples at start + p * bin + (i + 1/2) * bin / grid. A sample between two
cells gives them the weights 1 - l and l of linear interpolation; outside [-1, size] it gives
nothing. With w[p, cell] the sum over the samples of bin p in ascending coordinate order, and wx
divided by the number of samples,

    output[p, q]   = sum over y of wy[p, y] * (sum over x of wx[q, x] * f[y, x])
    gradient[y, x] = sum over p, then q, of (wy[p, y] * wx[q, x]) * g[p, q]

RoIAlign: He, Gkioxari, Dollar and Girshick, "Mask R-CNN", ICCV 2017, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import fixedpoint

MAX_GRID = 1 << 15
"""Samples a bin may have along one axis; only bins wider than this many cells notice."""

SMALLEST_COORDINATE = 2.0**-40
"""Coordinates below this are the border itself: weights stay far from the subnormal range."""


SAMPLES_AT_ONCE = 1 << 10
"""Samples a bin whose coordinates are computed together; bounds the memory, not the result."""


class RoiGeometry(NamedTuple):
    """What a RoI is on the feature map; every field has shape [K]."""

    image: Tensor
    start_y: Tensor
    start_x: Tensor
    bin_y: Tensor
    bin_x: Tensor
    grid_y: Tensor
    grid_x: Tensor
    samples: Tensor


def geometry(
    boxes: Tensor,
    images: int,
    cells: tuple[int, int],
    bins: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> RoiGeometry:
    """Boxes [K, 5] to bins and sampling grids; image -1 marks a batch index outside the batch."""
    image = image_of(boxes, images)
    corner = boxes[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    start_x, start_y, end_x, end_y = corner.unbind(1)
    width, height = end_x - start_x, end_y - start_y
    finite = torch.stack([start_x, start_y, width, height]).isfinite().all(0)
    usable = (image >= 0) & finite & (cells[0] > 0 and cells[1] > 0)
    if not aligned:
        width = torch.where(width < 1, torch.ones_like(width), width)
        height = torch.where(height < 1, torch.ones_like(height), height)
    # Tensors as divisors: dividing by a number may become a multiplication by its reciprocal.
    bin_y = height / torch.full_like(height, bins[0])
    bin_x = width / torch.full_like(width, bins[1])

    def grid(size: Tensor) -> Tensor:
        if sampling_ratio > 0:
            return torch.full_like(size, sampling_ratio)
        cell_count = size.ceil()
        return torch.where(cell_count >= 1, cell_count.clamp(max=MAX_GRID), 0)

    grid_y, grid_x = grid(bin_y), grid(bin_x)
    empty = ~usable | (grid_y == 0) | (grid_x == 0)
    grid_y = torch.where(empty, torch.zeros_like(grid_y), grid_y)
    grid_x = torch.where(empty, torch.zeros_like(grid_x), grid_x)
    samples = torch.where(empty, torch.ones_like(grid_y), grid_y * grid_x)
    return RoiGeometry(image, start_y, start_x, bin_y, bin_x, grid_y, grid_x, samples)


def axis_weights(start: Tensor, size: Tensor, grid: Tensor, bins: int, cells: int) -> Tensor:
    """Weights [K, bins, cells] of one axis, from start, bin size and samples a bin (each [K])."""
    weights = start.new_zeros(len(start), bins, cells)
    bin_number = torch.arange(bins, device=start.device).to(start.dtype)
    base = start[:, None] + bin_number * size[:, None]
    for j in _numbers_inside(base, size, grid, cells):
        at, inside = (
            x[:, :, 0] for x in _coordinates(base, size, grid, grid.new_tensor([j]), cells)
        )
        at = torch.where(inside & (at >= SMALLEST_COORDINATE), at, torch.zeros_like(at))
        low = at.to(torch.int64).clamp(max=cells - 1)
        border = low == cells - 1
        fraction = torch.where(border, torch.zeros_like(at), at - low.to(at.dtype))
        _add_at(weights, low, torch.where(inside, 1 - fraction, torch.zeros_like(at)))
        high = torch.where(border, low, low + 1)
        _add_at(weights, high, torch.where(inside & ~border, fraction, torch.zeros_like(at)))
    return weights


def _coordinates(
    base: Tensor, size: Tensor, grid: Tensor, numbers: Tensor, cells: int
) -> tuple[Tensor, Tensor]:
    """Where samples `numbers` of each bin are, [K, bins, J], and whether that is inside the map."""
    # Ascending coordinates: a reversed box has bins below zero and counts its samples down.
    size, grid = size[:, None], grid[:, None]
    i = torch.where(size < 0, grid - 1 - numbers, numbers)
    at = base[:, :, None] + ((i + 0.5) * size / grid)[:, None]
    return at, (numbers < grid)[:, None] & (at >= -1) & (at <= cells)


def _numbers_inside(base: Tensor, size: Tensor, grid: Tensor, cells: int) -> list[int]:
    """Numbers of the samples that are inside the map in some bin: few of a huge box's many."""
    most = int(grid.max()) if len(grid) else 0
    numbers: list[int] = []
    for first in range(0, most, SAMPLES_AT_ONCE):
        chunk = torch.arange(first, min(first + SAMPLES_AT_ONCE, most), device=grid.device)
        inside = _coordinates(base, size, grid, chunk.to(grid.dtype), cells)[1]
        numbers += (inside.any(0).any(0).nonzero()[:, 0] + first).tolist()
    return numbers


def _add_at(weights: Tensor, cell: Tensor, value: Tensor) -> None:
    # One element a row, so that there is no order to choose.
    place = cell[..., None]
    weights.scatter_(2, place, weights.gather(2, place) + value[..., None])


def both_axes(roi: RoiGeometry, bins: tuple[int, int], cells: tuple[int, int]) -> list[Tensor]:
    """wy [K, PH, H] and wx [K, PW, W], the latter divided by the number of samples."""
    wy = axis_weights(roi.start_y, roi.bin_y, roi.grid_y, bins[0], cells[0])
    wx = axis_weights(roi.start_x, roi.bin_x, roi.grid_x, bins[1], cells[1])
    return [wy, wx / roi.samples[:, None, None].expand_as(wx)]


def forward(
    input: Tensor,
    boxes: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Output [K, C, PH, PW] of input [N, C, H, W] and boxes [K, 5]."""
    bins, cells = (pooled_height, pooled_width), (input.shape[2], input.shape[3])
    check_batch_indices(boxes, len(input))
    roi = geometry(boxes, len(input), cells, bins, spatial_scale, sampling_ratio, aligned)
    # One plane for all bins.
    return narrow(interpolate(input[:, :, None, None], roi, bins), input.dtype)


def interpolate(planes: Tensor, roi: RoiGeometry, bins: tuple[int, int]) -> Tensor:
    """Sums [K, C, PH, PW] of planes [N, C, PH or 1, PW or 1, H, W], in the compute type."""
    dtype = fixedpoint.compute_dtype(planes.dtype)
    wy, wx = both_axes(roi, bins, (planes.shape[4], planes.shape[5]))
    out = planes.new_zeros(len(wy), planes.shape[1], *bins, dtype=dtype)
    for k in range(len(wy)):
        rows, columns = wy[k].any(0).nonzero()[:, 0], wx[k].any(0).nonzero()[:, 0]
        if roi.image[k] < 0 or len(rows) == 0 or len(columns) == 0:
            continue
        plane = planes[roi.image[k]].to(dtype)
        for y in rows:
            line = out.new_zeros(plane.shape[0], plane.shape[1], bins[1])
            for x in columns:
                w = wx[k, :, x]
                line = line + torch.where(w != 0, w * plane[..., y, x], 0)
            w = wy[k, :, y][:, None]
            out[k] += torch.where(w != 0, w * line, 0)
    return out


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a forward result to the features' type; NaN becomes the canonical one."""
    x = x.to(dtype)
    # After the conversion, whose NaN depends on the instruction that made it.
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x)


def image_of(boxes: Tensor, images: int) -> Tensor:
    """Images [K] of boxes [K, 5]; -1 marks a batch index outside the batch, or a NaN."""
    index = boxes[:, 0]
    known = (index > -1) & (index < images)
    return torch.where(known, index, torch.full_like(index, -1)).to(torch.int64)


def check_batch_indices(boxes: Tensor, images: int, op: str = "roi_align", bit: int = 1) -> None:
    """Raises on the CPU if a batch index is outside the batch; on CUDA the sticky flag is set."""
    if boxes.device.type == "cpu":
        raise_outside(boxes, images, op)
    else:
        from truncdet._sticky import note_out_of_range

        note_out_of_range(bit, image_of(boxes, images) < 0)


def raise_outside(boxes: Tensor, images: int, op: str = "roi_align") -> None:
    """Raises if a batch index of boxes [K, 5] on the CPU is outside the batch, or a NaN."""
    bad = image_of(boxes, images) < 0
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{op}: the batch index of boxes must be in [0, {images}), "
            f"got {float(boxes[row, 0]):g} in row {row}"
        )


def backward(
    grad: Tensor,
    boxes: Tensor,
    images: int,
    channels: int,
    height: int,
    width: int,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C, PH, PW], accumulated in fixed point."""
    bins, cells = (pooled_height, pooled_width), (height, width)
    check_batch_indices(boxes, images)
    roi = geometry(boxes, images, cells, bins, spatial_scale, sampling_ratio, aligned)
    wy, wx = both_axes(roi, bins, cells)
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    out = empty_gradient(grad, (images, channels, height, width), channels_last)
    for image, own in rois_by_image(roi.image, out):
        out[image] = _image_gradient(values[own], wy[own], wx[own], out.dtype)
    return out


def empty_gradient(grad: Tensor, shape: tuple[int, int, int, int], channels_last: bool) -> Tensor:
    """Zeros [N, C, H, W] of the gradient's type in the memory order asked for."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return grad.new_zeros(shape).contiguous(memory_format=memory_format)


def rois_by_image(images: Tensor, out: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every image that has RoIs, with their numbers; none if an image has no elements."""
    for image in range(len(out) if out[:1].numel() else 0):
        own = (images == image).nonzero()[:, 0]
        if len(own):
            yield image, own


def _image_gradient(grad: Tensor, wy: Tensor, wx: Tensor, dtype: torch.dtype) -> Tensor:
    rois, channels, pooled_height, pooled_width = grad.shape
    shape = (channels, wy.shape[2], wx.shape[2])
    exponent = fixedpoint.exponent_above(fixedpoint.amax_word(grad), grad.dtype)
    headroom = torch.tensor(
        fixedpoint.headroom(rois * pooled_height * pooled_width), device=grad.device
    )
    scaled = fixedpoint.scale_exponent(grad, -exponent)
    flags = fixedpoint.nonfinite_flags(grad)
    seen = torch.zeros(shape, dtype=torch.int64, device=grad.device)
    high, low = torch.zeros_like(seen), torch.zeros_like(seen)
    any_flag = bool((flags != 0).any())
    for k in range(rois):
        rows = wy[k].any(0).nonzero()[:, 0]
        columns = wx[k].any(0).nonzero()[:, 0]
        if len(rows) == 0 or len(columns) == 0:
            continue
        ys, xs = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        contribution = scaled.new_zeros(
            channels, int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        )
        for p in range(pooled_height):
            for q in range(pooled_width):
                weight = wy[k, p, ys, None] * wx[k, q, None, xs]
                contribution = contribution + weight * scaled[k, :, p, q, None, None]
                if any_flag:
                    reached = (wy[k, p, ys, None] != 0) & (wx[k, q, None, xs] != 0)
                    seen[:, ys, xs] |= reached * flags[k, :, p, q, None, None]
        quantised = fixedpoint.quantise(contribution, headroom)
        high[:, ys, xs] += quantised
        if dtype == torch.float64:
            low[:, ys, xs] += fixedpoint.quantise_rest(contribution, quantised, headroom)
    return fixedpoint.finish(
        high, low if dtype == torch.float64 else None, exponent, headroom, dtype, flags=seen
    )
