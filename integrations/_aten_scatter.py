"""Sums by index along a dimension, from aten's arguments to truncdet's.

A wrong call is left to the original and its error, but for an index out of range: a GPU reports it
with the next call (see `truncdet.check`), and on the CPU scatter_add and index_add have an error of
their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported, unless_refused

import truncdet
from truncdet import _scatter_shapes as shapes
from truncdet import _sticky


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor | None:
    """In the arguments of `aten::scatter_add`."""
    if not (supported(self, src) and _accepts(shapes.check_scatter, self, dim, index, src)):
        return None
    _sticky.raise_pending()
    result: Tensor = torch.ops.truncdet.scatter_add(self, dim, index, src, False)
    return result


def index_add(
    self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: complex = 1
) -> Tensor | None:
    """In the arguments of `aten::index_add`; a contribution is alpha * source in source's dtype."""
    # truncdet lets a scalar stand for a vector of one element; aten does not.
    if not (supported(self, source) and self.dim() == source.dim()):
        return None
    if isinstance(alpha, complex) or torch.finfo(self.dtype).max < abs(alpha) < float("inf"):
        return None
    if not _accepts(shapes.check_index, self, dim, index, source):
        return None
    _sticky.raise_pending()
    contributions = source if alpha == 1 else source * alpha
    result: Tensor = torch.ops.truncdet.index_add(self, dim, index, contributions, False)
    return result


def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor | None:
    """In the arguments of `aten::scatter_reduce.two`, for sums and means."""
    if not (supported(self, src) and _accepts(shapes.check_scatter, self, dim, index, src)):
        return None
    return unless_refused(
        truncdet.scatter_reduce, self, dim, index, src, reduce, include_self=include_self
    )


def sums_or_averages(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **_: object
) -> bool:
    """Of scatter_reduce: extrema have no order, and of products truncdet has no definition."""
    return reduce in ("sum", "mean")


def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Tensor | None:
    """In the arguments of `aten::scatter.reduce`, for sums."""
    if not (supported(self, src) and _accepts(shapes.check_scatter, self, dim, index, src)):
        return None
    return unless_refused(truncdet.scatter_add, self, dim, index, src)


def adds(*_: object, reduce: str = "", **__: object) -> bool:
    """Of scatter with a reduction, 'add' or 'multiply'."""
    return reduce == "add"


def index_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor | None:
    """In the arguments of `aten::index_reduce`, for means: scatter_reduce with an index of rows."""
    if not (supported(self, source) and self.dim() == source.dim()):
        return None
    if not _accepts(shapes.check_index, self, dim, index, source):
        return None
    index = shapes.expand_index(index, dim, source.shape)
    return unless_refused(
        truncdet.scatter_reduce, self, dim, index, source, reduce, include_self=include_self
    )


def averages(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, **_: object
) -> bool:
    """Of index_reduce."""
    return reduce == "mean"


def _accepts(
    check: Callable[..., None], self: Tensor, dim: int, index: Tensor, source: Tensor
) -> bool:
    # Nothing to add to: aten does not even look at the index then.
    if index.layout != torch.strided or self.numel() == 0:
        return False
    try:
        check("aten", self, dim, index, source)
    except (TypeError, ValueError):
        return False
    return True
