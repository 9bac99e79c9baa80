"""Floats as exact fractions, and the nearest float of a fraction found by bisection over words.

Shares nothing with the library but the layout of the formats: it is what tests measure it against.
"""

from bisect import bisect_right
from fractions import Fraction

import torch

# dtype: stored significand bits, largest exponent, integer type of the words
LAYOUT = {
    torch.float64: (52, 1023, torch.int64),
    torch.float32: (23, 127, torch.int32),
    torch.float16: (10, 15, torch.int16),
    torch.bfloat16: (7, 127, torch.int16),
}
FLOATS = list(LAYOUT)


def infinity(dtype):
    stored, largest, _ = LAYOUT[dtype]
    return (2 * largest + 1) << stored


def sign_bit(dtype):
    return 1 << (8 * dtype.itemsize - 1)


def of_word(magnitude, dtype):
    """The value of a magnitude word; infinity is the power of two after the largest number."""
    stored, largest, _ = LAYOUT[dtype]
    field, fraction = magnitude >> stored, magnitude & ((1 << stored) - 1)
    significand = fraction + ((1 << stored) if field else 0)
    return significand * Fraction(2) ** (max(field, 1) - largest - stored)


def fractions_of(tensor):
    """The exact values of a tensor of finite floats, as a flat list."""
    sign = sign_bit(tensor.dtype)
    return [
        -of_word(word ^ sign, tensor.dtype) if word & sign else of_word(word, tensor.dtype)
        for word in words_of(tensor)
    ]


def words_of(tensor):
    """The words of a float tensor as a flat list of non-negative integers."""
    signed = tensor.detach().cpu().contiguous().view(LAYOUT[tensor.dtype][2]).flatten().tolist()
    return [word & (2 * sign_bit(tensor.dtype) - 1) for word in signed]


def from_words(words, dtype, device="cpu"):
    sign = sign_bit(dtype)
    signed = [word - 2 * sign if word & sign else word for word in words]
    return torch.tensor(signed, dtype=LAYOUT[dtype][2], device=device).view(dtype)


def nearest_word(value, dtype):
    """The word of the float nearest to a fraction, ties to the even word, +0 for zero."""
    magnitudes = range(infinity(dtype) + 1)
    below = bisect_right(magnitudes, abs(value), key=lambda word: of_word(word, dtype)) - 1
    if below < infinity(dtype):
        down = abs(value) - of_word(below, dtype)
        up = of_word(below + 1, dtype) - abs(value)
        below += down > up or (down == up and below % 2 == 1)
    return below | sign_bit(dtype) if value < 0 else below


def half_ulp(result, dtype):
    """The largest error that rounding to a result of this magnitude can make."""
    stored, largest, _ = LAYOUT[dtype]
    smallest = Fraction(2) ** (1 - largest - stored)
    return max(abs(result) * Fraction(2) ** -(stored + 1), smallest / 2)
