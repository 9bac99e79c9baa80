"""embedding_bag: PyTorch's own forward, and a gradient of the table that adds in fixed point.

The gradient of row r is the sum over its uses k, in bag b, of

    sum:   g[b] * w_k (w_k the sample's weight, or one)
    mean:  RN( g[b] / n_b ), n_b the bag's size without padding, rounded to the compute type

(see truncdet._accumulate_rows); with scale_grad_by_freq it is divided once by how often the row was
used. The forward has no atomics and is PyTorch's, as is the gradient of the sample weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._accumulate_rows import accumulate_rows
from truncdet._compact import groups, worthwhile
from truncdet._count import count
from truncdet._divide import divide
from truncdet._embedding import divide_by_count
from truncdet._embedding_arguments import bag_offsets, check_samples, check_table, padding_row
from truncdet._library import LIB

SUM, MEAN = 0, 1

LIB.define(
    "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, "
    "int mode, bool scale_grad_by_freq, bool include_last_offset, int padding_idx) -> Tensor",
)


def _in_range(weight: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """PyTorch's kernels stop the process at an index out of range: it takes the padding row, or 0.

    The CPU's raise an error of their own.
    """
    if indices.is_cpu:
        shapes.check_range(_sticky.EMBEDDING_BAG, indices, weight.size(0))
        return indices
    outside = (indices < 0) | (indices >= weight.size(0))
    _sticky.note_out_of_range(_sticky.EMBEDDING_BAG, outside)
    return indices.masked_fill(outside, max(padding_idx, 0))


def _forward(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    samples: Tensor | None,
    mode: int,
    scale: bool,
    include_last: bool,
    padding_idx: int,
) -> Tensor:
    inside = _in_range(weight, indices, padding_idx)
    out: Tensor = torch.ops.aten._embedding_bag(
        weight, inside, offsets, False, mode, False, samples, include_last, padding_idx
    )[0]
    return out


def _fake(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    samples: Tensor | None,
    mode: int,
    scale: bool,
    include_last: bool,
    padding_idx: int,
) -> Tensor:
    return weight.new_empty(offsets.size(0) - int(include_last), weight.size(1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, offsets, samples, *ctx.options = inputs
    ctx.save_for_backward(weight, indices, offsets, samples)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, indices, offsets, samples = ctx.saved_tensors
    mode, scale, include_last, padding_idx = ctx.options
    bags = offsets.size(0) - int(include_last)
    places = torch.arange(indices.size(0), device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets[:bags].contiguous(), places, right=True) - 1
    weight_grad = sample_grad = None
    if ctx.needs_input_grad[0]:
        weight_grad = table_gradient(
            grad, weight.shape, indices, bag, samples, mode, scale, padding_idx
        )
    if ctx.needs_input_grad[3]:
        inside = _in_range(weight, indices, padding_idx)
        sample_grad = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad, weight, inside, offsets, bag.to(inside.dtype), mode, padding_idx
        )
    return weight_grad, None, None, sample_grad, None, None, None, None


def table_gradient(
    grad: Tensor,
    shape: Sequence[int],
    indices: Tensor,
    bag: Tensor,
    samples: Tensor | None,
    mode: int,
    scale: bool,
    padding_idx: int,
) -> Tensor:
    """The gradient of a table of `shape`; `bag` has the row of `grad` for each of `indices`."""
    used = torch.where(indices == padding_idx, -1, indices).to(torch.int64)
    dtype, kind = grad.dtype, fp.compute_dtype(grad.dtype)
    if mode == MEAN:
        inside = torch.where(used >= 0, bag, -1)
        grad = torch.ops.truncdet._divide(grad, count(inside, grad.size(0)), kind)
    rows, width = shape
    few = groups(used, rows) if worthwhile(used.numel(), rows, rows * width) else None
    here = used if few is None else few.adding
    start = grad.new_zeros(
        rows if few is None else used.numel(), width, dtype=kind if scale else grad.dtype
    )
    table = accumulate_rows(start, here, grad, bag.to(torch.int64), samples)
    table = divide_by_count(table, here, dtype) if scale else divide(table, None, dtype)
    if few is None:
        return table
    whole = table.new_zeros(shape)
    few.write(whole, 0, table)
    return whole


LIB.impl("embedding_bag", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::embedding_bag", _fake, lib=LIB)
torch.library.register_autograd("truncdet::embedding_bag", _backward, setup_context=_save, lib=LIB)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums or averages bags of rows of `weight`; the gradient's bits repeat in any order.

    As `torch.nn.functional.embedding_bag` with mode 'sum' or 'mean'. The gradient of `weight` is of
    tiers T1, T2 and T3o; the forward and the gradient of per_sample_weights are PyTorch's, T1.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> truncdet.embedding_bag(torch.tensor([[1, 0], [1, 1]]), table)
        tensor([[2., 3.],
                [3., 4.]])

    Args:
        input: int64 or int32 indices in [0, V): [B, N] for bags of N, or a vector with `offsets`.
        weight: the table [V, D] of float64, float32, float16 or bfloat16.
        offsets: where in a vector `input` each bag starts, ascending from 0; of input's dtype.
        max_norm: must be None: renormalising rows in place is not supported.
        norm_type: the norm of max_norm, so not used.
        scale_grad_by_freq: divide the gradient of a row by how often `input` names it.
        mode: 'sum' or 'mean'.
        sparse: must be False.
        per_sample_weights: factors of input's shape and weight's dtype, with 'sum' only.
        include_last_offset: `offsets` ends with the length of `input`.
        padding_idx: a row that takes part in nothing; negative from the end.

    Returns:
        [B, D] of weight's dtype. The gradient of a row has `scatter_add`'s bound with n =
        input.numel() and amax the largest gradient times the largest weight; a division adds one
        rounding to the compute type.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: a shape, a device or an option does not fit; on the CPU, an index is out of
            range.
        TruncdetError: on CUDA, an earlier call met an index out of range (padding_idx or row 0
            took its place in the forward, its gradient was dropped; see `truncdet.check`).
    """
    _sticky.raise_pending()
    check_table("embedding_bag", input, weight, max_norm, sparse)
    if mode not in ("sum", "mean"):
        raise ValueError(f"embedding_bag: mode must be 'sum' or 'mean', got {mode!r}")
    if per_sample_weights is not None:
        check_samples(input, weight, per_sample_weights, mode)
        per_sample_weights = per_sample_weights.reshape(-1)
    starts = bag_offsets(input, offsets, include_last_offset)
    if input.dim() == 2:
        include_last_offset = False
    out: Tensor = torch.ops.truncdet.embedding_bag(
        weight,
        input.reshape(-1),
        starts,
        per_sample_weights,
        SUM if mode == "sum" else MEAN,
        scale_grad_by_freq,
        include_last_offset,
        padding_row("embedding_bag", padding_idx, weight.size(0)),
    )
    return out
