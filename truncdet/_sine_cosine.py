"""Sine and cosine from + - * and conversions alone, in plain tensor operations.

What csrc/sine_cosine.h states for one angle: a reduction by quarter turns (Cody and Waite,
"Software Manual for the Elementary Functions", 1980) and Taylor's polynomials, in float64. The
error is below 0.8 ulp of float64, so results rounded to float32 are off by 0.5 ulp and 2^-28 more
at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_ANGLE = 1647099.0
"""2^20 quarter turns in radians, rounded down: up to here the reduction is exact."""

# pi/2 in three parts of 33 bits and what is left.
_PARTS = tuple(
    float.fromhex(part)
    for part in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2ep-69", "0x1.b839a252049c1p-104")
)
_QUARTERS_PER_RADIAN = float.fromhex("0x1.45f306dc9c883p-1")


def _exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as a rounded sum and its exact error (Knuth, TAOCP vol. 2, 4.2.2, theorem B)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _series(z: Tensor, first: int) -> Tensor:
    """1/first! - z/(first + 2)! + ... with seven or eight terms, innermost first."""
    degrees = range(first, 18, 2)
    result = torch.zeros_like(z)
    for number, degree in reversed(list(enumerate(degrees))):
        term = 1.0 / math.factorial(degree)
        result = result * z + (term if number % 2 == 0 else -term)
    return result


def sine_cosine(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of float64 angles in radians, at most LARGEST_ANGLE in magnitude."""
    turns = torch.round(angle * _QUARTERS_PER_RADIAN)
    x, error = _exact_sum(angle - turns * _PARTS[0], -(turns * _PARTS[1]))
    x, more = _exact_sum(x, -(turns * _PARTS[2]))
    low = (error + more) - turns * _PARTS[3]
    whole = x + low
    rest = (x - whole) + low
    z = whole * whole
    half = 0.5 * z
    one_less = 1.0 - half
    sine = whole + (whole * (z * -_series(z, 3)) + rest * one_less)
    cosine = one_less + (((1.0 - one_less) - half) + (z * (z * _series(z, 4)) - whole * rest))
    quarter = turns.to(torch.int64) & 3
    odd = (quarter & 1) == 1
    swapped, other = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    return (
        torch.where(quarter >= 2, -swapped, swapped),
        torch.where((quarter == 1) | (quarter == 2), -other, other),
    )
