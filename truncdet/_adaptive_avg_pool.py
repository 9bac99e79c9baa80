"""Adaptive average pooling whose gradient repeats bit for bit, in one, two and three dimensions.

The forward is torch's own. The gradient's definition and kernels are those of _resample.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _resample as resample
from truncdet._adaptive_sizes import Size, check_pool
from truncdet._autocast import follow_autocast
from truncdet._library import LIB


def _define(spatial: int) -> None:
    """adaptive_avg_pool2d or 3d and its backward, which is differentiable as well."""
    name = f"adaptive_avg_pool{spatial}d"
    for schema in (
        f"{name}(Tensor input, SymInt[] output_size) -> Tensor",
        f"{name}_backward(Tensor grad, SymInt[] input_size) -> Tensor",
    ):
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def forward(input: Tensor, output_size: Sequence[int]) -> Tensor:
        out: Tensor = getattr(torch.ops.aten, name)(input, output_size)
        return out

    def backward(grad: Tensor, input_size: Sequence[int]) -> Tensor:
        return resample.gradient(grad, input_size, resample.AVERAGE, False, [0.0] * spatial)

    def fake_backward(grad: Tensor, input_size: Sequence[int]) -> Tensor:
        return resample.empty_gradient(grad, input_size, spatial)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.size = inputs[0].shape

    def forward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return getattr(torch.ops.truncdet, f"{name}_backward")(grad, ctx.size), None

    def backward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return getattr(torch.ops.truncdet, name)(grad, ctx.size[-spatial:]), None

    LIB.impl(name, forward, "CompositeExplicitAutograd")
    LIB.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"truncdet::{name}", forward, lib=LIB)
    torch.library.register_fake(f"truncdet::{name}_backward", fake_backward, lib=LIB)
    for op, formula in ((name, forward_formula), (f"{name}_backward", backward_formula)):
        torch.library.register_autograd(f"truncdet::{op}", formula, setup_context=save, lib=LIB)
    follow_autocast(name, name)


for _spatial in (2, 3):
    _define(_spatial)


def adaptive_avg_pool(input: Tensor, output_size: Sequence[int]) -> Tensor:
    """Pools the last len(output_size) dimensions of a checked input."""
    if len(output_size) == 1:
        return adaptive_avg_pool(input.unsqueeze(-2), (1, *output_size)).squeeze(-2)
    operator = getattr(torch.ops.truncdet, f"adaptive_avg_pool{len(output_size)}d")
    out: Tensor = operator(input, output_size)
    return out


def adaptive_avg_pool1d(input: Tensor, output_size: Size) -> Tensor:
    """`adaptive_avg_pool2d` along one axis, as `torch.nn.functional.adaptive_avg_pool1d`.

    Example:
        >>> truncdet.adaptive_avg_pool1d(torch.arange(4.0).reshape(1, 1, 4), 2)
        tensor([[[0.5000, 2.5000]]])

    Args:
        input: [N, C, L] or [C, L], as for `adaptive_avg_pool2d`.
        output_size: windows, an int or one in a tuple.

    Returns:
        [N, C, windows]; bits and bound are `adaptive_avg_pool2d`'s.

    Raises:
        TypeError: as `adaptive_avg_pool2d`.
        ValueError: as `adaptive_avg_pool2d`.
    """
    return adaptive_avg_pool(input, check_pool("adaptive_avg_pool1d", input, output_size, 1))


def adaptive_avg_pool2d(input: Tensor, output_size: Size) -> Tensor:
    """Averages an image over a grid of windows that tile it; the gradient's bits repeat.

    A drop-in for `torch.nn.functional.adaptive_avg_pool2d`, whose forward it runs. Each cell
    gathers its gradient from the windows that contain it in one fixed order: the same bits run to
    run, on CPU and GPU, and for one image whatever else is in the batch (tiers T1, T2 and T3c).

    Example:
        >>> x = torch.zeros(1, 1, 4, 4, requires_grad=True)
        >>> truncdet.adaptive_avg_pool2d(x, 2).sum().backward()
        >>> x.grad[0, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])

    Args:
        input: [N, C, H, W] or [C, H, W]; float64, float32, float16 or bfloat16; contiguous,
            channels_last or any other layout.
        output_size: windows, an int or (rows, columns); None keeps the size of an axis.

    Returns:
        What torch returns, value for value. For a cell of the gradient in nx and ny windows along
        the axes, with S the exact sum of the windows' gradients over their sizes, A the sum of the
        magnitudes and n = nx + ny, the result R has |R - S| <= 1.01 n 2^-24 A for float32, plus
        half the smallest subnormal number for each window; 2^-53 for float64; for float16 and
        bfloat16 one rounding to the type on top.

    Raises:
        TypeError: an argument or the dtype is none of the above.
        ValueError: a shape or a size is none of the above.
    """
    return adaptive_avg_pool(input, check_pool("adaptive_avg_pool2d", input, output_size, 2))


def adaptive_avg_pool3d(input: Tensor, output_size: Size) -> Tensor:
    """`adaptive_avg_pool2d` for volumes, as `torch.nn.functional.adaptive_avg_pool3d`.

    Example:
        >>> truncdet.adaptive_avg_pool3d(torch.ones(1, 2, 4, 6, 8), (2, None, 4)).shape
        torch.Size([1, 2, 2, 6, 4])

    Args:
        input: [N, C, D, H, W] or [C, D, H, W], as for `adaptive_avg_pool2d`.
        output_size: windows, an int or (slices, rows, columns); None keeps the size of an axis.

    Returns:
        What torch returns; bits and bound are `adaptive_avg_pool2d`'s, with n = nx + ny + nz.

    Raises:
        TypeError: as `adaptive_avg_pool2d`.
        ValueError: as `adaptive_avg_pool2d`.
    """
    return adaptive_avg_pool(input, check_pool("adaptive_avg_pool3d", input, output_size, 3))


class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """`adaptive_avg_pool1d` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """See `adaptive_avg_pool1d`."""
        return adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """`adaptive_avg_pool2d` as a module.

    Example:
        >>> truncdet.AdaptiveAvgPool2d((3, None))(torch.zeros(1, 2, 9, 5)).shape
        torch.Size([1, 2, 3, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """See `adaptive_avg_pool2d`."""
        return adaptive_avg_pool2d(input, self.output_size)


class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """`adaptive_avg_pool3d` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """See `adaptive_avg_pool3d`."""
        return adaptive_avg_pool3d(input, self.output_size)
