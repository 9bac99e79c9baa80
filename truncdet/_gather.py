"""The gather behind gather, index_select and every scatter's backward, differentiable reproducibly.

torch.gather would give the same values, but its own backward adds floats by atomics, and on CUDA an
index out of range stops the process. Here such an index picks zero; `operator` is the bit of the
operator to blame for it, or 0 where it has been reported already or is meant to be left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet._library import LIB

for _schema in (
    "_pick(Tensor input, Tensor index, int operator) -> Tensor",
    "_gather(Tensor input, int dim, Tensor index, bool exact, int operator=0) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def pick_reference(input: Tensor, index: Tensor, operator: int) -> Tensor:
    """The primitive: input [O, C, I] at index [O, n, I]; zero where that is out of range."""
    once = shapes.unexpanded(index)
    outside = (once < 0) | (once >= input.size(1))
    if operator != 0 and not index.is_cpu:
        _sticky.note_out_of_range(operator, outside)
    if input.numel() == 0:
        return input.new_zeros(index.shape)
    picked = input.gather(1, once.masked_fill(outside, 0).expand(index.shape))
    return picked.masked_fill_(outside, 0)


def gather(input: Tensor, dim: int, index: Tensor, exact: bool, operator: int = 0) -> Tensor:
    """Brings a call to the three dimensions of the primitive."""
    if index.numel() == 0:
        return input.new_empty(index.shape)
    shapes.check_range(operator, index, shapes.sizes(input)[dim])
    vectors = [x.reshape(1) if x.dim() == 0 else x for x in (input, index.to(torch.int64))]
    parts = (vectors[0][shapes.receiving(vectors[1], dim)], vectors[1])
    views = [shapes.three_dimensions(x, dim) for x in parts]
    picked: Tensor = torch.ops.truncdet._pick(*views, operator)
    return picked.reshape(index.shape)


def _fake(input: Tensor, dim: int, index: Tensor, exact: bool, operator: int = 0) -> Tensor:
    return input.new_empty(index.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, ctx.dim, index, ctx.exact, _ = inputs
    ctx.input_shape = input.shape
    ctx.save_for_backward(index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    zeros = grad.new_zeros(ctx.input_shape)
    # The forward has reported an index out of range.
    sums = torch.ops.truncdet.scatter_add(zeros, ctx.dim, index, grad, ctx.exact, 0)
    return sums, None, None, None, None


LIB.impl("_pick", pick_reference, "CompositeExplicitAutograd")
LIB.impl("_gather", gather, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_gather", _fake, lib=LIB)
torch.library.register_autograd("truncdet::_gather", _backward, setup_context=_save, lib=LIB)
