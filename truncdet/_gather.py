"""The gather behind the backward of scatter_add and index_add, differentiable reproducibly.

torch.gather would give the same values, but its own backward adds floats by atomics, and on CUDA an
index out of range stops the process; the forward has reported that index already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._library import LIB
from truncdet._scatter_shapes import sizes, unexpanded

LIB.define(
    "_gather(Tensor input, int dim, Tensor index, bool exact) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def gather_reference(input: Tensor, dim: int, index: Tensor, exact: bool) -> Tensor:
    """input.gather(dim, index), zero where the index is out of range: nothing was added there."""
    if input.numel() == 0 or index.numel() == 0:
        return input.new_zeros(index.shape)
    once = unexpanded(index).to(torch.int64)
    outside = (once < 0) | (once >= sizes(input)[dim])
    picked = input.gather(dim, once.masked_fill(outside, 0).expand(index.shape))
    return picked.masked_fill_(outside, 0)


def _fake(input: Tensor, dim: int, index: Tensor, exact: bool) -> Tensor:
    return input.new_empty(index.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.dim, index, ctx.exact = inputs
    ctx.input_shape = input.shape
    ctx.save_for_backward(index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    zeros = grad.new_zeros(ctx.input_shape)
    return torch.ops.truncdet.scatter_add(zeros, ctx.dim, index, grad, ctx.exact), None, None, None


LIB.impl("_gather", gather_reference, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_gather", _fake, lib=LIB)
torch.library.register_autograd("truncdet::_gather", _backward, setup_context=_save, lib=LIB)
