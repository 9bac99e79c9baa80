"""Arguments of embedding and embedding_bag: what is allowed, and in which form it goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes


def check_table(
    op: str, input: Tensor, weight: Tensor, max_norm: float | None, sparse: bool
) -> None:
    """Raises for what neither embedding nor embedding_bag takes."""
    shapes.check_float(op, "weight", weight)
    shapes.check_integers(op, "input", input)
    shapes.check_device(op, "weight", weight, "input", input)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must have 2 dimensions, got {weight.dim()}")
    if max_norm is not None:
        raise ValueError(
            f"{op}: max_norm must be None (rows are not renormalised in place), got {max_norm}"
        )
    if sparse:
        raise ValueError(f"{op}: sparse must be False, got True")


def padding_row(op: str, padding_idx: int | None, rows: int) -> int:
    """padding_idx counted from the front; -1 if there is none."""
    if padding_idx is None:
        return -1
    if not -rows <= padding_idx < rows:
        raise ValueError(f"{op}: padding_idx must be in [{-rows}, {rows}), got {padding_idx}")
    return padding_idx % rows


def check_samples(input: Tensor, weight: Tensor, samples: Tensor, mode: str) -> None:
    """Raises for per_sample_weights that do not fit."""
    if samples.shape != input.shape:
        raise ValueError(
            f"embedding_bag: per_sample_weights must have input's shape, {list(input.shape)}, "
            f"got {list(samples.shape)}"
        )
    if samples.dtype != weight.dtype:
        raise TypeError(
            f"embedding_bag: per_sample_weights must have weight's dtype, {weight.dtype}, "
            f"got {samples.dtype}"
        )
    shapes.check_device("embedding_bag", "weight", weight, "per_sample_weights", samples)
    if mode != "sum":
        raise ValueError(f"embedding_bag: mode must be 'sum' with per_sample_weights, got {mode!r}")


def bag_offsets(input: Tensor, offsets: Tensor | None, include_last: bool) -> Tensor:
    """Where the bags start in the flattened `input`."""
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("embedding_bag: offsets must be None for a matrix of indices")
        width = max(input.size(1), 1)
        return torch.arange(
            0, input.size(0) * width, width, dtype=input.dtype, device=input.device
        ).clamp(max=input.numel())
    if input.dim() != 1:
        raise ValueError(f"embedding_bag: input must have 1 or 2 dimensions, got {input.dim()}")
    if offsets is None or offsets.dim() != 1:
        got = "None" if offsets is None else f"{offsets.dim()} dimensions"
        raise ValueError(f"embedding_bag: offsets must be a vector for a vector input, got {got}")
    if offsets.dtype != input.dtype:
        raise TypeError(
            f"embedding_bag: offsets must have input's dtype, {input.dtype}, got {offsets.dtype}"
        )
    shapes.check_device("embedding_bag", "input", input, "offsets", offsets)
    if include_last and offsets.numel() == 0:
        raise ValueError("embedding_bag: offsets must have an element with include_last_offset")
    return offsets
