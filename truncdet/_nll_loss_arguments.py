"""Arguments of nll_loss and cross_entropy: what is allowed, and how it becomes three dimensions."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(
    op: str, reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> str:
    """The reduction that is meant; raises for an unknown one. The old names come first."""
    if size_average is not None or reduce is not None:
        average, reduced = (True if x is None else x for x in (size_average, reduce))
        reduction = "none" if not reduced else "mean" if average else "sum"
        warnings.warn(
            f"{op}: size_average and reduce are old names for reduction={reduction!r}", stacklevel=3
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    return reduction


def check_input(op: str, input: object, weight: object) -> None:
    """Raises unless `input` has classes, and `weight`, where given, one element for each."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a Tensor, got {type(input).__name__}")
    shapes.check_float(op, "input", input)
    if input.dim() == 0:
        raise ValueError(f"{op}: input must have shape [C] or [N, C, ...], got []")
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{op}: weight must be a Tensor or None, got {type(weight).__name__}")
    if weight.dtype != input.dtype:
        raise TypeError(f"{op}: weight must have input's dtype, {input.dtype}, got {weight.dtype}")
    shapes.check_device(op, "input", input, "weight", weight)
    classes = input.size(0 if input.dim() == 1 else 1)
    if list(weight.shape) != [classes]:
        raise ValueError(f"{op}: weight must have shape [{classes}], got {list(weight.shape)}")


def check_target(op: str, input: Tensor, target: object, weight: Tensor | None) -> None:
    """Raises unless `target` holds one class for every place of `input`."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{op}: target must be a Tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"{op}: target must be int64, int32 or uint8, got {target.dtype}")
    shapes.check_device(op, "input", input, "target", target)
    wanted = [] if input.dim() == 1 else [input.size(0), *input.shape[2:]]
    if list(target.shape) != wanted:
        raise ValueError(
            f"{op}: target must have input's shape without the classes, {wanted}, "
            f"got {list(target.shape)}"
        )
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: weight must not require a gradient: it has none")


def by_places(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`input` as [N, C, L] and `target` as [N, L] of int64; views wherever there can be some."""
    target = target.to(torch.int64)
    if input.dim() == 1:
        return input.reshape(1, -1, 1), target.reshape(1, 1)
    if input.dim() == 2:
        return input.unsqueeze(2), target.unsqueeze(1)
    return input.flatten(2), target.flatten(1)


def check_range(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises on the CPU if a class of `target` [N, L] is out of range; a GPU is not waited for."""
    if not target.is_cpu:
        return
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        got = int(target[bad][0])
        raise ValueError(
            f"{op}: target must be in [0, {classes}) or ignore_index, {ignore_index}, got {got}"
        )
