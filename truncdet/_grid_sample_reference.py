"""The backward of grid_sample in plain tensor operations: the definition the kernels must meet.

Interpolation is a product of taps along the axes. With w the product of the taps' weights, the
outermost axis first, f the input and g the gradient of the output,

    d input[cell] = sum over locations and taps there of w * g
    d grid[a]     = (sum over channels of g * (d / d x_a of the sum over taps of w * f)) * d x_a

with d x_a the derivative of the coordinate along axis a by the grid. Sums over taps run along x,
then y, then z, sums over channels as in _channel_sum. Taps outside are left out of the first sum
and count as zeros in the second.

The first sum is accumulated in fixed point (see truncdet.fixedpoint). Its segment is the batch
item: e is the exponent of the largest finite magnitude of g there. A location gives one cell at
most weight 1 when its taps lie in different cells, so G = ceil(log2(locations)). Bicubic taps that
the padding brings to one cell have magnitudes that add up to at most (11/8)^2 < 2: one bit more.

Coordinates and padding are PyTorch's (ATen/native/GridSampler.h), without fused multiply-add. One
that is not finite is 0 under 'border' and 'reflection' and has no taps under 'zeros' or in bicubic
mode. Cubic convolution: Keys, "Cubic convolution interpolation for digital image processing", IEEE
Trans. ASSP 29(6), 1981, with a = -3/4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._channel_sum import channel_sum
from truncdet._roi_align_reference import narrow
from truncdet._taps import Axis, each_tap, interpolate, linear_taps, make_axis

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
CUBIC_HEADROOM = 1


def backward(
    grad: Tensor,
    input: Tensor,
    grid: Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    input_gradient: bool,
    grid_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of input and grid, contiguous; an empty tensor for one that is not asked for."""
    sizes = list(reversed(input.shape[2:]))
    places = grid.flatten(1, -2).to(fp.compute_dtype(input.dtype))
    sampled = [
        sample_axis(places[..., a], size, mode, padding, align_corners)
        for a, size in enumerate(sizes)
    ]
    axes = [axis for axis, _ in sampled]
    flat = grad.flatten(2)
    for_input, for_grid = input.new_empty(0), grid.new_empty(0)
    if input_gradient:
        for_input = _input_gradient(flat, axes, sizes, mode).reshape(input.shape)
    if grid_gradient and mode == NEAREST:  # which cell is nearest does not change with the place
        for_grid = torch.zeros_like(grid, memory_format=torch.contiguous_format)
    elif grid_gradient:
        slopes = _slopes(input.flatten(2).to(places.dtype), axes, sizes)
        sums = [
            channel_sum(flat.to(places.dtype) * slope, 1) * derivative
            for slope, (_, derivative) in zip(slopes, sampled, strict=True)
        ]
        for_grid = narrow(torch.stack(sums, -1), grid.dtype).reshape(grid.shape)
    return for_input, for_grid


def sample_axis(
    place: Tensor, size: int, mode: int, padding: int, align_corners: bool
) -> tuple[Axis, Tensor]:
    """The taps along one axis, and the derivative of the coordinate by the grid."""
    half = (size - 1 if align_corners else size) / 2
    x = (place + 1) * half
    x = x if align_corners else x - 0.5
    derivative = torch.full_like(x, half)
    if mode == BICUBIC:
        base = x.floor()
        t = x - base
        ok = t >= 0  # false unless x is finite
        index = []
        for k in range(4):
            at, _ = _pad(base + (k - 1), derivative, size, padding, align_corners)
            inside = (at >= 0) & (at < size)
            index.append(torch.where(inside, at.masked_fill(~inside, 0).to(torch.int64), -1))
        return make_axis(index, *_cubic(t), ok), derivative
    x, derivative = _pad(x, derivative, size, padding, align_corners)
    if mode == BILINEAR:
        return linear_taps(x, size), derivative
    nearest = x.round()  # ties to even
    ok = (nearest >= 0) & (nearest < size)
    cell = nearest.masked_fill(~ok, 0).to(torch.int64)
    return make_axis([cell], [torch.ones_like(x)], [torch.zeros_like(x)], ok), derivative


def _pad(
    x: Tensor, derivative: Tensor, size: int, padding: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Brings coordinates into [0, size - 1] as the padding says."""
    if padding == ZEROS:
        return x, derivative
    if padding == REFLECTION:
        low = 0.0 if align_corners else -0.5
        # A tensor, since on CUDA a division by a number is a multiplication by its reciprocal.
        period = torch.full_like(x, (size - 1 if align_corners else size) * 2)
        if size == 1 and align_corners:
            return torch.zeros_like(x), torch.zeros_like(x)
        from_low = x - low
        distance = from_low.abs()
        forth = distance - (distance / period).trunc() * period
        back = period - forth
        flipped = forth > back
        x = torch.where(flipped, back, forth) + low
        derivative = torch.where(flipped != (from_low < 0), -derivative, derivative)
    # On the border and beyond the gradient is zero; NaN becomes 0, as it does in the forward.
    inside = (x > 0) & (x < size - 1)
    x = torch.where(x > 0, x, 0).clamp(max=size - 1)
    return x, torch.where(inside, derivative, 0)


def _cubic(t: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and slopes of the four taps around a cell's fraction t."""
    a = -0.75
    weights: list[Tensor] = []
    slopes: list[Tensor] = []
    for x, sign in ((t + 1, 1), (t, 1), (1 - t, -1), (2 - t, -1)):
        if len(weights) in (0, 3):
            weights.append(((a * x - 5 * a) * x + 8 * a) * x - 4 * a)
            slopes.append(sign * ((3 * a * x - 10 * a) * x + 8 * a))
        else:
            weights.append(((a + 2) * x - (a + 3)) * x * x + 1)
            slopes.append(sign * ((3 * (a + 2) * x - 2 * (a + 3)) * x))
    return weights, slopes


def _slopes(input: Tensor, axes: Sequence[Axis], sizes: Sequence[int]) -> list[Tensor]:
    """Derivatives of the interpolated input [N, C, cells] along every axis, each [N, C, P]."""

    def read(cell: Tensor, inside: Tensor) -> Tensor:
        shape = (-1, input.size(1), -1)
        return input.gather(2, cell[:, None].expand(shape)).masked_fill(~inside[:, None], 0)

    return interpolate(axes, sizes, read, lambda weight: weight[:, None])[1]


def _input_gradient(grad: Tensor, axes: Sequence[Axis], sizes: Sequence[int], mode: int) -> Tensor:
    """The fixed-point sums of grad [N, C, P]; result [N, C, cells]."""
    values = grad.to(fp.compute_dtype(grad.dtype))
    n, channels, locations = values.shape
    exponent = segment_exponents(values)[:, None, None]
    bits = fp.headroom(locations) + (CUBIC_HEADROOM if mode == BICUBIC else 0)
    headroom = torch.full_like(exponent, bits)
    normal = fp.scale_exponent(values, -exponent)
    sums = Sums((n, channels, math.prod(sizes)), 2, values.dtype, values.device)
    for cell, weight, inside in each_tap(axes, sizes):
        sums.add(
            cell[:, None].expand_as(values),
            weight[:, None] * normal,
            torch.where((inside & (weight != 0))[:, None], fp.nonfinite_flags(values), 0),
            inside[:, None],
            headroom,
        )
    return fp.finish(sums.high, sums.low, exponent, headroom, grad.dtype, flags=sums.flags)


def segment_exponents(values: Tensor) -> Tensor:
    """e of every batch item, [N] int64."""
    words = [fp.amax_word(item) for item in values]
    if not words:
        return values.new_empty(0, dtype=torch.int64)
    return fp.exponent_above(torch.stack(words), values.dtype)


class Sums:
    """Integer sums and flags of cells, to which taps are added along one dimension."""

    def __init__(
        self, shape: tuple[int, ...], dim: int, kind: torch.dtype, device: torch.device
    ) -> None:
        self.dim = dim
        self.high = torch.zeros(shape, dtype=torch.int64, device=device)
        self.low = torch.zeros_like(self.high) if kind == torch.float64 else None
        self.flags = torch.zeros_like(self.high)

    def add(
        self, cell: Tensor, contribution: Tensor, seen: Tensor, inside: Tensor, headroom: Tensor
    ) -> None:
        """Adds contributions of normalised values where `inside`, and the flags `seen`."""
        if self.high.numel() == 0:
            return
        contribution = torch.where(inside, contribution, 0)
        rounded = fp.quantise(contribution, headroom)
        self.high.scatter_add_(self.dim, cell, rounded)
        if self.low is not None:
            rest = fp.quantise_rest(contribution, rounded, headroom)
            self.low.scatter_add_(self.dim, cell, rest)
        for flag in (fp.NAN, fp.PLUS_INF, fp.MINUS_INF):
            hits = ((seen & flag) != 0).to(torch.int64).expand_as(cell)
            reached = torch.zeros_like(self.flags).scatter_add_(self.dim, cell, hits)
            self.flags |= torch.where(reached > 0, flag, 0)
