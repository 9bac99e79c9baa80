"""How far two tensors lie apart: elements, first index, and distance in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truncdet._bits import FORMATS, bits


@dataclass(frozen=True)
class Difference:
    """Elements whose bits differ.

    Attributes:
        elements: how many.
        first_index: index of the first, in row-major order; empty for a scalar.
        max_ulp: largest distance in representable numbers of the dtype, zeros of both signs one
            apart; None for other than float dtypes and where a NaN is involved alone.
    """

    elements: int
    first_index: tuple[int, ...]
    max_ulp: int | None


def difference(a: Tensor, b: Tensor) -> Difference:
    """Compares two tensors of one dtype and shape by their bits.

    Raises:
        ValueError: dtypes or shapes differ.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"difference: b must be {a.dtype} {tuple(a.shape)}, got {b.dtype} {tuple(b.shape)}"
        )
    apart = bits(a) != bits(b)
    if a.is_complex():
        apart = apart.any(-1)
    where = apart.nonzero()
    if len(where) == 0:
        return Difference(0, (), 0 if a.dtype in FORMATS else None)
    return Difference(len(where), tuple(where[0].tolist()), _max_ulp(a[apart], b[apart]))


def _max_ulp(a: Tensor, b: Tensor) -> int | None:
    if a.dtype not in FORMATS:
        return None
    number = ~(a.isnan() | b.isnan())
    if not bool(number.any()):
        return None
    places = [_place(value[number]) for value in (a, b)]
    # Of float64 the difference may leave int64; in Python it does not.
    pairs = zip(places[0].tolist(), places[1].tolist(), strict=True)
    return max(abs(int(x) - int(y)) for x, y in pairs)


def _place(value: Tensor) -> Tensor:
    """Position in the ordered list of all numbers of the dtype; -0.0 comes before 0.0."""
    word = bits(value).to(torch.int64)
    magnitude = word & FORMATS[value.dtype].magnitude
    return torch.where(word < 0, -magnitude - 1, magnitude)
