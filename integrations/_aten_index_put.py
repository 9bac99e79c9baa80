"""index_put and put with accumulate=True, from aten's arguments to truncdet's.

A wrong call is left to the original and its error, on the CPU one with an index out of range too; a
GPU drops what that index would add and reports it with the next call (see `truncdet.check`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported, unless_refused

from truncdet._index_put import index_put_

_MASKS = (torch.bool, torch.uint8)


def index_put(
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor | None:
    """In the arguments of `aten::_index_put_impl_`, which every form of index_put calls.

    `self` is changed.
    """
    given = [index for index in indices if index is not None]
    if _names_no_cell_twice(given):
        return None
    values = _moved(values, self) if values.dim() == 0 else values
    if not supported(self, values) or any(i.layout != torch.strided for i in given):
        return None
    places = [None if index is None else _moved(index, self) for index in indices]
    return _added(self, places, values)


def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor | None:
    """In the arguments of `aten::put_`: one index counts through all of `self`, which changes."""
    if not (supported(self, source) and index.dtype == torch.int64):
        return None
    if index.numel() != source.numel() or index.layout != torch.strided or index.numel() < 2:
        return None
    flat = self.reshape(-1)
    if _added(flat, [index.reshape(-1)], source.reshape(-1)) is None:
        return None
    # Where the elements do not lie one behind the other they were copied.
    return self if flat.data_ptr() == self.data_ptr() else self.copy_(flat.reshape(self.shape))


def _added(self: Tensor, places: Sequence[Tensor | None], values: Tensor) -> Tensor | None:
    # Without a gradient: autograd has its own formula for values that are broadcast.
    changed = unless_refused(_change, self, places, values.detach())
    return None if changed is None else self


def _change(self: Tensor, places: Sequence[Tensor | None], values: Tensor) -> bool:
    index_put_(self, places, values)
    return True


def accumulates(
    self: Tensor,
    index: object = None,
    values: object = None,
    accumulate: bool = False,
    *_: object,
    **__: object,
) -> bool:
    """Without it the last writer wins, of which truncdet has no definition."""
    return accumulate


def _names_no_cell_twice(indices: Sequence[Tensor]) -> bool:
    """Whether nothing is summed, so that PyTorch's result is exact and has no order."""
    if len(indices) == 1 and indices[0].dtype in _MASKS:
        return True
    return all(index.numel() < 2 and index.dtype not in _MASKS for index in indices)


def _moved(x: Tensor, to: Tensor) -> Tensor:
    """`x` on the device of `to`, where PyTorch moves it: from the CPU to a GPU."""
    return x.to(to.device) if x.is_cpu and to.is_cuda else x
