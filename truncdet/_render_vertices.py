"""Sums of contributions at vertices, in plain tensor operations: the definition kernels must meet.

Contributions to vertices have no known range: they are products of incoming gradients with
barycentric coordinates, with differentials, or with reciprocals of depths and areas. So the row of
values of every vertex is a segment of its own, and what sets its scale are the contributions
themselves: a first pass finds e, the exponent of the largest finite magnitude that reaches the row,
a second one adds (see truncdet.fixedpoint). A pixel gives a row at most three contributions, where
the corners of a triangle are one vertex, hence G = ceil(log2(3 P)) for P pixels. A single huge
contribution elsewhere costs a vertex none of its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import fixedpoint as fp

CORNERS = 3


def headroom_bits(pixels: int) -> int:
    """G for the pixels whose triangles may have a vertex as corner."""
    return fp.headroom(CORNERS * pixels)


def share(weight: Tensor, value: Tensor) -> Tensor:
    """Their product; a zero leaves nothing of whatever it meets, NaN and infinities included."""
    return torch.where((weight == 0) | (value == 0), 0, weight * value)


def vertex_sums(row: Tensor, contribution: Tensor, rows: int, bits: int) -> Tensor:
    """Contributions [K, C], each row of them to the row `row[k]` of the result [rows, C]."""
    kind = contribution.dtype
    words = fp.magnitude(contribution)
    words = torch.where(words < fp.FORMATS[kind].infinity, words, 0)
    if contribution.numel() == 0:
        return contribution.new_zeros(rows, contribution.size(1))
    amax = words.new_zeros(rows).scatter_reduce_(0, row, words.amax(1), "amax")
    exponent = fp.exponent_above(amax, kind).unsqueeze(1)
    headroom = torch.full_like(exponent, bits)

    def add(amounts: Tensor) -> Tensor:
        zeros = torch.zeros(rows, amounts.size(1), dtype=torch.int64, device=row.device)
        return zeros.index_add_(0, row, amounts)

    normal = fp.scale_exponent(contribution, -exponent[row].expand_as(contribution))
    rounded = fp.quantise(normal, headroom[row])
    low = add(fp.quantise_rest(normal, rounded, headroom[row])) if kind == torch.float64 else None
    flags = fp.nonfinite_flags(contribution)
    seen = torch.zeros(rows, contribution.size(1), dtype=torch.int64, device=row.device)
    for flag in (fp.NAN, fp.PLUS_INF, fp.MINUS_INF):
        seen |= torch.where(add((flags == flag).to(torch.int64)) > 0, flag, 0)
    return fp.finish(add(rounded), low, exponent, headroom, kind, flags=seen)
