"""Histograms and segments, from aten's arguments to truncdet's.

Each leaves what truncdet's function refuses to the original and its error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported, unless_refused

import truncdet
from truncdet.fixedpoint import FORMATS


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """In the arguments of `aten::bincount`, with weights."""
    if weights is None or not supported(weights) or self.numel() == 0:
        return None
    return unless_refused(truncdet.bincount, self, weights, minlength)


def weighted(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> bool:
    """Without weights integers are counted."""
    return weights is not None


def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor | None:
    """In the arguments of `aten::histc`."""
    if not supported(self) or isinstance(min, complex) or isinstance(max, complex):
        return None
    return unless_refused(truncdet.histc, self, bins, min, max)


def counts_beyond_floats(self: Tensor, *_: object, **__: object) -> bool:
    """PyTorch adds ones as floats, in no order: exact up to the last float without gaps."""
    return self.dtype in FORMATS and self.numel() > 2 ** FORMATS[self.dtype].precision


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor | None:
    """In the arguments of `aten::segment_reduce`, for sums and means."""
    given = [x for x in (lengths, offsets) if x is not None]
    if not supported(data) or data.numel() == 0:
        return None
    if isinstance(initial, complex) or any(x.layout != torch.strided for x in given):
        return None
    return unless_refused(
        truncdet.segment_reduce,
        data,
        reduce,
        lengths=lengths,
        indices=indices,
        offsets=offsets,
        axis=axis,
        unsafe=unsafe,
        initial=initial,
    )


def segment_sums(data: Tensor, reduce: str, **_: object) -> bool:
    """Extrema and products are left to the original, which reads each segment from its start."""
    return reduce in ("sum", "mean")
