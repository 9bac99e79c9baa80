"""Which sums of doubles round to the same bits in every order, and which could not be proved.

A cell is S = sum of n contributions c_i, added in float64 in an unknown order and association.
Barring overflow, any of them gives S_fl with |S_fl - S| <= (n - 1) u A, where A = sum |c_i| and
u = 2^-53 (Jeannerod and Rump, "Improved error bounds for inner products in floating-point
arithmetic", SIAM J. Matrix Anal. Appl. 34(2), 2013). A is known only as a float sum A_fl of its
own, A <= A_fl / (1 - (n - 1) u), hence d = A_fl (n - 1) u / (1 - (n - 1) u), rounded up.

Two orders differ by at most 2 d. Rounding is monotone: if both ends of [S_fl - 2 d, S_fl + 2 d]
round to the same bits, so does everything between, and the cell is proved. This one comparison
covers ties, binade edges, subnormals, overflow and the sign of zero in whatever format follows.

A comes from the same backward on |g|, which is right only if the weights of g are non-negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from truncdet._bits import bits

# Above 2^50 contributions the bound's own slack nears one; nothing is proved then.
MOST_CONTRIBUTIONS = 1 << 50

# Sums this small may have lost contributions to a flush-to-zero mode, which the bound excludes.
FLOOR = 2.0**-900


def bound_factor(n: int) -> float:
    """Returns (n - 1) u / (1 - (n - 1) u), rounded up: d is this times A_fl."""
    if n > MOST_CONTRIBUTIONS:
        return math.inf
    relative = Fraction(n - 1, 1 << 53)
    return math.nextafter(float(relative / (1 - relative)), math.inf) if n > 1 else 0.0


def unproved_cells(
    total: Tensor, absolute: Tensor, n: int, rounding: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns a mask of the cells that some order of the sum might round to other bits.

    Args:
        total: float64 sums of one run, any shape.
        absolute: float64 sums of the magnitudes of the same contributions, same shape.
        n: the most contributions to one cell.
        rounding: monotone rounding that `total` will go through.

    Returns:
        bool tensor of that shape. A cell whose magnitudes add to zero is proved, so is every
        finite cell if n is one; a cell that is not finite never is.
    """
    up = total.new_full((), torch.inf)
    bound = torch.nextafter(absolute * bound_factor(n), up)
    exact = (absolute == 0) | (n == 1)
    twice = torch.where(exact, 0.0, 2 * bound)
    low = torch.where(exact, total, torch.nextafter(total - twice, -up))
    high = torch.where(exact, total, torch.nextafter(total + twice, up))
    same = bits(rounding(low)) == bits(rounding(high))
    sound = absolute.isfinite() & (exact | (absolute >= FLOOR))
    return ~(same & sound)


@dataclass(frozen=True)
class MidpointCase:
    """A gradient whose number of unproved cells is known; see `midpoint_case`."""

    function: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    index: Tensor
    gradient: Tensor
    n: int
    unproved: int


def midpoint_case(
    cells: int = 8, unproved: int = 3, bits: int = 11, device: torch.device | str = "cpu"
) -> MidpointCase:
    """Builds a gather whose gradient has exactly `unproved` cells that cannot be proved.

    Four contributions reach each cell: 1, a step, and twice 2^-53. In an unproved cell the step
    is 2^-bits, so the sum lies 2^-52 above the midpoint of two neighbours with `bits` bits:
    largest first, both tiny ones are lost and the tie goes down; smallest first, it goes up. In
    every other cell the step is half that, far from any midpoint, or all are zero.

    Example:
        >>> case = midpoint_case(cells=8, unproved=3)
        >>> f = truncdet.wrap(case.function, certify=True, weights="nonnegative", n=case.n)
        >>> f(case.x.requires_grad_(), case.index).backward(case.gradient)
        >>> f.unproved_cells()
        3

    Args:
        cells: number of cells, at least `unproved`.
        unproved: how many of them get a sum that no bound of this kind can prove.
        bits: significant bits the gradient will be rounded to, 3 to 24.
        device: where the tensors live.

    Returns:
        The case: `function(x, index)` gathers; x is float32 [cells], index int64 [4 * cells],
        gradient float32 [4 * cells], n is 4.
    """
    if not 0 <= unproved <= cells:
        raise ValueError(f"midpoint_case: unproved must be from 0 to {cells}, got {unproved}")
    parts = torch.tensor([1.0, 2.0**-bits, 2.0**-53, 2.0**-53], device=device)
    far = torch.tensor([1.0, 0.5, 1.0, 1.0], device=device)
    rows = [parts] * unproved
    rows += [parts * far if cell % 2 else parts * 0 for cell in range(cells - unproved)]
    gradient = torch.stack(rows).flatten() if rows else parts[:0]
    index = torch.arange(cells, device=device).repeat_interleave(4)
    return MidpointCase(_gather, torch.ones(cells, device=device), index, gradient, 4, unproved)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)
