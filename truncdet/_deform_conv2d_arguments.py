"""Arguments of deform_conv2d: checks that name the argument, and steps as pairs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet.fixedpoint import FORMATS

Step = int | Sequence[int]


def pair(name: str, value: Step, least: int) -> tuple[int, int]:
    """An int, or one for rows and one for columns, as a pair; each must be at least `least`."""
    numbers: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(numbers) != 2:
        raise ValueError(f"deform_conv2d: {name} must be an int or a pair, got {list(numbers)}")
    rows, columns = (_index(name, number) for number in numbers)
    if rows < least or columns < least:
        raise ValueError(
            f"deform_conv2d: {name} must be at least {least}, got {rows} and {columns}"
        )
    return rows, columns


def _index(name: str, value: Any) -> int:
    if isinstance(value, (int, torch.SymInt)):  # which may be symbolic, and stays what it is
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"deform_conv2d: {name} must be an int or a pair of them, got {type(value).__name__}"
        ) from None


def check_tensors(tensors: dict[str, Tensor | None]) -> None:
    """Raises unless the tensors are of the dtype and on the device of the first."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x is None and name in ("mask", "bias"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"deform_conv2d: {name} must be a Tensor, got {type(x).__name__}")
        if x.dtype not in FORMATS:
            raise TypeError(
                f"deform_conv2d: {name} must be float64, float32, float16 or bfloat16, "
                f"got {x.dtype}"
            )
        assert isinstance(first, Tensor)
        if x.dtype != first.dtype:
            raise TypeError(
                f"deform_conv2d: {name} must have input's dtype, {first.dtype}, got {x.dtype}"
            )
        if x.device != first.device:
            raise ValueError(
                f"deform_conv2d: {name} must be on input's device, {first.device}, got {x.device}"
            )


def check_shapes(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    """Raises unless the shapes fit each other."""
    if input.dim() != 4:
        _refuse("input", "[N, C, H, W]", input)
    if weight.dim() != 4 or 0 in weight.shape:
        _refuse("weight", "[O, C / groups, KH, KW] without an empty dimension", weight)
    channels, outputs, kernel = input.size(1), weight.size(0), weight.shape[2:]
    groups = channels // weight.size(1)
    if groups == 0 or groups * weight.size(1) != channels or outputs % groups != 0:
        raise ValueError(
            "deform_conv2d: weight must have shape [O, C / groups, KH, KW] with groups that divide "
            f"O and C, got {list(weight.shape)} for C = {channels}"
        )
    sizes = zip(input.shape[2:], kernel, stride, padding, dilation, strict=True)
    height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    if height < 1 or width < 1:
        raise ValueError(
            "deform_conv2d: input must be as large as the kernel reaches, got "
            f"{list(input.shape[2:])}, which leaves no output"
        )
    taps = kernel.numel()
    per_tap = offset.size(1) // taps if offset.dim() == 4 else 0
    if per_tap == 0 or per_tap % 2 != 0 or channels % (per_tap // 2) != 0:
        per_tap = 0
    if per_tap == 0 or offset.shape != (input.size(0), per_tap * taps, height, width):
        _refuse(
            "offset",
            f"[{input.size(0)}, {2 * taps} * G, {height}, {width}] with G that divides {channels}",
            offset,
        )
    half = [input.size(0), per_tap // 2 * taps, height, width]
    if mask is not None and list(mask.shape) != half:
        _refuse("mask", str(half), mask)
    if bias is not None and bias.shape != (outputs,):
        _refuse("bias", str([outputs]), bias)


def _refuse(name: str, shape: str, x: Tensor) -> None:
    raise ValueError(f"deform_conv2d: {name} must have shape {shape}, got {list(x.shape)}")
