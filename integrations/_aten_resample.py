"""The gradients of interpolation and adaptive pooling, from aten's arguments to truncdet's.

Each function checks what the original checks, so that a wrong call is left to it and its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from truncdet.integrations._aten_forms import Compute, supported


def interpolation(mode: str) -> Compute:
    """Returns the gradient of one mode, in the arguments of `aten::upsample_*_backward`."""

    def compute(
        grad: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
        **named: float | None,
    ) -> Tensor | None:
        axes = len(output_size)
        expected = (*input_size[:2], *output_size)
        if not (supported(grad) and axes == len(input_size) - 2 and grad.shape == expected):
            return None
        if min(*input_size[1:], *output_size) <= 0:
            return None
        given = dict(zip(_SCALES[axes], scales, strict=False)) | named
        # As in aten, a scale that is absent or not positive leaves it to the sizes.
        used = [max(given.get(name) or 0.0, 0.0) for name in _SCALES[axes]]
        result: Tensor = torch.ops.truncdet.interpolate_backward(
            grad, input_size, mode, align_corners, used
        )
        # aten has one layout for the gradient of the cubic mode.
        return result.contiguous() if mode == "bicubic" else _arranged_as(result, grad)

    return compute


_SCALES = {
    1: ("scales",),
    2: ("scales_h", "scales_w"),
    3: ("scales_d", "scales_h", "scales_w"),
}


def average_pooling(spatial: int) -> Compute:
    """Returns the gradient in the arguments of `aten::_adaptive_avg_pool{spatial}d_backward`."""
    gradient: Callable[..., Tensor] = getattr(
        torch.ops.truncdet, f"adaptive_avg_pool{spatial}d_backward"
    )

    def compute(grad_output: Tensor, self: Tensor) -> Tensor | None:
        if not _pools(grad_output, self, spatial):
            return None
        result = gradient(grad_output, self.shape)
        return _arranged_as(result, self) if spatial == 2 else result.contiguous()

    return compute


def max_pooling(grad_output: Tensor, self: Tensor, indices: Tensor) -> Tensor | None:
    """The gradient in the arguments of `aten::adaptive_max_pool2d_backward`."""
    fitting = indices.dtype == torch.int64 and indices.device == self.device
    if not (fitting and _pools(grad_output, self, 2) and indices.shape == grad_output.shape):
        return None
    result: Tensor = torch.ops.truncdet.adaptive_max_pool2d_backward(
        grad_output, indices, self.shape
    )
    return _arranged_as(result, self)


def _pools(grad: Tensor, input: Tensor, spatial: int) -> bool:
    """Whether `grad` can be the gradient of a pooling of the last `spatial` axes of `input`."""
    return (
        supported(grad, input)
        and input.dim() in (spatial + 1, spatial + 2)
        and grad.shape[:-spatial] == input.shape[:-spatial]
        and math.prod(input.shape[-spatial - 1 :]) * math.prod(grad.shape[-spatial:]) > 0
    )


def _arranged_as(result: Tensor, model: Tensor) -> Tensor:
    """`result` in the memory format that aten gives it; compiled graphs rely on strides."""
    return result.contiguous(memory_format=suggest_memory_format(model))
