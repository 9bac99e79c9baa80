"""index_put with accumulate=True: index_add on one index made of several.

The indexed dimensions become one dimension of cells and the tensors of indices, broadcast, one
vector: cell = (i_1 * n_2 + i_2) * n_3 + ... The other dimensions stay where torch has them: in
place if the indexed dimensions are neighbours, behind the indices' own dimensions otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet._compact import add_few, worthwhile
from truncdet._library import LIB
from truncdet._sticky import INDEX_PUT


def _expand_masks(input: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Every mask becomes the coordinates of its true elements, one vector a dimension."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        at = len(expanded)
        covered = list(input.shape[at : at + index.dim()])
        if list(index.shape) != covered:
            raise ValueError(
                f"index_put: a mask must have the shape of the dimensions it stands for, "
                f"{covered}, got {list(index.shape)}"
            )
        expanded.extend(index.nonzero(as_tuple=True))
    return expanded


def _check(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    shapes.check_float("index_put", "input", input)
    if values.dtype != input.dtype:
        raise TypeError(
            f"index_put: values must have input's dtype, {input.dtype}, got {values.dtype}"
        )
    shapes.check_device("index_put", "input", input, "values", values)
    for index in indices:
        if index is None:
            continue
        if index.dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8):
            raise TypeError(
                f"index_put: indices must be int64, int32, bool or uint8, got {index.dtype}"
            )
        shapes.check_device("index_put", "input", input, "indices", index)


LIB.define(
    "_cells(Tensor[] indices, SymInt[] sizes) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _cells(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The vector of cells that indices of one shape name; out of range where one of them is."""
    places = [_from_the_start(index, size) for size, index in zip(sizes, indices, strict=True)]
    if len(places) == 1:
        return places[0].flatten()
    cells, outside = places[0], _outside(places[0], sizes[0])
    for size, index in zip(sizes[1:], places[1:], strict=True):
        cells = cells * size + index
        outside = outside | _outside(index, size)
    return cells.masked_fill(outside, -1).flatten()


def _from_the_start(index: Tensor, size: int) -> Tensor:
    """A new tensor that counts from the start what `index` counts from the end."""
    index = index.to(torch.int64)
    if index.is_cpu and index.numel() > 0:
        low, high = (int(x) for x in torch.aminmax(index))
        if low < -size or high >= size:
            got = low if low < -size else high
            raise ValueError(f"index_put: indices must be in [{-size}, {size}), got {got}")
    return torch.where(index < 0, index + size, index)


def _outside(index: Tensor, size: int) -> Tensor:
    return (index < 0) | (index >= size)


LIB.impl("_cells", _cells, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::_cells", lib=LIB)
def _fake(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return indices[0].new_empty(indices[0].numel(), dtype=torch.int64)


def index_put(
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    exact: bool = False,
) -> Tensor:
    """Adds `values` to the elements of `input` that `indices` name, in any order alike.

    As `torch.index_put` with accumulate=True: tiers T1, T2 and T3o, forward and backward.

    Example:
        >>> at = (torch.tensor([0, 1, 1]),)
        >>> truncdet.index_put(torch.zeros(2), at, torch.tensor(1.0), accumulate=True)
        tensor([1., 2.])

    Args:
        input: float64, float32, float16 or bfloat16 tensor of at least one dimension. Not changed.
        indices: one entry for each of the first dimensions of `input`: int64 or int32 tensors that
            broadcast together, with values in [-n, n) for a dimension of size n, None for a whole
            dimension, or masks (bool or uint8) that stand for as many dimensions as they have. On
            CUDA a mask has to be waited for.
        values: what is added, of input's dtype; broadcasts to the shape of input[indices].
        accumulate: must be True; which of several values would stay otherwise is not defined.
        exact: as for `scatter_add`.

    Returns:
        A new contiguous tensor of input's shape and dtype; the error bound is `scatter_add`'s with
        n the number of broadcast indices. The gradient of `values` that were broadcast is a sum in
        fixed point as well.

    Raises:
        TypeError: a dtype is not one of the above, or values' is not input's.
        ValueError: accumulate is False; a shape or a device does not fit; on the CPU, an index is
            out of range.
        TruncdetError: on CUDA, an earlier call met an index out of range (its contribution was
            dropped; see `truncdet.check`).
    """
    _sticky.raise_pending()
    if not accumulate:
        raise ValueError("index_put: accumulate must be True, got False")
    call = _three_dimensions(input, indices, values, exact)
    sums: Tensor = torch.ops.truncdet.index_add(
        call.target, 1, call.cells, call.source, exact, INDEX_PUT
    )
    return sums.reshape(call.moved).permute(call.back).contiguous()


def index_put_(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """As `index_put` with accumulate=True, in place, without a gradient.

    Where few cells are named, no others are read or written.
    """
    _sticky.raise_pending()
    call = _three_dimensions(input, indices, values, False)
    target, cells = call.target, call.cells
    in_input = target.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    if in_input and worthwhile(cells.numel(), target.size(1), target.numel()):
        add_few(target, cells, call.source, INDEX_PUT)
        return
    sums = torch.ops.truncdet.index_add(target, 1, cells, call.source, False, INDEX_PUT)
    input.copy_(sums.reshape(call.moved).permute(call.back))


class _Call(NamedTuple):
    """Arguments of index_add along the second of three dimensions, and the way back: the shape of
    `target` before it had three, and the order of its dimensions in the input."""

    target: Tensor
    cells: Tensor
    source: Tensor
    moved: Sequence[int]
    back: list[int]


def _three_dimensions(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, exact: bool
) -> _Call:
    _check(input, indices, values)
    entries = _expand_masks(input, indices)
    if len(entries) > input.dim():
        raise ValueError(
            f"index_put: indices must be for at most {input.dim()} dimensions, got {len(entries)}"
        )
    used = [d for d, index in enumerate(entries) if index is not None]
    tensors = [index for index in entries if index is not None]
    if not tensors:
        raise ValueError("index_put: indices must have at least one tensor, got none")
    try:
        tensors = list(torch.broadcast_tensors(*tensors))
    except RuntimeError:
        sizes = ", ".join(str(list(index.shape)) for index in tensors)
        raise ValueError(f"index_put: indices must broadcast together, got {sizes}") from None
    cells: Tensor = torch.ops.truncdet._cells(tensors, [input.size(d) for d in used])
    first = used[0] if used[-1] - used[0] == len(used) - 1 else 0
    rest = [d for d in range(input.dim()) if d not in used]
    order = rest[:first] + used + rest[first:]
    moved = input.permute(order)
    before, along, after = (
        [input.size(d) for d in part] for part in (rest[:first], used, rest[first:])
    )
    shape = [*before, *tensors[0].shape, *after]
    target = moved.reshape(math.prod(before), math.prod(along), math.prod(after))
    source = _expand_values(values, shape, exact).reshape(
        target.size(0), cells.numel(), target.size(2)
    )
    back = [order.index(d) for d in range(input.dim())]
    return _Call(target, cells, source, moved.shape, back)


def _expand_values(values: Tensor, shape: Sequence[int], exact: bool) -> Tensor:
    """`values` broadcast, so that their gradient is summed in fixed point too."""
    try:
        wide = values.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"index_put: values must broadcast to {list(shape)}, got {list(values.shape)}"
        ) from None
    if list(values.shape) == list(shape) or not (values.requires_grad and torch.is_grad_enabled()):
        return wide
    places = torch.arange(values.numel(), device=values.device).reshape(values.shape)
    flat: Tensor = torch.ops.truncdet._gather(
        values.reshape(-1), 0, places.expand(shape).reshape(-1), exact, 0
    )
    return flat.reshape(shape)
