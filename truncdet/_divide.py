"""A sum by a count, rounded once: the last step of every mean.

    RN_T( x / n ),    x a finished value of the compute type, n an integer count

A mean is the fixed-point sum rounded once to the compute type (float32, or float64 for float64),
and then this quotient, rounded once to the storage type. In float32 and float64 that is IEEE
division; in half types no overflow of the sum and no second rounding stand in the way. Integers
carry it out, so flush-to-zero modes cannot change a bit. Counts of 0 and 1 divide nothing, which
leaves the plain conversion between storage types, NaN canonical.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._library import LIB

LIB.define(
    "_divide(Tensor values, Tensor? counts, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# Bits of the quotient of float32's 24-bit significand that int64 can hold before the division.
_SHIFT = 38


def divide_reference(values: Tensor, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`counts` has the leading dimensions of `values`; one count serves all that follow."""
    kind = fp.compute_dtype(values.dtype)
    x = values.to(kind).contiguous()
    if counts is None:
        n = torch.ones((), dtype=torch.int64, device=x.device).expand(x.shape)
    else:
        n = counts.clamp(min=1).reshape(counts.shape + (1,) * (x.dim() - counts.dim()))
        n = n.expand(x.shape)
    finite = (_quotient if kind == torch.float32 else _quotient_double)(x, n, dtype)
    # A conversion of NaN keeps or drops its payload as the processor likes.
    special = torch.where(x.isnan(), torch.full_like(finite, torch.nan), x.to(dtype))
    return torch.where(x.isfinite(), finite, special)


def _quotient(x: Tensor, n: Tensor, dtype: torch.dtype) -> Tensor:
    """RN(x / n) for finite float32 `x` and n <= 2^36, which leaves 26 bits of quotient."""
    fmt = fp.FORMATS[torch.float32]
    size = fp.magnitude(x)
    field = size >> fmt.fraction_bits
    fraction = size & ((1 << fmt.fraction_bits) - 1)
    significand = torch.where(field > 0, fraction | (1 << fmt.fraction_bits), fraction)
    exponent = field.clamp(min=1) + (fmt.min_exponent - 1 - fmt.fraction_bits)
    up = fmt.precision - fp._bit_length(significand).clamp(min=1)
    numerator = (significand << up) << _SHIFT
    quotient = torch.div(numerator, n, rounding_mode="floor")
    inexact = quotient * n != numerator
    # As a float64 rounded to odd: 50 bits, the last one set if anything was lost.
    drop = (fp._bit_length(quotient) - 50).clamp(min=0)
    kept = quotient >> drop
    inexact |= (kept << drop) != quotient
    odd = (kept | inexact.to(torch.int64)).to(torch.float64)
    odd = odd * fp.power_of_two(exponent - up - _SHIFT + drop)
    negative = x.view(fmt.word) < 0
    rounded = fp._narrow_odd(torch.where(negative, -odd, odd), dtype)
    return torch.where(size == 0, torch.where(negative, -0.0, 0.0).to(dtype), rounded)


def _quotient_double(x: Tensor, n: Tensor, dtype: torch.dtype) -> Tensor:
    """RN(x / n) for finite float64, cell by cell in Python's integers."""
    fmt = fp.FORMATS[torch.float64]
    out = []
    words = x.view(torch.int64).flatten().tolist()
    for word, count in zip(words, n.flatten().tolist(), strict=True):
        size = word & ~fmt.sign
        if count == 1 or size == 0 or size >= fmt.infinity:
            out.append(word)
            continue
        field, fraction = size >> fmt.fraction_bits, size & ((1 << fmt.fraction_bits) - 1)
        significand = fraction + ((1 << fmt.fraction_bits) if field else 0)
        quantum = max(field, 1) + fmt.min_exponent - 1 - fmt.fraction_bits
        # 128 more bits, so that the sticky bit lies below every rounding position.
        quotient, rest = divmod(significand << 128, count)
        total = quotient | (rest != 0)
        out.append(fp.round_exact(-total if word < 0 else total, quantum - 128, 0, fmt))
    return torch.tensor(out, dtype=torch.int64, device=x.device).view(x.dtype).reshape(x.shape)


def divide(values: Tensor, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`values` by `counts` in `dtype`; as it is where nothing changes."""
    if counts is None and values.dtype == dtype:
        return values
    result: Tensor = torch.ops.truncdet._divide(values, counts, dtype)
    return result


def _fake(values: Tensor, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, counts, _ = inputs
    ctx.dtype = values.dtype
    ctx.save_for_backward(counts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return torch.ops.truncdet._divide(grad, counts, ctx.dtype), None, None


LIB.impl("_divide", divide_reference, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_divide", _fake, lib=LIB)
torch.library.register_autograd("truncdet::_divide", _backward, setup_context=_save, lib=LIB)
