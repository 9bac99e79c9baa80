"""embedding: rows of a table, and a gradient that adds in fixed point.

The gradient of a row is scatter_add's sum of what arrived for it; with scale_grad_by_freq it is
divided once by how often the row was used. The row of padding_idx receives nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._compact import groups, worthwhile
from truncdet._count import count
from truncdet._divide import divide
from truncdet._embedding_arguments import check_table, padding_row
from truncdet._library import LIB

LIB.define(
    "embedding(Tensor weight, Tensor indices, int padding_idx, bool scale_grad_by_freq) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(weight: Tensor, indices: Tensor, padding_idx: int, scale: bool) -> Tensor:
    wide = shapes.expand_index(indices.reshape(-1), 0, (indices.numel(), weight.size(1)))
    rows: Tensor = torch.ops.truncdet._gather(weight, 0, wide, False, _sticky.EMBEDDING)
    return rows.reshape(*indices.shape, weight.size(1))


def _fake(weight: Tensor, indices: Tensor, padding_idx: int, scale: bool) -> Tensor:
    return weight.new_empty(*indices.shape, weight.size(1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, ctx.padding_idx, ctx.scale = inputs
    ctx.rows = weight.size(0)
    ctx.save_for_backward(indices)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    flat = grad.reshape(indices.numel(), grad.size(-1))
    total = weight_gradient(flat, indices.reshape(-1), ctx.rows, ctx.padding_idx, ctx.scale)
    return divide(total, None, grad.dtype), None, None, None


def weight_gradient(
    grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale: bool
) -> Tensor:
    """Sums the rows of `grad` by index; with `scale` divided by their numbers."""
    # -1 is out of range and left out: padding, and what the forward has reported already.
    indices = torch.where(indices == padding_idx, -1, indices).to(torch.int64)
    if not worthwhile(indices.numel(), rows, rows * grad.size(1)):
        return _sums(grad, indices, rows, scale)
    total = grad.new_zeros(rows, grad.size(1))
    made = groups(indices, rows)
    made.write(total, 0, _sums(grad, made.adding, indices.numel(), scale))
    return total


def _sums(grad: Tensor, indices: Tensor, rows: int, scale: bool) -> Tensor:
    kind = fp.compute_dtype(grad.dtype) if scale else grad.dtype
    start = grad.new_zeros(rows, grad.size(1), dtype=kind)
    total: Tensor = torch.ops.truncdet.index_add(start, 0, indices, grad, False, 0)
    return divide_by_count(total, indices, grad.dtype) if scale else total


def divide_by_count(total: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = torch.ops.truncdet._divide(total, count(indices, total.size(0)), dtype)
    return result


LIB.impl("embedding", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::embedding", _fake, lib=LIB)
torch.library.register_autograd("truncdet::embedding", _backward, setup_context=_save, lib=LIB)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Looks up rows of `weight`; the gradient's bits repeat in any order of the indices.

    As `torch.nn.functional.embedding`. Gradients: tiers T1, T2 and T3o.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> truncdet.embedding(torch.tensor([1, 0]), table)
        tensor([[3., 4.],
                [1., 2.]])

    Args:
        input: int64 or int32 indices of any shape, in [0, V).
        weight: the table [V, D] of float64, float32, float16 or bfloat16.
        padding_idx: a row that receives no gradient; negative from the end.
        max_norm: must be None: renormalising rows in place is not supported.
        norm_type: the norm of max_norm, so not used.
        scale_grad_by_freq: divide the gradient of a row by how often `input` names it.
        sparse: must be False.

    Returns:
        A tensor of weight's dtype and of input's shape with D added. The gradient of a row has
        `scatter_add`'s bound with n = input.numel(), or `scatter_reduce`'s for a mean.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: a shape, a device or an option does not fit; on the CPU, an index is out of
            range.
        TruncdetError: on CUDA, an earlier call met an index out of range (it picked zeros; see
            `truncdet.check`).
    """
    _sticky.raise_pending()
    check_table("embedding", input, weight, max_norm, sparse)
    padding = padding_row("embedding", padding_idx, weight.size(0))
    rows: Tensor = torch.ops.truncdet.embedding(weight, input, padding, scale_grad_by_freq)
    return rows
