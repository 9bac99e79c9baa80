"""Rows of one matrix, weighted, added to rows of another: a sparse matrix product in fixed point.

    R[c] = RN( x[c] + 2^-s * sum over k with index[k] = c of RN( (g[rows[k]] * w[k]) * 2^s ) )

The contribution is the float product of g and w, each scaled by the power of two above its own
largest finite magnitude (amax over all of `src` and all of `weights`); s = 62 - G - e_g - e_w with
G = ceil(log2(n)) for n indices. Weights that are missing are one. The rows that are added never
exist in memory side by side. The operator is linear and its own transpose: the gradient of `src`
swaps `index` and `rows`. Indices and rows out of range are left out; the caller has reported them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._library import LIB

LIB.define(
    "_accumulate_rows(Tensor input, Tensor index, Tensor src, Tensor rows, Tensor? weights) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def accumulate_rows_reference(
    input: Tensor, index: Tensor, src: Tensor, rows: Tensor, weights: Tensor | None
) -> Tensor:
    """input [C, I], src [m, I]; index, rows and weights are vectors of n elements."""
    kind = fp.compute_dtype(src.dtype)
    outside = (index < 0) | (index >= input.size(0)) | (rows < 0) | (rows >= src.size(0))
    if input.numel() == 0 or src.numel() == 0:
        return input.clone()
    values = src.to(kind)
    exponent = fp.exponent_above(fp.amax_word(values), kind)
    factors = torch.ones((), dtype=kind, device=src.device) if weights is None else weights.to(kind)
    factor_exponent = fp.exponent_above(fp.amax_word(factors), kind)
    if weights is None:  # a weight of one is no weight: it needs no power of two above it
        factor_exponent = torch.zeros_like(factor_exponent)
    headroom = torch.full_like(exponent, fp.headroom(index.numel()))
    picked = rows.masked_fill(outside, 0)
    column = (factors if weights is not None else factors.expand(index.shape)).unsqueeze(1)
    scaled = fp.scale_exponent(values, -exponent)[picked]
    scaled_column = fp.scale_exponent(column, -factor_exponent)
    contribution = scaled * scaled_column
    plain = values[picked]
    finite = plain.isfinite() & column.isfinite()
    flags = torch.where(finite, 0, fp.nonfinite_flags(plain * column))
    contribution = contribution.masked_fill(~finite | outside.unsqueeze(1), 0)
    flags = flags.masked_fill(outside.unsqueeze(1), 0)
    where = index.masked_fill(outside, 0)

    def add(amounts: Tensor) -> Tensor:
        return torch.zeros_like(input, dtype=torch.int64).index_add_(0, where, amounts)

    rounded = fp.quantise(contribution, headroom)
    low = add(fp.quantise_rest(contribution, rounded, headroom)) if kind == torch.float64 else None
    seen = torch.zeros_like(input, dtype=torch.int64)
    for flag in (fp.NAN, fp.PLUS_INF, fp.MINUS_INF):
        seen |= torch.where(add((flags == flag).to(torch.int64)) > 0, flag, 0)
    total = exponent + factor_exponent
    return fp.finish(add(rounded), low, total, headroom, input.dtype, existing=input, flags=seen)


def accumulate_rows(
    input: Tensor, index: Tensor, src: Tensor, rows: Tensor, weights: Tensor | None
) -> Tensor:
    """The operator; see the reference for shapes."""
    sums: Tensor = torch.ops.truncdet._accumulate_rows(input, index, src, rows, weights)
    return sums


def _fake(
    input: Tensor, index: Tensor, src: Tensor, rows: Tensor, weights: Tensor | None
) -> Tensor:
    return input.new_empty(input.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, index, src, rows, weights = inputs
    ctx.input_shape, ctx.src_shape = input.shape, src.shape
    ctx.save_for_backward(index, src, rows, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, src, rows, weights = ctx.saved_tensors
    src_grad = weight_grad = None
    if ctx.needs_input_grad[2]:
        start = grad.new_zeros(ctx.src_shape)
        src_grad = accumulate_rows(start, rows, grad, index, weights)
    if ctx.needs_input_grad[4]:
        arrived, left = (_rows(x, at) for x, at in ((grad, index), (src, rows)))
        weight_grad = (arrived * left).sum(1)
    return grad, None, src_grad, None, weight_grad


def _rows(x: Tensor, at: Tensor) -> Tensor:
    wide = at.unsqueeze(1).expand(-1, x.size(1))
    picked: Tensor = torch.ops.truncdet._gather(x, 0, wide, False, 0)
    return picked


LIB.impl("_accumulate_rows", accumulate_rows_reference, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_accumulate_rows", _fake, lib=LIB)
torch.library.register_autograd(
    "truncdet::_accumulate_rows", _backward, setup_context=_save, lib=LIB
)
