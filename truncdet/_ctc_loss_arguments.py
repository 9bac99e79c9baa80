"""Arguments of ctc_loss: what is allowed, and how it becomes padded targets and vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes

Lengths = Tensor | Sequence[int]


def check(log_probs: object, targets: object, blank: int) -> None:
    """Raises for arguments that ctc_loss cannot take, naming the argument."""
    for name, x in (("log_probs", log_probs), ("targets", targets)):
        if not isinstance(x, Tensor):
            raise TypeError(f"ctc_loss: {name} must be a Tensor, got {type(x).__name__}")
    assert isinstance(log_probs, Tensor) and isinstance(targets, Tensor)
    shapes.check_float("ctc_loss", "log_probs", log_probs)
    if log_probs.dim() not in (2, 3):
        raise ValueError(
            f"ctc_loss: log_probs must have shape [T, N, C] or [T, C], got {list(log_probs.shape)}"
        )
    if log_probs.numel() == 0:
        raise ValueError(f"ctc_loss: log_probs must not be empty, got {list(log_probs.shape)}")
    if not 0 <= blank < log_probs.size(-1):
        raise ValueError(f"ctc_loss: blank must be in [0, {log_probs.size(-1)}), got {blank}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"ctc_loss: targets must be of integers, got {targets.dtype}")
    items = log_probs.size(1) if log_probs.dim() == 3 else 1
    if targets.dim() not in (1, 2) or (targets.dim() == 2 and targets.size(0) != items):
        raise ValueError(
            f"ctc_loss: targets must have shape [{items}, S] or [sum of target_lengths], "
            f"got {list(targets.shape)}"
        )


def lengths(name: str, given: Lengths, items: int, most: int, device: torch.device) -> Tensor:
    """A vector of int64 on the device; what is on the host as numbers is checked here."""
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"ctc_loss: {name} must be of integers, got {given.dtype}")
        vector = given.reshape(1) if given.dim() == 0 else given
    else:
        if not isinstance(given, Sequence):
            raise TypeError(
                f"ctc_loss: {name} must be a Tensor or a sequence, got {type(given).__name__}"
            )
        for length in given:
            if isinstance(length, bool) or not hasattr(length, "__index__"):
                raise TypeError(f"ctc_loss: {name} must be of integers, got {length!r}")
            if not 0 <= length <= most:
                raise ValueError(f"ctc_loss: {name} must be in [0, {most}], got {length}")
        vector = torch.tensor(given, dtype=torch.int64)
    if list(vector.shape) != [items]:
        raise ValueError(
            f"ctc_loss: {name} must have one element for each of {items} items, "
            f"got shape {list(vector.shape)}"
        )
    return vector.to(device=device, dtype=torch.int64)


def by_item(targets: Tensor, given: Lengths, lengths: Tensor, items: int) -> Tensor:
    """[N, S] of int64 on the device of `lengths`, no wider than it must be where that is known."""
    labels = targets.to(device=lengths.device, dtype=torch.int64)
    if labels.dim() == 2:
        return labels if isinstance(given, Tensor) else labels[:, : max(given)]
    known = given.reshape(-1).tolist() if isinstance(given, Tensor) else list(given)
    if sum(known) != labels.numel():
        raise ValueError(
            "ctc_loss: targets must have as many elements as target_lengths add up to, "
            f"{sum(known)}, got {labels.numel()}"
        )
    if min(known) < 0:
        raise ValueError(
            f"ctc_loss: target_lengths must be in [0, {labels.numel()}], got {min(known)}"
        )
    padded = labels.new_zeros(items, max(known))
    place = torch.arange(max(known), device=labels.device)
    ends = lengths.cumsum(0).unsqueeze(1)
    where = ends - lengths.unsqueeze(1) + place
    used = place < lengths.unsqueeze(1)
    return torch.where(used, labels[where.masked_fill(~used, 0)], padded) if len(labels) else padded


def check_range(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> None:
    """Raises on the CPU if a length or a label that is used is out of range; a GPU is not waited
    for."""
    if not log_probs.is_cpu:
        return
    labels, classes = targets.size(1), log_probs.size(2)
    for name, given, most in (
        ("input_lengths", input_lengths, log_probs.size(0)),
        ("target_lengths", target_lengths, labels),
    ):
        bad = given[(given < 0) | (given > most)]
        if bad.numel() > 0:
            raise ValueError(f"ctc_loss: {name} must be in [0, {most}], got {int(bad[0])}")
    used = torch.arange(labels) < target_lengths.unsqueeze(1)
    bad = targets[((targets < 0) | (targets >= classes)) & used]
    if bad.numel() > 0:
        raise ValueError(f"ctc_loss: targets must be in [0, {classes}), got {int(bad[0])}")
