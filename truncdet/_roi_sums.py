"""Fixed-point sums of one image's gradient, for the references of the RoI operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truncdet import fixedpoint


class Sums:
    """Sums of cells of any shape, with the scale of one image.

    Args:
        shape: of the sums.
        values: [K, ...], the gradients of the image's RoIs, in the compute type.
        bins: of one RoI that can reach one cell, with a total weight of at most one each.
    """

    def __init__(self, shape: Sequence[int], values: Tensor, bins: int) -> None:
        self.exponent = fixedpoint.exponent_above(fixedpoint.amax_word(values), values.dtype)
        headroom = fixedpoint.headroom(len(values) * bins)
        self.headroom = torch.tensor(headroom, device=values.device)
        self.high = torch.zeros(tuple(shape), dtype=torch.int64, device=values.device)
        self.low, self.seen = torch.zeros_like(self.high), torch.zeros_like(self.high)

    def scaled(self, values: Tensor) -> Tensor:
        """The values as contributions are formed of them: below one in magnitude."""
        return fixedpoint.scale_exponent(values, -self.exponent)

    def add(self, cell: Tensor, contribution: Tensor, raw: Tensor) -> None:
        """Adds contributions, any number to a cell.

        Args:
            cell: [n], places in the flattened sums.
            contribution: [n], formed of scaled values with weights that are not zero.
            raw: [n], the values before scaling.
        """
        rounded = fixedpoint.quantise(contribution, self.headroom)
        rest = fixedpoint.quantise_rest(contribution, rounded, self.headroom)
        # Integers: the order in which index_add_ adds cannot matter.
        self.high.view(-1).index_add_(0, cell, rounded)
        self.low.view(-1).index_add_(0, cell, rest)
        flags = fixedpoint.nonfinite_flags(raw)
        for flag in (fixedpoint.NAN, fixedpoint.PLUS_INF, fixedpoint.MINUS_INF):
            marked = torch.zeros_like(self.seen)
            marked.view(-1)[cell[flags == flag]] = flag
            self.seen |= marked

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sums, rounded once to `dtype`."""
        low = self.low if dtype == torch.float64 else None
        return fixedpoint.finish(
            self.high, low, self.exponent, self.headroom, dtype, flags=self.seen
        )
