"""The largest row element of every group, and where it is: the lowest row of equals.

Comparisons are those of floats (-0 equals +0) and NaN takes no part. A group without a number, -inf
counted as one, gives -inf and the row N. The value is the picked element, sign of zero included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._library import LIB

LIB.define(
    "_segment_max(Tensor values, Tensor index, SymInt groups) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def segment_max_reference(values: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """values [N, C], index [N]; a row whose index is not in [0, groups) takes no part."""
    rows, columns = values.shape
    argmax = torch.full((groups, columns), rows, dtype=torch.int64, device=values.device)
    largest = values.new_full((groups, columns), -torch.inf)
    if values.numel() == 0 or groups == 0:
        return largest, argmax
    key = _ordered(values)
    absent = torch.iinfo(torch.int64).min
    outside = (index < 0) | (index >= groups)
    key = key.masked_fill(values.isnan() | outside.unsqueeze(1), absent)
    where = index.masked_fill(outside, 0).unsqueeze(1).expand(rows, columns)
    best = torch.full_like(argmax, absent).scatter_reduce_(0, where, key, "amax")
    place = torch.arange(rows, device=values.device).unsqueeze(1).expand(rows, columns)
    equal = (key == best.gather(0, where)) & (key != absent)
    argmax = argmax.scatter_reduce_(0, where, torch.where(equal, place, rows), "amin")
    padded = torch.cat([values, values.new_full((1, columns), -torch.inf)])
    return padded.gather(0, argmax), argmax


def segment_max(values: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The operator; see the reference for shapes."""
    largest: Tensor
    argmax: Tensor
    largest, argmax = torch.ops.truncdet._segment_max(values, index, groups)
    return largest, argmax


def _ordered(values: Tensor) -> Tensor:
    """int64 keys that compare as the numbers do; zeros of both signs have the key 0."""
    size = fp.magnitude(values)
    return torch.where(values < 0, -size, size)


def _fake(values: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    shape = (groups, values.size(1))
    return values.new_empty(shape), index.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rows = inputs[0].size(0)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _argmax: Any) -> tuple[Tensor | None, ...]:
    (argmax,) = ctx.saved_tensors
    # No two groups share a row, so nothing is added; groups without a maximum write to a row of
    # their own, which is cut off.
    start = grad.new_zeros(ctx.rows + 1, grad.size(1))
    return start.scatter(0, argmax, grad)[: ctx.rows], None, None


LIB.impl("_segment_max", segment_max_reference, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_segment_max", _fake, lib=LIB)
torch.library.register_autograd("truncdet::_segment_max", _backward, setup_context=_save, lib=LIB)
