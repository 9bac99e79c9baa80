"""Arguments of adaptive pooling: what is allowed, and the number of windows along each axis."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet.fixedpoint import FORMATS

Size = int | Sequence[int | None] | None


def check_pool(op: str, input: Tensor, output_size: Size, spatial: int) -> list[int]:
    """Returns the windows along each of the last `spatial` axes; raises naming the argument."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a Tensor, got {type(input).__name__}")
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(
            f"{op}: input must have {spatial + 1} or {spatial + 2} dimensions, got {input.dim()}"
        )
    if input.dtype not in FORMATS:
        raise TypeError(
            f"{op}: input must be float64, float32, float16 or bfloat16, got {input.dtype}"
        )
    batched = input.dim() == spatial + 2
    if not all(n > 0 for n in input.shape[batched:]):
        raise ValueError(
            f"{op}: input must have no empty dimension but the batch, got {list(input.shape)}"
        )
    sizes: Sequence[Any] = (
        output_size if isinstance(output_size, (list, tuple)) else [output_size] * spatial
    )
    if len(sizes) != spatial:
        raise ValueError(f"{op}: output_size must have {spatial} elements, got {list(sizes)}")
    axes = input.shape[-spatial:]
    return [n if w is None else _windows(op, w) for w, n in zip(sizes, axes, strict=True)]


def _windows(op: str, value: Any) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        windows = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{op}: output_size must be an int, None or one an axis, got {type(value).__name__}"
        ) from None
    if windows < 0:
        raise ValueError(f"{op}: output_size must not be negative, got {windows}")
    return windows
