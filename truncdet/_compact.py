"""Few slices added to many cells: the sums are made without the cells that nothing reaches.

An accumulator for every cell is two words a cell, most of them zero where a few rows of a large
table are used. Here equal cells get the number of their group, at most as many as there are
slices, and the sums are made by group; every slice then writes its group's result to its cell, so
those that meet there write the same bits. Scale and head-room come from the slices, as before:
results are bit for bit those of the sum over all cells.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 4  # cells for every slice, from which on sorting the slices pays
_SMALL = 1 << 16  # elements of a target that is not worth a sort


class Groups(NamedTuple):
    """Of n slices: `cells` [n] where they go, `numbers` [n] of their groups, each below n, and
    `adding`, the numbers with -1 for a cell out of range, which is 0 in the other two."""

    cells: Tensor
    numbers: Tensor
    adding: Tensor

    def write(self, target: Tensor, dim: int, results: Tensor) -> None:
        """Puts the results, one a group, along `dim` of `target`; cells without one stay."""
        target.index_copy_(dim, self.cells, results.index_select(dim, self.numbers))


def worthwhile(slices: int, cells: int, elements: int) -> bool:
    """Whether `slices` are few for a target of so many cells along the indexed dimension."""
    return 0 < slices * _FEW <= cells and elements >= _SMALL


def groups(cells: Tensor, size: int) -> Groups:
    """Numbers the distinct values of the int64 vector `cells`, in ascending order."""
    inside = (cells >= 0) & (cells < size)
    used = cells.masked_fill(~inside, 0)
    ascending, order = used.sort()
    steps = torch.zeros_like(ascending)
    steps[1:] = ascending[1:] != ascending[:-1]
    numbers = torch.empty_like(order).index_copy_(0, order, steps.cumsum(0))
    return Groups(used, numbers, numbers.masked_fill(~inside, -1))


def add_few(target: Tensor, cells: Tensor, source: Tensor, operator: int) -> None:
    """Adds source [O, n, I] to target [O, C, I] at `cells` [n], in place."""
    made = groups(cells, target.size(1))
    there = target.index_select(1, made.cells)
    start = torch.zeros_like(there).index_copy_(1, made.numbers, there)
    sums = torch.ops.truncdet.index_add(start, 1, made.adding, source, False, operator)
    made.write(target, 1, sums)
