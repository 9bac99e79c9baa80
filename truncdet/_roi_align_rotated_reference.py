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

import torch
from torch import Tensor

from truncdet import fixedpoint
from truncdet._roi_align_reference import empty_gradient, narrow
from truncdet._rotated_samples import RotatedGeometry, geometry, samples_of
from truncdet._sticky import ROI_ALIGN_ROTATED, note_out_of_range


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
