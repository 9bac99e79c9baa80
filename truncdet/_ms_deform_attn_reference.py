"""ms_deform_attn in plain tensor operations: the definition the kernels must meet.

A sample is one (image, query, head, level, point). With f its bilinear interpolation of its head's
values in its level's map and a its attention weight,

    output[channel]   = sum over levels, then points, of f * a
    d weight          = sum over channels of g * f
    d location x      = ((sum over channels of g * df/dx) * a) * width      (y: height)
    d value[cell]     = sum over samples and taps there of w * (a * g)      (fixed point, see below)

Coordinates are x * width - 1/2, so that 0 and 1 are the outer edges of a map; a sample whose
coordinates are not in [-1, size) gives nothing and receives nothing. Taps and sums over
channels are those of _taps and _channel_sum.

The last sum is accumulated in fixed point (see truncdet.fixedpoint). Its segment is the image:
e is the sum of the exponents of the largest finite magnitudes of a and of g there, and a and g are
scaled by their own before they are multiplied. A sample gives a cell at most weight 1, since its
four taps are different cells, so G = ceil(log2(queries * levels * points)).

Formula: Zhu et al., "Deformable DETR: Deformable Transformers for End-to-End Object Detection",
ICLR 2021, equation 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._channel_sum import channel_sum
from truncdet._grid_sample_reference import Sums, segment_exponents
from truncdet._roi_align_reference import narrow
from truncdet._taps import Axis, each_tap, interpolate, linear_taps

STICKY = 1 << 12
"""The operator's bit in truncdet._sticky."""


class Sample(NamedTuple):
    """The samples of one level and point; fields are [N, Lq, M] or 0-d."""

    level: int
    point: int
    axes: list[Axis]
    sizes: list[Tensor]  # width, height
    start: Tensor
    inside: Tensor


def forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """The output, [N, Lq, M * D]."""
    kind = fp.compute_dtype(value.dtype)
    n, queries, heads = attention_weights.shape[:3]
    total = value.new_zeros((n, queries, heads, value.size(3)), dtype=kind)
    for s in _samples(value, spatial_shapes, level_start_index, sampling_locations):
        weight = attention_weights[:, :, :, s.level, s.point].to(kind)[..., None]
        found, _ = _interpolate(value.to(kind), s)
        total = torch.where(s.inside[..., None], total + found * weight, total)
    return narrow(total, value.dtype).flatten(2)


def backward(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of value, sampling_locations and attention_weights, contiguous."""
    kind = fp.compute_dtype(value.dtype)
    n, queries, heads, levels, points = attention_weights.shape
    g = grad.to(kind).reshape(n, queries, heads, value.size(3))
    weights = attention_weights.to(kind)
    grad_exponent, weight_exponent = segment_exponents(g), segment_exponents(weights)
    exponent = (grad_exponent + weight_exponent).reshape(n, 1, 1, 1)
    headroom = torch.full_like(exponent, fp.headroom(queries * levels * points))
    normal_grad = fp.scale_exponent(g, -grad_exponent.reshape(n, 1, 1, 1))
    normal_weights = fp.scale_exponent(weights, -weight_exponent.reshape(n, 1, 1, 1, 1))
    # Cells of a head are strided by the heads: sums are [N, S, M, D], indexed along S.
    sums = Sums(tuple(value.shape), 1, kind, value.device)
    for_locations = torch.zeros_like(sampling_locations, dtype=kind)
    for_weights = torch.zeros_like(weights)
    for s in _samples(value, spatial_shapes, level_start_index, sampling_locations):
        place = (slice(None), slice(None), slice(None), s.level, s.point)
        weight, inside = weights[place][..., None], s.inside[..., None]
        found, slopes = _interpolate(value.to(kind), s)
        for_weights[place] = torch.where(s.inside, channel_sum(g * found, 3), 0)
        for a, (slope, size) in enumerate(zip(slopes, s.sizes, strict=True)):
            moved = (channel_sum(g * slope, 3) * weight[..., 0]) * size.to(kind)
            for_locations[place][..., a] = torch.where(s.inside, moved, 0)
        normal = normal_weights[place][..., None] * normal_grad
        seen = product_flags(weight, g)
        for cell, tap, tap_inside in each_tap(s.axes, s.sizes):
            reached = inside & tap_inside[..., None]
            sums.add(
                torch.where(reached, (cell + s.start)[..., None], 0).expand_as(g),
                tap[..., None] * normal,
                torch.where(reached & (tap[..., None] != 0), seen, 0),
                reached,
                headroom,
            )
    return (
        fp.finish(sums.high, sums.low, exponent, headroom, value.dtype, flags=sums.flags),
        narrow(for_locations, sampling_locations.dtype),
        narrow(for_weights, attention_weights.dtype),
    )


def check_levels(value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor) -> Tensor:
    """Which levels lie inside `value`, [L]; on the CPU one that does not raises ValueError."""
    values = value.size(1)
    height, width = spatial_shapes.unbind(1)
    ok = (level_start_index >= 0) & (level_start_index <= values)
    ok &= (height >= 0) & (width >= 0) & (height <= values) & (width <= values)
    ok &= height * width <= values - level_start_index
    if not value.is_cpu:
        _sticky.note_out_of_range(STICKY, ~ok)
    elif not bool(ok.all()):
        level = int((~ok).nonzero()[0])
        raise ValueError(
            f"ms_deform_attn: spatial_shapes must lie inside value's {values} cells, got "
            f"{tuple(spatial_shapes[level].tolist())} at {int(level_start_index[level])} "
            f"for level {level}"
        )
    return ok


def _samples(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor
) -> Iterator[Sample]:
    """Samples in the order in which they are summed: levels, then points."""
    ok = check_levels(value, spatial_shapes, level_start_index)
    places = locations.to(fp.compute_dtype(value.dtype))
    for level in range(locations.size(3)):
        sizes = [spatial_shapes[level, 1], spatial_shapes[level, 0]]
        for point in range(locations.size(4)):
            axes = [
                linear_taps(places[:, :, :, level, point, a] * size.to(places.dtype) - 0.5, size)
                for a, size in enumerate(sizes)
            ]
            inside = ok[level]
            for axis in axes:
                inside = inside & ((axis.cell[0] >= 0) | (axis.cell[1] >= 0))
            yield Sample(level, point, axes, sizes, level_start_index[level], inside)


def _interpolate(value: Tensor, s: Sample) -> tuple[Tensor, list[Tensor]]:
    """Interpolated values and their derivatives, [N, Lq, M, D]."""
    cells, channels = value.size(1), value.size(3)

    def read(cell: Tensor, tap_inside: Tensor) -> Tensor:
        reached = (tap_inside & s.inside)[..., None]
        if cells == 0:
            return value.new_zeros((*cell.shape, channels))
        at = torch.where(reached, (cell + s.start)[..., None], 0)
        picked = value.gather(1, at.expand(*cell.shape, channels))
        return picked.masked_fill(~reached, 0)

    return interpolate(s.axes, s.sizes, read, lambda weight: weight[..., None])


def product_flags(a: Tensor, b: Tensor) -> Tensor:
    """Flags of products of which at least one factor is not finite, from the words alone."""
    a, b = torch.broadcast_tensors(a, b)
    seen_a, seen_b = fp.nonfinite_flags(a), fp.nonfinite_flags(b)
    zero = (fp.magnitude(a) == 0) | (fp.magnitude(b) == 0)
    nan = (seen_a == fp.NAN) | (seen_b == fp.NAN) | zero
    infinity = torch.where(a.signbit() != b.signbit(), fp.MINUS_INF, fp.PLUS_INF)
    flags = torch.where(nan, fp.NAN, infinity)
    return torch.where((seen_a | seen_b) == 0, 0, flags)
