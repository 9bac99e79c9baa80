"""The number format: contributions as int64 multiples of a power of two, and one final rounding.

Float addition is not associative, so a sum of floats depends on the order in which a GPU happens to
add them. Integer addition is associative. Every contribution c is therefore rounded once to a
multiple of 2^-s and added as an integer, and the sum is rounded once to the destination format:

    R = RN( 2^-s * sum_i RN(c_i * 2^s) )

s comes from order-free statistics of the inputs alone: e with max |c| < 2^e over the finite values
of a segment, and the head-room G with 2^G >= the largest total weight a cell can receive;
s = 62 - G - e, so no partial sum in any order leaves int64. The error against the exact sum S of n
contributions is |R - S| <= n * amax * 2^(G - 62) + 2^-p |R| with p the significand bits of the
destination (24 for float32).

These functions state the definition in plain tensor operations; the compiled kernels
(csrc/fixedpoint.h) give the same bits. They work on words and integers, or on floats that are
normal numbers, so flush-to-zero modes cannot change a bit.

Pre-rounding summands to make sums exact is due to Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation", ARITH 2013.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SUM_BITS = 62
"""Bits of an int64 that partial sums may use; the 63rd absorbs roundings inside contributions."""

MAX_HEADROOM = 60
"""The largest head-room G: more contributions would leave no bit for the sum itself."""

NAN, PLUS_INF, MINUS_INF = 1, 2, 4
"""Flags by which non-finite contributions reach a cell."""


class Format(NamedTuple):
    """A binary format: significand bits (implicit one counted) and exponent range."""

    precision: int
    min_exponent: int
    max_exponent: int
    word: torch.dtype

    @property
    def fraction_bits(self) -> int:
        return self.precision - 1

    @property
    def infinity(self) -> int:
        return (2 * self.max_exponent + 1) << self.fraction_bits

    @property
    def sign(self) -> int:
        """The sign bit as the word type holds it (a negative number)."""
        return int(torch.iinfo(self.word).min)


FORMATS = {
    torch.float64: Format(53, -1022, 1023, torch.int64),
    torch.float32: Format(24, -126, 127, torch.int32),
    torch.float16: Format(11, -14, 15, torch.int16),
    torch.bfloat16: Format(8, -126, 127, torch.int16),
}
"""The floating types a result can have."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type contributions are computed in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def headroom(count: int) -> int:
    """G = ceil(log2(count)), for `count` contributions of weight at most one.

    Raises:
        ValueError: if `count` is negative or above 2**60.
    """
    if not 0 <= count <= 1 << MAX_HEADROOM:
        raise ValueError(f"headroom: count must be in [0, 2**{MAX_HEADROOM}], got {count}")
    return max(count - 1, 0).bit_length()


def magnitude(x: Tensor) -> Tensor:
    """The words of |x| as int64 (ordered like the magnitudes; infinity and NaN at the top)."""
    fmt = FORMATS[x.dtype]
    return (x.contiguous().view(fmt.word) & ~fmt.sign).to(torch.int64)


def exponent_above(word: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest e with |x| < 2^e for finite magnitude words of `dtype`; 0 for zero."""
    fmt = FORMATS[dtype]
    field = word >> fmt.fraction_bits
    subnormal = _bit_length(word) + (fmt.min_exponent - fmt.fraction_bits)
    e = torch.where(field > 0, field - fmt.max_exponent + 1, subnormal)
    return torch.where(word == 0, torch.zeros_like(e), e)


def amax_word(x: Tensor) -> Tensor:
    """The largest magnitude word of the finite values of `x` (0-d int64; 0 if there are none)."""
    word = magnitude(x).flatten()
    finite = torch.where(word < FORMATS[x.dtype].infinity, word, torch.zeros_like(word))
    return torch.cat([finite, finite.new_zeros(1)]).amax()


def scale_exponent(x: Tensor, shift: Tensor) -> Tensor:
    """x * 2^shift, exact; non-finite x and results below the smallest normal number give +0."""
    fmt = FORMATS[x.dtype]
    word = x.contiguous().view(fmt.word).to(torch.int64)
    size = magnitude(x)
    field = size >> fmt.fraction_bits
    fraction = size & ((1 << fmt.fraction_bits) - 1)
    # A subnormal is brought to the form of a normal number first.
    up = torch.where(field > 0, torch.zeros_like(field), fmt.precision - _bit_length(fraction))
    up = torch.where(size == 0, torch.zeros_like(up), up)
    fraction = torch.where(field > 0, fraction, (fraction << up) & ((1 << fmt.fraction_bits) - 1))
    moved = torch.where(field > 0, field, 1 - up) + shift
    keep = (size != 0) & (size < fmt.infinity) & (moved > 0)
    scaled = (moved.clamp(0, 2 * fmt.max_exponent) << fmt.fraction_bits) | fraction
    scaled = torch.where(word < 0, scaled | fmt.sign, scaled)
    return torch.where(keep, scaled, torch.zeros_like(scaled)).to(fmt.word).view(x.dtype)


def power_of_two(exponent: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """2^exponent, built from its word; the result must be a normal number of `dtype`."""
    fmt = FORMATS[dtype]
    word = (exponent.to(torch.int64) + fmt.max_exponent) << fmt.fraction_bits
    return word.to(fmt.word).view(dtype)


def quantise(contribution: Tensor, headroom_bits: Tensor) -> Tensor:
    """RN(c * 2^(62-G)) as int64, for contributions of values already scaled into (-1, 1)."""
    unit = power_of_two(SUM_BITS - headroom_bits, contribution.dtype)
    return torch.round(contribution * unit).to(torch.int64)


def quantise_rest(contribution: Tensor, high: Tensor, headroom_bits: Tensor) -> Tensor:
    """The second limb: what `quantise` rounded away, in units of 2^-(2 (62-G))."""
    unit = power_of_two(SUM_BITS - headroom_bits, contribution.dtype)
    return torch.round((contribution * unit - high.to(contribution.dtype)) * unit).to(torch.int64)


def nonfinite_flags(x: Tensor) -> Tensor:
    """NAN, PLUS_INF or MINUS_INF where `x` is not finite, else 0 (int64)."""
    word, infinity = magnitude(x), FORMATS[x.dtype].infinity
    negative = x.contiguous().view(FORMATS[x.dtype].word) < 0
    inf_flag = torch.where(negative, MINUS_INF, PLUS_INF)
    flag = torch.where(word > infinity, NAN, torch.where(word == infinity, inf_flag, 0))
    return flag.to(torch.int64)


def finish(
    high: Tensor,
    low: Tensor | None,
    exponent: Tensor,
    headroom_bits: Tensor,
    dtype: torch.dtype,
    *,
    existing: Tensor | None = None,
    flags: Tensor | None = None,
) -> Tensor:
    """Rounds integer sums to `dtype`, once.

    Args:
        high: int64 sums in units of 2^(e + G - 62), any shape.
        low: int64 sums of the second limb in units of 2^(e + 2 (G - 62)), or None.
        exponent: e of each cell's segment, int64, broadcastable to `high`.
        headroom_bits: G of each cell's segment, int64, broadcastable to `high`.
        dtype: float64, float32, float16 or bfloat16.
        existing: values of `dtype` to add before the rounding; kept bit for bit by a zero sum.
        flags: non-finite contributions of each cell (see `nonfinite_flags`), or None.

    Returns:
        A tensor of `dtype` and the shape of `high`.
    """
    exponent = exponent.to(torch.int64).expand_as(high)
    headroom_bits = torch.as_tensor(headroom_bits, device=high.device).expand_as(high)
    if existing is None:
        existing = torch.zeros_like(high, dtype=dtype)
    if low is None and dtype != torch.float64:
        quantum = exponent + headroom_bits - SUM_BITS
        result = _round_one_limb(high, quantum, existing)
        zero = high == 0
    else:
        rest = torch.zeros_like(high) if low is None else low
        result = _round_two_limbs(high, rest, exponent, headroom_bits, existing)
        zero = (high == 0) & (rest == 0)
    word = magnitude(existing)
    infinity = FORMATS[dtype].infinity
    result = torch.where(word > infinity, torch.full_like(result, torch.nan), result)
    result = torch.where(zero | (word == infinity), existing, result)
    if flags is None:
        return result
    return _apply_flags(
        result, flags | torch.where(flags != 0, nonfinite_flags(existing), 0), flags
    )


def _apply_flags(result: Tensor, seen: Tensor, flags: Tensor) -> Tensor:
    plus, minus = (seen & PLUS_INF) != 0, (seen & MINUS_INF) != 0
    nan = ((seen & NAN) != 0) | (plus & minus)
    infinity = torch.where(minus, -torch.inf, torch.inf).to(result.dtype)
    special = torch.where(nan, torch.full_like(result, torch.nan), infinity)
    return torch.where(flags != 0, special, result)


def _bit_length(x: Tensor) -> Tensor:
    # Exact below 2^53, which covers every significand.
    return torch.frexp(x.to(torch.float64)).exponent.to(torch.int64)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as a rounded sum and its exact error (Knuth, TAOCP vol. 2, 4.2.2, theorem B)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _exact_double(x: Tensor) -> Tensor:
    """Float32, float16 or bfloat16 as float64, subnormals included in every denormal mode."""
    single = FORMATS[torch.float32]
    x = x.to(torch.float32)
    size = magnitude(x)
    field = size >> single.fraction_bits
    fraction = size & ((1 << single.fraction_bits) - 1)
    significand = torch.where(field > 0, fraction + (1 << single.fraction_bits), fraction)
    # Infinities and NaN are replaced afterwards by the caller; any finite value will do here.
    scale = field.clamp(1, 2 * single.max_exponent) + (
        single.min_exponent - 1 - single.fraction_bits
    )
    value = significand.to(torch.float64) * power_of_two(scale)
    return torch.where(x.view(single.word) < 0, -value, value)


def _round_one_limb(sums: Tensor, quantum: Tensor, existing: Tensor) -> Tensor:
    """existing + sums * 2^quantum, through a float64 rounded to odd, to the type of `existing`.

    Rounding to odd first and to nearest afterwards is one correct rounding when the first format
    has at least two bits more (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
    IEEE Trans. Computers 57(4), 2008).
    """
    high = (sums >> 32).to(torch.float64) * power_of_two(quantum + 32)
    low = (sums & 0xFFFFFFFF).to(torch.float64) * power_of_two(quantum)
    # The exact value is head + tail + rest, each far below the one before.
    head, tail = _two_sum(_exact_double(existing), high)
    tail, rest = _two_sum(tail, low)
    head, tail = _two_sum(head, tail)
    tail, rest = _two_sum(tail, rest)
    head, tail = _two_sum(head, tail)
    residue = torch.where(tail != 0, tail, rest)
    word = head.view(torch.int64)
    step = torch.where((residue > 0) == (head > 0), 1, -1)
    odd = torch.where((residue != 0) & ((word & 1) == 0), word + step, word)
    return _narrow_odd(odd.view(torch.float64), existing.dtype)


def _narrow_odd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 that was rounded to odd, to `dtype`: nearest, ties to even, by integers."""
    fmt, wide = FORMATS[dtype], FORMATS[torch.float64]
    size = magnitude(x)
    exponent = (size >> wide.fraction_bits) - wide.max_exponent
    significand = (size & ((1 << wide.fraction_bits) - 1)) | (1 << wide.fraction_bits)
    top = exponent.clamp(min=fmt.min_exponent)
    drop = (wide.fraction_bits - fmt.fraction_bits + top - exponent).clamp(max=60)
    kept = significand >> drop
    rest = significand - (kept << drop)
    half = torch.ones_like(drop) << (drop - 1)
    up = (rest > half) | ((rest == half) & ((kept & 1) == 1))
    word = ((top - fmt.min_exponent) << fmt.fraction_bits) + kept + up.to(torch.int64)
    word = torch.where(top > fmt.max_exponent, fmt.infinity, word.clamp(max=fmt.infinity))
    word = torch.where(size == 0, torch.zeros_like(word), word)
    word = torch.where((x < 0) & (size != 0), word | fmt.sign, word)
    return word.to(fmt.word).view(dtype)


def _round_two_limbs(
    high: Tensor, low: Tensor, exponent: Tensor, headroom_bits: Tensor, existing: Tensor
) -> Tensor:
    """As `_round_one_limb`, for sums of up to 126 bits: Python's integers, cell by cell."""
    fmt = FORMATS[existing.dtype]
    words = existing.contiguous().view(fmt.word).flatten().tolist()
    cells = zip(
        high.flatten().tolist(),
        low.flatten().tolist(),
        exponent.flatten().tolist(),
        headroom_bits.flatten().tolist(),
        words,
        strict=True,
    )
    out = []
    for h, r, e, g, word in cells:
        total = (h << (SUM_BITS - g)) + r
        if total != 0 and (word & (~fmt.sign)) < fmt.infinity:
            word = round_exact(total, e + 2 * (g - SUM_BITS), word, fmt)
        out.append(word)
    words_out = torch.tensor(out, dtype=torch.int64, device=high.device)
    return words_out.to(fmt.word).view(existing.dtype).reshape(high.shape)


def round_exact(total: int, quantum: int, existing: int, fmt: Format) -> int:
    """The word of RN(existing + total * 2^quantum) for a finite `existing` word, by integers."""
    size = existing & ~fmt.sign
    field, fraction = size >> fmt.fraction_bits, size & ((1 << fmt.fraction_bits) - 1)
    base = fraction + (1 << fmt.fraction_bits if field else 0)
    base_quantum = max(field, 1) + fmt.min_exponent - 1 - fmt.fraction_bits
    lowest = min(quantum, base_quantum)
    value = (total << (quantum - lowest)) + (
        (-base if existing < 0 else base) << (base_quantum - lowest)
    )
    if value == 0:
        return 0
    bits = abs(value)
    top = max(bits.bit_length() - 1 + lowest, fmt.min_exponent)
    drop = top - fmt.fraction_bits - lowest
    kept = bits << -drop if drop <= 0 else bits >> drop
    if drop > 0:
        rest, half = bits - (kept << drop), 1 << (drop - 1)
        kept += rest > half or (rest == half and kept & 1 == 1)
    word = min(((top - fmt.min_exponent) << fmt.fraction_bits) + kept, fmt.infinity)
    return word | fmt.sign if value < 0 else word
