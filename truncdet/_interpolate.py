"""interpolate whose gradient repeats bit for bit: schema, autograd and the public function.

The forward is torch's own, which adds nothing by atomics. The gradient's definition and kernels
are those of _resample.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _interpolate_arguments as arguments
from truncdet import _resample as resample
from truncdet._adaptive_avg_pool import adaptive_avg_pool
from truncdet._autocast import follow_autocast
from truncdet._interpolate_arguments import MODES
from truncdet._library import LIB

# scales: what the caller gave for each axis, 0 for nothing, as float? of the aten operators.
LIB.define(
    "interpolate(Tensor input, SymInt[] output_size, str mode, bool align_corners, "
    "float[] scales) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIB.define(
    "interpolate_backward(Tensor grad, SymInt[] input_size, str mode, bool align_corners, "
    "float[] scales) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def forward(
    input: Tensor, output_size: Sequence[int], mode: str, align_corners: bool, scales: list[float]
) -> Tensor:
    """torch's own operator of this mode."""
    operator = getattr(torch.ops.aten, MODES[mode].operator).default
    given = [scale if scale > 0 else None for scale in scales]
    out: Tensor = operator(input, output_size, align_corners, *given)
    return out


def backward(
    grad: Tensor, input_size: Sequence[int], mode: str, align_corners: bool, scales: list[float]
) -> Tensor:
    """The gradient of an input of `input_size`."""
    return resample.gradient(grad, input_size, MODES[mode].kind, align_corners, scales)


LIB.impl("interpolate", forward, "CompositeExplicitAutograd")
LIB.impl("interpolate_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::interpolate", forward, lib=LIB)
follow_autocast("interpolate", "upsample_bilinear2d")


@torch.library.register_fake("truncdet::interpolate_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, input_size: Sequence[int], mode: str, align_corners: bool, scales: list[float]
) -> Tensor:
    return resample.empty_gradient(grad, input_size, len(scales))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, _, *ctx.arguments = inputs
    ctx.size = tensor.shape


def _forward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradient = torch.ops.truncdet.interpolate_backward(grad, ctx.size, *ctx.arguments)
    return gradient, None, None, None, None


def _backward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The operator is linear: the transpose of its transpose is itself."""
    again = torch.ops.truncdet.interpolate(grad, ctx.size[2:], *ctx.arguments)
    return again, None, None, None, None


torch.library.register_autograd(
    "truncdet::interpolate", _forward_formula, setup_context=_save, lib=LIB
)
torch.library.register_autograd(
    "truncdet::interpolate_backward", _backward_formula, setup_context=_save, lib=LIB
)


def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Resizes a signal, an image or a volume; the gradient's bits repeat.

    A drop-in for `torch.nn.functional.interpolate`, whose forward it runs. The gradient of the
    linear, bilinear, bicubic and trilinear modes is gathered by the cells of `input`, each of which
    adds what its outputs send in one fixed order: the same bits run to run, on CPU and GPU, and for
    one image whatever else is in the batch (tiers T1, T2 and T3c). Modes 'nearest' and
    'nearest-exact' are torch's own in both directions, which gather already; 'area' is adaptive
    average pooling.

    Example:
        >>> x = torch.arange(4.0).reshape(1, 1, 2, 2).requires_grad_()
        >>> y = truncdet.interpolate(x, scale_factor=2, mode="bilinear")
        >>> y.sum().backward()
        >>> x.grad
        tensor([[[[4., 4.],
                  [4., 4.]]]])

    Args:
        input: [N, C, L] (linear), [N, C, H, W] (bilinear, bicubic) or [N, C, D, H, W] (trilinear);
            float64, float32, float16 or bfloat16; contiguous, channels_last or any other layout.
        size: output size, one number for all axes or one an axis.
        scale_factor: outputs a cell, likewise; exactly one of `size` and `scale_factor` is given.
        mode: 'nearest', 'nearest-exact', 'linear', 'bilinear', 'bicubic', 'trilinear' or 'area'.
        align_corners: the centres of the corner cells are kept, not the corners; interpolating
            modes only.
        recompute_scale_factor: coordinates come from the two sizes alone, and not from
            `scale_factor`.
        antialias: must be False; torch's antialiased gradients add floats by atomics.

    Returns:
        What torch returns, value for value. For a cell of the gradient that nx, ny and nz outputs
        reach along the axes, with S the sum of their exact contributions (the float32 weights, see
        below, times the gradients), A the sum of the contributions' magnitudes and
        n = nx + ny + nz, the result R has |R - S| <= 1.01 n 2^-24 A for float32, plus half the
        smallest subnormal number for each contribution; 2^-53 for float64; for float16 and
        bfloat16 one rounding to the type on top. Weights are torch's expressions in float32
        (float64 for float64), evaluated without fused multiply-add.

    Raises:
        TypeError: an argument or the dtype is none of the above.
        ValueError: a size, a mode or a combination is none of the above.

    Where `scale_factor` leaves a size as it is, torch's forwards on the CPU and on CUDA differ; the
    gradient is that of the forward that ran.
    """
    arguments.check_mode(mode, antialias)
    if mode in arguments.NEAREST:
        out: Tensor = nn.functional.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor
        )
        return out
    outputs, scales = arguments.check_sizes(
        input, size, scale_factor, mode, align_corners, recompute_scale_factor
    )
    if mode == "area":
        return adaptive_avg_pool(input, outputs)
    out = torch.ops.truncdet.interpolate(input, outputs, mode, bool(align_corners), scales)
    return out


class Upsample(nn.Upsample):
    """`interpolate` as a module, with the constructor of `torch.nn.Upsample`.

    Example:
        >>> up = truncdet.Upsample(scale_factor=2, mode="bilinear")
        >>> up(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 3, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        """See `interpolate`."""
        return interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )
