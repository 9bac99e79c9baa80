"""Rounding to a common grid, so coarse that every float sum of the values is exact.

Let amax = max |x| over the finite values, e the least integer with amax < 2^e, count <= 2^L and
p the significant bits of the dtype that will add. The grid is u = 2^(e + L - p).

Proof. A snapped value is a multiple of u, at most 2^e in magnitude (rounding may reach 2^e, which
is itself a multiple since p >= L). So each partial sum of at most count values, in any order and
association, is a multiple k * u with |k| * u <= count * 2^e <= 2^(e + L), that is |k| <= 2^p.
Such numbers are representable: no addition rounds, hence all orders give the same bits (where
the floor below makes u exceed 2^e, values are 0 or u at most and |k| <= count <= 2^p as well).
It remains that k * u is neither too small nor too large for the dtype:
- small: u is never below SMALLEST of the dtype. For the wide formats this is the smallest normal
  number, because atomicAdd on float32 in global memory flushes subnormals (PTX ISA, `atom`);
- large: if 2^(e + L) exceeds the largest power of two of the dtype, a partial sum could overflow
  in one order and not in another. That depends on the data, and asking would mean to wait for the
  device, so all values become NaN: again the same for every order, and GradScaler sees it.
The idea of a common grid is that of pre-rounded summation: Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation", ARITH 2013, section III.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._bits import FORMATS, Format, format_of, round_half_even

MIN_BITS = 2  # bits of the largest values that must survive: fewer would leave only signs

# Exponent of the smallest grid. Half keeps its subnormals: no flush-to-zero mode covers it, and
# below its smallest normal number 6e-5 there are gradients that matter.
SMALLEST = {
    torch.float16: -24,
    torch.bfloat16: -126,
    torch.float32: -126,
    torch.float64: -1022,
}


def _exponent(amax: Tensor, dtype: torch.dtype, form: Format) -> Tensor:
    """The least e with amax < 2^e, from the word of amax; of zero, that of the least subnormal."""
    subnormal = amax < (1 << form.mantissa)
    # The word of a subnormal is an integer; as a float it is normal and shows its leading bit.
    count = amax.clamp(min=1).to(dtype).view(form.word)
    field = torch.where(subnormal, count, amax) >> form.mantissa
    shift = torch.where(subnormal, 1 - form.bias - form.mantissa, 0)
    return (field - form.bias + 1 + shift).to(form.word)


def _snap_words(x: Tensor, log_count: int, dtype: torch.dtype) -> Tensor:
    form, adder = FORMATS[x.dtype], FORMATS[dtype]
    word = x.view(form.word)
    magnitude = word & form.magnitude
    finite = magnitude < form.infinity
    e = _exponent(torch.where(finite, magnitude, 0).amax(), x.dtype, form)

    grid = (e + (log_count - adder.significand)).clamp(min=SMALLEST[dtype])
    # x = significand * 2^(field - bias - mantissa); the exponents are compared as fields.
    field = (magnitude >> form.mantissa).clamp(min=1)
    base = (field - 1) << form.mantissa
    significand = magnitude - base
    # A shift by mantissa + 2 leaves less than half a unit: zero, however coarse the grid is.
    drop = (grid + (form.bias + form.mantissa) - field).clamp(0, form.mantissa + 2)
    rounded = round_half_even(significand, drop.to(form.word))
    # A significand that was rounded up to the next power of two carries into the field.
    snapped = torch.where(finite, base + rounded, magnitude) | (word & form.sign)
    # Zeros lose their sign: a kernel that starts from +0 and one that does not would differ.
    snapped = torch.where(rounded == 0, 0, snapped)
    overflow = e + log_count > adder.bias
    return torch.where(overflow, torch.nan, snapped.view(x.dtype))


class _Snap(torch.autograd.Function):
    """Straight-through: the gradient passes as if nothing were rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_count: int, dtype: torch.dtype) -> Tensor:
        return _snap_words(x.resolve_neg(), log_count, dtype) if x.numel() else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def snap(x: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rounds all values to one grid on which sums of up to `count` of them are exact.

    Every order and association of the sum, in `dtype` arithmetic, gives the same bits; anybody's
    kernel may add. With amax the largest finite magnitude, amax < 2^e, p the significant bits
    of `dtype`, the grid is u = 2^(e + ceil(log2 count) - p), or the smallest normal number of
    `dtype` (float16: subnormal) if that is more, and

        |sum of the snapped - sum of the values| <= count * u / 2.

    Example:
        >>> x = snap(torch.randn(1000), count=1000)
        >>> x.sum() == x.flip(0).cumsum(0)[-1]
        tensor(True)

    Args:
        x: float16, bfloat16, float32 or float64 tensor of any shape. Infinities and NaNs pass
            through and do not count for amax.
        count: the most values that will be added into one sum, at least 1. Values enter with
            weight one; what is added must be these values, unscaled.
        dtype: the dtype in which somebody will add; default x's own.

    Returns:
        Tensor of x's shape and dtype, zeros positive; the gradient passes straight through.
        The grid belongs to this tensor: a sum that mixes two snapped tensors is not covered.
        A value that rounds past the largest finite number of x's dtype (possible only with a
        wider `dtype`) becomes infinite, which is the same in every order.
        All NaN if 2^(e + ceil(log2 count)) exceeds the largest power of two in `dtype`: some
        order might overflow, and the device is not asked (float16: count 64 needs amax < 512).

    Raises:
        TypeError: a dtype is not supported, or `count` is not an int.
        ValueError: `count` is below 1, or so large that fewer than 2 bits would remain.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"snap: x must be a torch.Tensor, got {type(x).__name__}")
    format_of(x.dtype, "snap", "x")
    adder = format_of(x.dtype if dtype is None else dtype, "snap", "dtype")
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"snap: count must be an int, got {type(count).__name__}")
    most = 1 << (adder.significand - MIN_BITS)
    if not 1 <= count <= most:
        raise ValueError(
            f"snap: count must be from 1 to {most} so that {MIN_BITS} bits remain in "
            f"{x.dtype if dtype is None else dtype}, got {count}"
        )
    log_count = (count - 1).bit_length()
    result: Tensor = _Snap.apply(x, log_count, x.dtype if dtype is None else dtype)
    return result
