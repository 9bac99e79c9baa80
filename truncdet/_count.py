"""How often an index names a cell: integers, so every order gives the same.

Means divide by these counts, and histc consists of them. An index out of range counts nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet._library import LIB

LIB.define(
    "_count(Tensor index, SymInt cells) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def count_reference(index: Tensor, cells: int) -> Tensor:
    """index [O, n, I] of int64 gives [O, cells, I] of int64."""
    counts = index.new_zeros(index.size(0), cells, index.size(2))
    if cells == 0:
        return counts
    inside = (index >= 0) & (index < cells)
    return counts.scatter_add_(1, index.masked_fill(~inside, 0), inside.to(torch.int64))


LIB.impl("_count", count_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::_count", lib=LIB)
def _fake(index: Tensor, cells: int) -> Tensor:
    return index.new_empty(index.size(0), cells, index.size(2))


def count(index: Tensor, cells: int) -> Tensor:
    """Counts of the vector `index` in [0, cells), as an int64 vector."""
    column = index.to(torch.int64).reshape(1, -1, 1)
    counts: Tensor = torch.ops.truncdet._count(column, cells)
    return counts.reshape(cells)


def count_along(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """For every cell of `input` how many elements of `index` name it along `dim`, as scatter_add.

    Where `index` is repeated over a whole dimension without memory, the result has size 1 there.
    """
    whole = list(shapes.sizes(input))
    dim %= len(whole)
    once = index.to(torch.int64).reshape(index.shape or (1,))
    if once.numel() == 0:
        return once.new_zeros(input.shape)
    for d, stride in enumerate(once.stride()):
        if stride == 0 and d != dim and once.size(d) == whole[d]:
            once, whole[d] = once.narrow(d, 0, 1), 1
    counts = torch.ops.truncdet._count(shapes.three_dimensions(once, dim), whole[dim])
    shape = list(once.shape)
    shape[dim] = whole[dim]
    unused = [size - used for size, used in zip(whole, shape, strict=True)]
    padding = [amount for extra in reversed(unused) for amount in (0, extra)]
    counts = torch.nn.functional.pad(counts.reshape(shape), padding)
    return counts if input.dim() > 0 else counts.reshape(())


def leading(counts: Tensor, shape: torch.Size) -> Tensor:
    """The result of `count_along` as `divide` takes it: the leading dimensions of `shape`."""
    keep = counts.dim()
    while keep > 0 and counts.size(keep - 1) == 1:
        keep -= 1
    return counts.reshape(counts.shape[:keep]).expand(shape[:keep])
