"""RoIAlign with max pooling in plain tensor operations: a bin's output is its largest sample.

Samples are visited row by row in ascending coordinate order and the first of equals wins; a sample
outside the map counts as zero and passes no gradient; the first NaN wins. A sample's value is the
sum over its corners of (wy * wx) * f. The gradient of a bin goes to the corners of its sample, each
one contribution (wy * wx) * g to the fixed-point sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _roi_align_reference as average
from truncdet import fixedpoint


def _coordinate(start: Tensor, size: Tensor, grid: Tensor, p: int, j: int) -> Tensor:
    i = grid - 1 - j if bool(size < 0) else torch.full_like(grid, j)
    return start + p * size + (i + 0.5) * size / grid


def _inside(start: Tensor, size: Tensor, grid: Tensor, p: int, cells: int) -> tuple[int, int]:
    """Samples [first, last) of bin p inside the map; coordinates never decrease with the number."""

    def first_above(bound: int, strictly: bool) -> int:
        low, high = 0, int(grid)
        while low < high:
            middle = (low + high) // 2
            at = _coordinate(start, size, grid, p, middle)
            if bool(at > bound if strictly else at >= bound):
                high = middle
            else:
                low = middle + 1
        return low

    first = first_above(-1, strictly=False)
    return first, max(first, first_above(cells, strictly=True))


def _sample(at: Tensor, cells: int) -> list[tuple[int, Tensor]]:
    """The cells a coordinate inside the map lies between, with their weights."""
    if float(at) < average.SMALLEST_COORDINATE:
        at = torch.zeros_like(at)
    low = int(at)
    if low >= cells - 1:
        return [(cells - 1, torch.ones_like(at))]
    fraction = at - low
    return [(low, 1 - fraction), (low + 1, fraction)]


def _corners(
    y: list[tuple[int, Tensor]], x: list[tuple[int, Tensor]]
) -> list[tuple[int, int, Tensor]]:
    pairs = [(cy, cx, wy * wx) for cy, wy in y for cx, wx in x]
    return [(cy, cx, w) for cy, cx, w in pairs if float(w) != 0]


def _samples(
    roi: average.RoiGeometry, k: int, p: int, q: int, cells: tuple[int, int]
) -> list[tuple[int, list[tuple[int, int, Tensor]]]]:
    """Number (-1 outside the map) and corners of the samples of one bin, in order."""
    grid_y, grid_x = int(roi.grid_y[k]), int(roi.grid_x[k])
    if grid_y == 0:
        return []
    y_axis = (roi.start_y[k], roi.bin_y[k], roi.grid_y[k])
    x_axis = (roi.start_x[k], roi.bin_x[k], roi.grid_x[k])
    first_y, last_y = _inside(*y_axis, p, cells[0])
    first_x, last_x = _inside(*x_axis, q, cells[1])
    outside: tuple[int, list[tuple[int, int, Tensor]]] = (-1, [])
    samples = [outside] if first_y > 0 or first_x > 0 else []
    columns = [(j, _sample(_coordinate(*x_axis, q, j), cells[1])) for j in range(first_x, last_x)]
    for i in range(first_y, last_y):
        y = _sample(_coordinate(*y_axis, p, i), cells[0])
        samples += [(i * grid_x + j, _corners(y, x)) for j, x in columns]
        if last_x < grid_x or first_x > 0:
            samples.append(outside)
    if last_y < grid_y:
        samples.append(outside)
    return samples


def forward(
    input: Tensor,
    boxes: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> tuple[Tensor, Tensor]:
    """Output and sample number [K, C, PH, PW] of input [N, C, H, W] and boxes [K, 5]."""
    bins, cells = (pooled_height, pooled_width), (input.shape[2], input.shape[3])
    roi = average.geometry(boxes, len(input), cells, bins, spatial_scale, sampling_ratio, aligned)
    average.check_batch_indices(boxes, len(input))
    dtype = fixedpoint.compute_dtype(input.dtype)
    out = input.new_zeros(len(boxes), input.shape[1], *bins, dtype=dtype)
    argmax = torch.full(out.shape, -1, dtype=torch.int32, device=input.device)
    for k in range(len(boxes)):
        plane = input[max(int(roi.image[k]), 0)].to(dtype) if len(input) else input
        for p in range(pooled_height):
            for q in range(pooled_width):
                best, number = out[k, :, p, q], argmax[k, :, p, q]
                for order, (sample, corners) in enumerate(_samples(roi, k, p, q, cells)):
                    value = torch.zeros_like(best)
                    for y, x, weight in corners:
                        value = value + weight * plane[:, y, x]
                    wins = (value > best) | value.isnan() if order else torch.ones_like(value) > 0
                    wins = wins & ~(best.isnan() if order else torch.zeros_like(wins))
                    best.copy_(torch.where(wins, value, best))
                    number.copy_(torch.where(wins, sample, number))
    return average.narrow(out, input.dtype), argmax


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
    sampling_ratio: int,
    aligned: bool,
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C, PH, PW] and the sample numbers of the forward."""
    bins, cells = (pooled_height, pooled_width), (height, width)
    roi = average.geometry(boxes, images, cells, bins, spatial_scale, sampling_ratio, aligned)
    average.check_batch_indices(boxes, images)
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    out = average.empty_gradient(grad, (images, channels, height, width), channels_last)
    for image, own in average.rois_by_image(roi.image, out):
        out[image] = _image_gradient(values, argmax, roi, own, cells, out.dtype)
    return out


def _image_gradient(
    grad: Tensor,
    argmax: Tensor,
    roi: average.RoiGeometry,
    own: Tensor,
    cells: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    exponent = fixedpoint.exponent_above(fixedpoint.amax_word(grad[own]), grad.dtype)
    bins = grad.shape[2] * grad.shape[3]
    headroom = torch.tensor(fixedpoint.headroom(len(own) * bins), device=grad.device)
    scaled = fixedpoint.scale_exponent(grad, -exponent)
    flags = fixedpoint.nonfinite_flags(grad)
    seen = torch.zeros(grad.shape[1], *cells, dtype=torch.int64, device=grad.device)
    high, low = torch.zeros_like(seen), torch.zeros_like(seen)
    for k in own.tolist():
        for p in range(grad.shape[2]):
            for q in range(grad.shape[3]):
                for number, corners in _samples(roi, k, p, q, cells):
                    chosen = argmax[k, :, p, q] == number
                    if number < 0 or not bool(chosen.any()):
                        continue
                    for y, x, weight in corners:
                        contribution = torch.where(chosen, weight * scaled[k, :, p, q], 0)
                        rounded = fixedpoint.quantise(contribution, headroom)
                        high[:, y, x] += rounded
                        low[:, y, x] += fixedpoint.quantise_rest(contribution, rounded, headroom)
                        seen[:, y, x] |= torch.where(chosen, flags[k, :, p, q], 0)
    two_limbs = low if dtype == torch.float64 else None
    return fixedpoint.finish(high, two_limbs, exponent, headroom, dtype, flags=seen)
