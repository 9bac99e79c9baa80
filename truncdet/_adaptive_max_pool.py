"""Adaptive max pooling whose gradient repeats bit for bit.

The forward is torch's own, indices included. Windows overlap where the sizes do not divide, so
several outputs can have chosen one cell; the gradient of a cell is

    grad[cell] = sum of g[o] over the outputs o whose window contains the cell and that chose it,

in ascending order of the outputs (row by row), in float32 (float64 for float64), rounded once to
the storage type. An index outside the output's own window is none that the forward gives, and
receives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from truncdet import _gather as _gather  # defines the op that the second derivative calls
from truncdet import fixedpoint
from truncdet._adaptive_sizes import Size, check_pool
from truncdet._autocast import follow_autocast
from truncdet._library import LIB
from truncdet._resample_reference import windows
from truncdet._roi_align_reference import narrow

for _schema in (
    "adaptive_max_pool2d(Tensor input, SymInt[] output_size) -> (Tensor, Tensor)",
    "adaptive_max_pool2d_backward(Tensor grad, Tensor indices, SymInt[] input_size) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
LIB.define("_max_pool_backward(Tensor grad, Tensor indices, int height, int width) -> Tensor")


def backward_reference(grad: Tensor, indices: Tensor, height: int, width: int) -> Tensor:
    """The primitive: grad and indices [planes, rows, columns] to cells [planes, height, width]."""
    device, (planes, *outputs) = grad.device, grad.shape
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    first_row, end_row = windows(height, outputs[0], device)
    first_column, end_column = windows(width, outputs[1], device)
    sums = values.new_zeros(planes, height, width)
    cell = torch.arange(height * width, device=device).reshape(height, width)
    for r in range(_longest(first_row, end_row)):
        for c in range(_longest(first_column, end_column)):
            row, column = first_row + r, first_column + c
            inside = (row < end_row)[:, None] & (column < end_column)
            at = row.clamp(max=outputs[0] - 1)[:, None], column.clamp(max=outputs[1] - 1)
            chosen = inside & (indices[:, at[0], at[1]] == cell)
            sums = torch.where(chosen, sums + values[:, at[0], at[1]], sums)
    return narrow(sums, grad.dtype)


def _longest(begin: Tensor, end: Tensor) -> int:
    return int((end - begin).max()) if begin.numel() else 0


def _forward(input: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.aten.adaptive_max_pool2d(input, output_size)
    return out


def _backward(grad: Tensor, indices: Tensor, input_size: Sequence[int]) -> Tensor:
    if 0 in input_size:
        return grad.new_zeros(tuple(input_size))
    # Planes are counted, not inferred: without outputs there is nothing to infer them from.
    shape = (grad.shape[:-2].numel(), *grad.shape[-2:])
    operands = (x.contiguous().reshape(shape) for x in (grad, indices))
    out: Tensor = torch.ops.truncdet._max_pool_backward(*operands, *input_size[-2:])
    return out.reshape(tuple(input_size))


def _fake_backward(grad: Tensor, indices: Tensor, input_size: Sequence[int]) -> Tensor:
    return grad.new_empty(tuple(input_size))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape


def _forward_formula(ctx: Any, grad: Tensor, _indices: Any) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return torch.ops.truncdet.adaptive_max_pool2d_backward(grad, indices, ctx.size), None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """What reached a cell came from the outputs that chose it: each reads the cell's gradient."""
    (indices,) = ctx.saved_tensors
    picked = torch.ops.truncdet._gather(grad.flatten(-2), -1, indices.flatten(-2), False)
    return picked.reshape(indices.shape), None, None


LIB.impl("_max_pool_backward", backward_reference, "CompositeExplicitAutograd")
LIB.impl("adaptive_max_pool2d", _forward, "CompositeExplicitAutograd")
LIB.impl("adaptive_max_pool2d_backward", _backward, "CompositeExplicitAutograd")
for _name, _fake, _formula, _setup in (
    ("adaptive_max_pool2d", _forward, _forward_formula, _save),
    ("adaptive_max_pool2d_backward", _fake_backward, _backward_formula, _save_backward),
):
    torch.library.register_fake(f"truncdet::{_name}", _fake, lib=LIB)
    torch.library.register_autograd(f"truncdet::{_name}", _formula, setup_context=_setup, lib=LIB)
follow_autocast("adaptive_max_pool2d", "adaptive_max_pool2d")


@overload
def adaptive_max_pool2d(
    input: Tensor, output_size: Size, return_indices: Literal[False] = False
) -> Tensor: ...


@overload
def adaptive_max_pool2d(
    input: Tensor, output_size: Size, return_indices: Literal[True]
) -> tuple[Tensor, Tensor]: ...


@overload
def adaptive_max_pool2d(
    input: Tensor, output_size: Size, return_indices: bool
) -> Tensor | tuple[Tensor, Tensor]: ...


def adaptive_max_pool2d(
    input: Tensor, output_size: Size, return_indices: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Takes the largest cell of each window of a grid that tiles an image; gradients repeat.

    A drop-in for `torch.nn.functional.adaptive_max_pool2d`, whose forward it runs. A cell that
    several windows have chosen adds their gradients in one fixed order: the same bits run to run,
    on CPU and GPU, and for one image whatever else is in the batch (tiers T1, T2 and T3c).

    Example:
        >>> x = torch.arange(12.0).reshape(1, 3, 4).requires_grad_()
        >>> truncdet.adaptive_max_pool2d(x, 2).sum().backward()
        >>> x.grad[0]
        tensor([[0., 0., 0., 0.],
                [0., 1., 0., 1.],
                [0., 1., 0., 1.]])

    Args:
        input: [N, C, H, W] or [C, H, W]; float64, float32, float16 or bfloat16; any layout.
        output_size: windows, an int or (rows, columns); None keeps the size of an axis.
        return_indices: also return the chosen cells.

    Returns:
        What torch returns, value for value, indices included. For a cell of the gradient that m
        windows chose, with S the exact sum of their gradients and A the sum of the magnitudes,
        the result R has |R - S| <= 1.01 (m - 1) 2^-24 A for float32; 2^-53 for float64; for
        float16 and bfloat16 one rounding to the type on top.

    Raises:
        TypeError: an argument or the dtype is none of the above.
        ValueError: a shape or a size is none of the above.
    """
    sizes = check_pool("adaptive_max_pool2d", input, output_size, 2)
    out, indices = torch.ops.truncdet.adaptive_max_pool2d(input, sizes)
    return (out, indices) if return_indices else out


class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """`adaptive_max_pool2d` as a module.

    Example:
        >>> truncdet.AdaptiveMaxPool2d(3)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 4, 3, 3])
    """

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """See `adaptive_max_pool2d`."""
        return adaptive_max_pool2d(input, self.output_size, self.return_indices)
