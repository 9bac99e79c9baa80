"""Custom operators that behave under autocast as the aten operators they stand for."""

from __future__ import annotations

import torch

from truncdet._library import LIB


def follow_autocast(name: str, aten: str) -> None:
    """Lets `truncdet::name` compute in float32 where autocast makes `aten` do so.

    The lists of this torch decide, since they are not the same in every version.
    """
    for device in ("cpu", "cuda"):
        key = f"Autocast{device.upper()}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten}", key):
            torch.library.register_autocast(f"truncdet::{name}", device, torch.float32, lib=LIB)
