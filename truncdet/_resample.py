"""The gradient of interpolation and of adaptive average pooling, gathered by the cells that own it.

Both operators are separable: along an axis every output position o uses a few neighbouring cells
with weights w[o, cell]. The gradient of a cell is the nested sum, each loop in ascending order,

    grad[k, j, i] = sum_z wz[z, k] * (sum_y wy[y, j] * (sum_x wx[x, i] * g[z, y, x])),

in float32 (float64 for float64), every operation rounded on its own, one rounding to the storage
type at the end. Weights of zero take part in nothing, so a NaN reaches only the cells that its
output used. Pooling divides by the size of the window instead of multiplying with its reciprocal.
Nothing is added by two threads and there is no order left to vary: no accumulator is needed.

`_resample_backward` is that sum on tensors [outer, depth, height, width, inner]; its reference is
in _resample_reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from truncdet import _resample_reference as reference
from truncdet._library import LIB
from truncdet._resample_reference import AVERAGE as AVERAGE
from truncdet._resample_reference import CUBIC as CUBIC
from truncdet._resample_reference import LINEAR as LINEAR

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}

LIB.define(
    "_resample_backward(Tensor grad, int depth, int height, int width, int kind, "
    "bool align_corners, float scale_depth, float scale_height, float scale_width, int copied) "
    "-> Tensor"
)
LIB.impl("_resample_backward", reference.backward, "CompositeExplicitAutograd")


def gradient(
    grad: Tensor,
    input_size: Sequence[int],
    kind: int,
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    """The gradient of an input of `input_size`, whose last len(scales) dimensions were resampled.

    `grad` may have any layout; channels_last is worked on without a copy and kept.
    """
    spatial = len(scales)
    cells, outputs = tuple(input_size[-spatial:]), tuple(grad.shape[-spatial:])
    if grad.numel() == 0 or math.prod(input_size) == 0:
        return grad.new_zeros(tuple(input_size))
    copied = copied_axes(kind, cells, outputs, grad.is_cuda)
    missing = 3 - spatial
    copied = copied << missing | ((1 << missing) - 1)
    five, restore = _as_five(grad, spatial)
    result = torch.ops.truncdet._resample_backward(
        five,
        *(1,) * missing,
        *cells,
        kind,
        align_corners,
        *(0.0,) * missing,
        *scales,
        copied,
    )
    return restore(result, tuple(input_size))


def copied_axes(kind: int, cells: Sequence[int], outputs: Sequence[int], is_cuda: bool) -> int:
    """A bit for every axis that torch's forward copies although its scale may say otherwise.

    Only a scale_factor that leaves a size as it is makes a difference. torch's forwards then do not
    agree with each other: on CUDA all axes are copied if no size changes, on the CPU linear modes
    copy each axis whose size does not change and the cubic mode copies none. The gradient is that
    of the forward that ran.
    """
    same = [a == b for a, b in zip(cells, outputs, strict=True)]
    if kind == AVERAGE:
        return 0
    if is_cuda:
        same = [all(same)] * len(same)
    elif kind == CUBIC:
        return 0
    return sum(1 << number for number, is_same in enumerate(same) if is_same)


def keeps_channels_last(grad: Tensor, spatial: int) -> bool:
    """Whether the channels are last in memory, and not as good as first."""
    if grad.dim() != spatial + 2 or spatial not in _CHANNELS_LAST or grad.is_contiguous():
        return False
    return grad.is_contiguous(memory_format=_CHANNELS_LAST[spatial])


def empty_gradient(grad: Tensor, input_size: Sequence[int], spatial: int) -> Tensor:
    """An uninitialised tensor with the layout that `gradient` gives."""
    order = (
        _CHANNELS_LAST[spatial] if keeps_channels_last(grad, spatial) else torch.contiguous_format
    )
    return torch.empty(tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=order)


def _as_five(
    grad: Tensor, spatial: int
) -> tuple[Tensor, Callable[[Tensor, tuple[int, ...]], Tensor]]:
    """`grad` as [outer, depth, height, width, inner], and the way back for the result."""
    outputs = (1,) * (3 - spatial) + tuple(grad.shape[-spatial:])
    if keeps_channels_last(grad, spatial):
        batch, channels = grad.shape[:2]
        last = grad.movedim(1, -1).reshape(batch, *outputs, channels)

        def to_channels_last(result: Tensor, size: tuple[int, ...]) -> Tensor:
            return result.reshape(size[0], *size[2:], size[1]).movedim(-1, 1)

        return last, to_channels_last
    return grad.contiguous().reshape(-1, *outputs, 1), lambda result, size: result.reshape(size)
