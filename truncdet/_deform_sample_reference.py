"""The sampling of deform_conv2d in plain tensor operations: the definition the kernels must meet.

A sample is one (image, offset group, tap of the kernel, place of the output). With f the bilinear
interpolation of a channel of the group at the tap's regular position plus the sample's offset, m
its mask (1 where there is none) and g the gradient of the columns,

    columns[channel, tap, image, place] = m * f
    d mask    = sum over the group's channels of g * f
    d offset  = (sum over the group's channels of g * df/dy) * m           (x likewise)
    d input[cell] = sum over taps, places and their corners there of w * (m * g)    (fixed point)

A position is regular + offset, where regular = output * stride - padding + tap * dilation is an
integer. f is 0 where a coordinate is at or below -1 or at or above the map's size, otherwise NaN
where one is NaN. A coordinate that is not finite gives the input nothing, makes the derivative by
the other coordinate NaN and that by itself 0: torchvision's formula with zeros for cells outside.
Corners and derivatives are those of _taps, sums over channels those of _channel_sum.

The last sum is accumulated in fixed point (see truncdet.fixedpoint). Its segment is the image: e is
the sum of the exponents of the largest finite magnitudes of m and of g there, and m and g are
scaled by their own before they are multiplied (e of m is 0 where there is no mask). A sample gives
a cell at most weight 1, since its four corners are different cells, and a channel has the samples
of its group: G = ceil(log2(taps * places)).

Formula: Dai et al., "Deformable Convolutional Networks", ICCV 2017, equation 2; the mask: Zhu et
al., "Deformable ConvNets v2", CVPR 2019, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._channel_sum import channel_sum
from truncdet._grid_sample_reference import Sums, segment_exponents
from truncdet._ms_deform_attn_reference import product_flags
from truncdet._roi_align_reference import narrow
from truncdet._taps import Axis, each_tap, interpolate, linear_taps


class Geometry(NamedTuple):
    """Sizes and steps of the kernel, each (rows, columns)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Geometry:
        """From the eight numbers that operators take."""
        return cls(*zip(numbers[::2], numbers[1::2], strict=True))

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]


class Samples(NamedTuple):
    """All samples; P counts taps, then places."""

    axes: list[Axis]  # x, y; of [N, G, 1, P]
    sizes: list[int]  # width, height
    outside: Tensor  # [N, G, 1, P]
    mask: Tensor  # [N, G, 1, P]


def forward(input: Tensor, offset: Tensor, mask: Tensor | None, geometry: Sequence[int]) -> Tensor:
    """The columns, [C, taps, N, places]."""
    s = _samples(input, offset, mask, Geometry.of(geometry))
    columns = (s.mask * _find(input, s)[0]).flatten(1, 2)  # [N, C, P]
    by_tap = columns.unflatten(2, (Geometry.of(geometry).taps, offset.shape[2:].numel()))
    return narrow(by_tap.permute(1, 2, 0, 3), input.dtype).contiguous()


def backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    geometry: Sequence[int],
    input_gradient: bool,
    offset_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, offset and mask, contiguous; empty tensors for those not asked for."""
    s = _samples(input, offset, mask, Geometry.of(geometry))
    n, groups, _, count = s.outside.shape
    shape = (n, groups, input.size(1) // groups, count)
    g = grad.to(s.mask.dtype).permute(2, 0, 1, 3).reshape(shape)
    for_input, for_offset, for_mask = (input.new_empty(0) for _ in range(3))
    if input_gradient:
        for_input = _input_gradient(g, s, mask is not None, input)
    if offset_gradient:
        value, along_x, along_y = _find(input, s)
        sums = [channel_sum(g * slope, 2) * s.mask[:, :, 0] for slope in (along_y, along_x)]
        # [N, G, taps, places] each, to planes of y and x in turn
        taps = Geometry.of(geometry).taps
        planes = [x.reshape(n, groups, taps, count // taps) for x in sums]
        for_offset = narrow(torch.stack(planes, 3).reshape(offset.shape), offset.dtype)
        if mask is not None:
            for_mask = narrow(channel_sum(g * value, 2).reshape(mask.shape), mask.dtype)
    return for_input, for_offset, for_mask


def _samples(input: Tensor, offset: Tensor, mask: Tensor | None, geometry: Geometry) -> Samples:
    kind = fp.compute_dtype(input.dtype)
    n, sizes = input.size(0), (input.size(3), input.size(2))
    groups = offset.size(1) // (2 * geometry.taps)
    count = geometry.taps * offset.shape[2:].numel()
    # Broadcast below: [N, G, rows and columns of taps, rows and columns of places].
    moved = offset.to(kind).reshape(n, groups, *geometry.kernel, 2, *offset.shape[2:])
    axes, outside = [], torch.zeros((), dtype=torch.bool, device=input.device)
    for at, size in ((1, sizes[0]), (0, sizes[1])):  # x, then y
        start = torch.arange(offset.size(2 + at), device=input.device) * geometry.stride[at]
        step = torch.arange(geometry.kernel[at], device=input.device) * geometry.dilation[at]
        regular = (step[:, None] + (start - geometry.padding[at])).to(kind)
        regular = regular[:, None, :, None] if at == 0 else regular[:, None, :]
        x = (regular + moved[:, :, :, :, at]).reshape(n, groups, 1, count)
        outside = outside | (x <= -1) | (x >= size)
        axes.append(_axis(x, size))
    ones = torch.ones(outside.shape, dtype=kind, device=input.device)
    factor = ones if mask is None else mask.to(kind).reshape(ones.shape)
    return Samples(axes, list(sizes), outside, factor)


def _axis(x: Tensor, size: int) -> Axis:
    """The taps along one axis; weights are NaN where `x` is not finite, and zero beside the map."""
    axis = linear_taps(x, size)
    weights = [weight.masked_fill(~x.isfinite(), torch.nan) for weight in axis.weight]
    return axis._replace(weight=weights)


def _find(input: Tensor, s: Samples) -> list[Tensor]:
    """f and its derivatives along x and y, [N, G, channels of a group, P]."""
    n, groups, _, count = s.outside.shape
    shape = (n, groups, input.size(1) // groups, count)
    cells = input.to(s.mask.dtype).reshape(*shape[:3], s.sizes[0] * s.sizes[1])

    def read(cell: Tensor, inside: Tensor) -> Tensor:
        if cells.size(3) == 0:
            return cells.new_zeros(shape)
        return cells.gather(3, cell.expand(shape)).masked_fill(~inside, 0)

    value, slopes = interpolate(s.axes, s.sizes, read, lambda weight: weight)
    return [value.masked_fill(s.outside, 0), *slopes]


def _input_gradient(g: Tensor, s: Samples, masked: bool, input: Tensor) -> Tensor:
    """The fixed-point sums of the columns' gradient [N, G, channels of a group, P]."""
    shape = (g.size(0), 1, 1, 1)
    grad_exponent = segment_exponents(g).reshape(shape)
    mask_exponent = segment_exponents(s.mask).reshape(shape)
    if not masked:
        mask_exponent = torch.zeros_like(mask_exponent)
    exponent = grad_exponent + mask_exponent
    headroom = torch.full_like(exponent, fp.headroom(g.size(3)))
    normal = fp.scale_exponent(s.mask, -mask_exponent) * fp.scale_exponent(g, -grad_exponent)
    seen = product_flags(s.mask, g)
    sums = Sums((*g.shape[:3], s.sizes[0] * s.sizes[1]), 3, g.dtype, g.device)
    for cell, weight, inside in each_tap(s.axes, s.sizes):
        sums.add(
            cell.expand_as(g),
            weight * normal,
            torch.where(inside & (weight != 0), seen, 0),
            inside,
            headroom,
        )
    result = fp.finish(sums.high, sums.low, exponent, headroom, input.dtype, flags=sums.flags)
    return result.reshape(input.shape)
