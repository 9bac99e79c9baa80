"""Arguments of RoI operators: checks that name the argument, and boxes as [K, 5] rows.

`op` is the operator in messages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet._roi_align_reference import MAX_GRID, raise_outside
from truncdet.fixedpoint import FORMATS, compute_dtype

POOL_MODES = ("avg", "max")


def check_arguments(
    input: object,
    output_size: int | Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: str,
) -> tuple[tuple[int, int], int]:
    """Checks everything but roi_align's boxes; returns (PH, PW) and the sampling ratio as ints."""
    bins = check_features("roi_align", input, output_size, spatial_scale)
    ratio = check_ratio("roi_align", sampling_ratio)
    if pool_mode not in POOL_MODES:
        raise ValueError(
            f"roi_align: pool_mode must be one of {', '.join(POOL_MODES)}, got {pool_mode!r}"
        )
    return bins, ratio


def check_features(
    op: str, input: object, output_size: int | Sequence[int], spatial_scale: float
) -> tuple[int, int]:
    """Checks what all RoI operators have in common; returns (PH, PW) as ints."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a Tensor, got {type(input).__name__}")
    if input.dim() != 4:
        raise ValueError(f"{op}: input must have shape [N, C, H, W], got {list(input.shape)}")
    if input.dtype not in FORMATS:
        raise TypeError(
            f"{op}: input must be float64, float32, float16 or bfloat16, got {input.dtype}"
        )
    size = _size(op, output_size)
    if len(size) != 2 or not all(0 < n <= MAX_GRID and int(n) == n for n in size):
        raise ValueError(
            f"{op}: output_size must be one or two ints in [1, {MAX_GRID}], got {output_size}"
        )
    # Comparisons alone, which a compiler with symbolic numbers can trace; false for NaN.
    if not 0 < spatial_scale < math.inf:
        raise ValueError(f"{op}: spatial_scale must be positive and finite, got {spatial_scale}")
    return int(size[0]), int(size[1])


def check_ratio(op: str, sampling_ratio: int) -> int:
    """Checks a sampling ratio and returns it as an int."""
    ratio = _index(sampling_ratio)
    if ratio is None:
        raise TypeError(f"{op}: sampling_ratio must be an int, got {type(sampling_ratio).__name__}")
    if ratio > MAX_GRID:
        raise ValueError(f"{op}: sampling_ratio must be at most {MAX_GRID}, got {sampling_ratio}")
    return ratio


def check_sensitive(op: str, input: Tensor, bins: tuple[int, int]) -> None:
    """Raises if position-sensitive pooling cannot share the channels out among the bins."""
    count = bins[0] * bins[1]
    if input.shape[1] % count != 0:
        raise ValueError(
            f"{op}: input must have a multiple of {bins[0]} x {bins[1]} = {count} channels, "
            f"got {input.shape[1]}"
        )


def _index(value: Any) -> int | None:
    """Returns an integer of any kind, NumPy's too, as an int; None for anything else."""
    if isinstance(value, int):  # a plain one, which may be symbolic, stays what it is
        return value
    if isinstance(value, Tensor):  # whose value may be on a GPU, or nowhere yet
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _size(op: str, value: Any) -> tuple[Any, ...]:
    """Returns an integer as a pair, and a sequence or an array of one dimension as a tuple."""
    # Sequences first: torch.compile stops at operator.index of a tuple instead of raising.
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(value)
    number = _index(value)
    if number is not None:
        return number, number
    if not isinstance(value, Tensor) and getattr(value, "ndim", None) == 1:
        return tuple(value.tolist())
    raise TypeError(f"{op}: output_size must be an int or two of them, got {type(value).__name__}")


def prepare_boxes(input: Tensor, boxes: Tensor | Sequence[Tensor], op: str = "roi_align") -> Tensor:
    """Boxes as [K, 5] in the type coordinates are computed in, detached, on the input's device."""
    if isinstance(boxes, Tensor):
        if boxes.dim() != 2 or boxes.shape[1] != 5:
            raise ValueError(
                f"{op}: boxes must have shape [K, 5], got {list(boxes.shape)}"
                " (or give a list of [L, 4] tensors)"
            )
        rows = boxes
    elif not isinstance(boxes, (list, tuple)):
        raise TypeError(
            f"{op}: boxes must be a Tensor or a list of Tensors, got {type(boxes).__name__}"
        )
    else:
        rows = _from_list(op, input, boxes)
    if not rows.is_floating_point():
        raise TypeError(f"{op}: boxes must be floating point, got {rows.dtype}")
    if rows.device != input.device:
        raise ValueError(f"{op}: boxes must be on {input.device}, got {rows.device}")
    return rows.detach().to(compute_dtype(input.dtype))


def check_same_device(values: Tensor, boxes: Tensor, op: str = "roi_align") -> None:
    """For fake implementations, which also answer when one argument alone is on `meta`."""
    if values.device != boxes.device:
        raise RuntimeError(
            f"{op}: boxes must be on the device of the values, {values.device}, got {boxes.device}"
        )


def call(kernel: Any, input: Tensor, rois: Tensor, *arguments: Any, op: str = "roi_align") -> Any:
    """Calls an operator; a batch index outside the batch gives the ValueError that names it.

    The compiled kernel can only raise a RuntimeError. Looking at the boxes beforehand would break
    tracing with fake tensors.
    """
    if torch.compiler.is_compiling():
        return kernel(input, rois, *arguments)
    try:
        return kernel(input, rois, *arguments)
    except RuntimeError:
        if rois.is_cpu:
            raise_outside(rois, len(input), op)
        raise


def _from_list(op: str, input: Tensor, boxes: Sequence[Tensor]) -> Tensor:
    tensors = list(boxes)
    # A shorter one is as in torchvision: the last images have no boxes.
    if len(tensors) > input.shape[0]:
        raise ValueError(
            f"{op}: boxes must be a list of at most one tensor an image, {input.shape[0]}, "
            f"got {len(tensors)}"
        )
    dtype = compute_dtype(input.dtype)
    rows = [torch.zeros(0, 5, dtype=dtype, device=input.device)]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: boxes[{number}] must be a Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 2 or tensor.shape[1] != 4:
            raise ValueError(
                f"{op}: boxes[{number}] must have shape [L, 4], got {list(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{op}: boxes must be floating point, got {tensor.dtype}")
        if tensor.device != input.device:
            raise ValueError(f"{op}: boxes must be on {input.device}, got {tensor.device}")
        # Coordinates are widened before they meet the index, so that no index is rounded.
        index = torch.full((len(tensor), 1), number, dtype=dtype, device=input.device)
        rows.append(torch.cat([index, tensor.detach().to(dtype)], dim=1))
    return torch.cat(rows)
