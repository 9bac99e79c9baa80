"""Rounding to few significant bits on the way in, and of the gradient on the way back.

A value keeps `bits` significant bits, counted from its leading one, and float32's exponent: a
literal cast to half also overflows above 65504 and turns gradients of at most 2^-25 (3e-8) into
zero. Rounding is to nearest, ties to even (IEEE 754-2019, 4.3.1), on the word.

    word of |x|:  exponent | kept, bits - 1 | dropped, p - bits      (p = format's significand)

A subnormal is an integer count of the smallest step. That integer, taken as a float of its own,
is normal and has the same leading one, so one rule on words serves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._bits import Format, format_of, round_half_even

MIN_BITS = 2  # with one bit every significand is odd: "ties to even" would have no meaning


def round_significand(x: Tensor, keep: int) -> Tensor:
    """Rounds floats to `keep` significant bits; no gradient, see `truncate` for the rule."""
    form = format_of(x.dtype, "truncate", "x")
    drop = form.significand - keep
    if drop <= 0:
        # A copy, as in all other cases: what is returned may be changed in place.
        return x.clone()
    return _round_words(x.resolve_neg(), form, drop)


def _round_words(x: Tensor, form: Format, drop: int) -> Tensor:
    word = x.view(form.word)
    magnitude = word & form.magnitude
    subnormal = magnitude < (1 << form.mantissa)
    # Exact: the integer has at most `mantissa` bits. It is at least one or zero, hence normal.
    count = magnitude.to(x.dtype).view(form.word)
    rounded = round_half_even(torch.where(subnormal, count, magnitude), drop)
    # Only counts go back to integers: other floats may be out of range.
    steps = torch.where(subnormal, rounded, 0).view(x.dtype).to(form.word)
    rounded = torch.where(subnormal, steps, rounded)
    # Carries past the largest finite number have become Inf; what was Inf or NaN keeps its word.
    rounded = torch.where(magnitude < form.infinity, rounded, magnitude)
    return (rounded | (word & form.sign)).view(x.dtype)


class _Truncate(torch.autograd.Function):
    """Straight-through: the gradient passes as if nothing were rounded, rounded itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: int, grad_bits: int | None) -> Tensor:
        ctx.grad_bits = grad_bits
        return round_significand(x, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        if ctx.grad_bits is None:
            return grad, None, None
        return _Truncate.apply(grad, ctx.grad_bits, ctx.grad_bits), None, None


def check_bits(bits: object, where: str, argument: str) -> int:
    """Returns `bits` if it is a usable number of significant bits; raises naming `argument`."""
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"{where}: {argument} must be an int, got {type(bits).__name__}")
    if bits < MIN_BITS:
        raise ValueError(f"{where}: {argument} must be at least {MIN_BITS}, got {bits}")
    return bits


def check_literal(dtype: object, where: str, argument: str) -> torch.dtype:
    """Returns `dtype` if a literal cast goes through it; raises naming `argument`."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{where}: {argument} must be torch.float16 or torch.bfloat16, got {dtype}"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def truncate(
    x: Tensor,
    bits: int = 11,
    *,
    dtype: torch.dtype | None = None,
    grad_bits: int | None = None,
) -> Tensor:
    """Rounds floats to `bits` significant bits, keeping their dtype and exponent range.

    To nearest, ties to even. -0.0, infinities and NaNs (with their payload) stay; a value that
    rounds past the largest finite number becomes infinite; subnormals count their bits from the
    leading one like all others. Flush-to-zero modes have no say. The gradient passes straight
    through, rounded by the same rule if `grad_bits` is given.

    Example:
        >>> truncate(torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1e-40])).tolist()
        [1.0, 1.001953125, 9.999665841421895e-41]

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape.
        bits: significant bits to keep, the implicit one counted, at least 2; the default is
            half's 11. The format's own number of bits, or more, changes nothing.
        dtype: torch.float16 or torch.bfloat16: do the literal cast and cast back instead, as
            in the published recipe (detectron2#4723, mmdetection#9831). `bits` is not used; the
            gradient takes the same casts and loses what that dtype cannot hold.
        grad_bits: significant bits the gradient keeps, or None to leave it alone.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        TypeError: `x` is not of a supported dtype, or a number of bits is not an int.
        ValueError: a number of bits is below 2, `dtype` is another one, or both `dtype` and
            `grad_bits` are given.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"truncate: x must be a torch.Tensor, got {type(x).__name__}")
    format_of(x.dtype, "truncate", "x")
    if dtype is not None:
        literal = check_literal(dtype, "truncate", "dtype")
        if grad_bits is not None:
            raise ValueError(
                f"truncate: grad_bits must be None with dtype, whose cast the gradient also "
                f"takes, got {grad_bits!r}"
            )
        return x.to(literal).to(x.dtype)
    keep = check_bits(bits, "truncate", "bits")
    if grad_bits is not None:
        check_bits(grad_bits, "truncate", "grad_bits")
    result: Tensor = _Truncate.apply(x, keep, grad_bits)
    return result
