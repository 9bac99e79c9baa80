"""Custom operators that behave under autocast as the aten operators they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet._library import LIB

_DEVICES = ("cpu", "cuda")


def _computes_wide(aten: str, device: str) -> bool:
    key = f"Autocast{device.upper()}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten}", key))


# Where autocast computes these in float32: asked once, so that a compiler need not trace it.
_WIDE = {
    (aten, device): _computes_wide(aten, device)
    for aten in ("nll_loss", "cross_entropy_loss", "ctc_loss.IntList")
    for device in _DEVICES
}


def follow_autocast(name: str, aten: str) -> None:
    """Lets `truncdet::name` compute in float32 where autocast makes `aten` do so.

    The lists of this torch decide, since they are not the same in every version.
    """
    for device in _DEVICES:
        if _computes_wide(aten, device):
            torch.library.register_autocast(f"truncdet::{name}", device, torch.float32, lib=LIB)


def as_autocast(aten: str, input: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both in float32 where autocast is on and makes `aten` compute so; float64 stays."""
    device = input.device.type
    if not (_WIDE.get((aten, device), False) and torch.is_autocast_enabled(device)):
        return input, other

    def wide(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()

    return wide(input), None if other is None else wide(other)
