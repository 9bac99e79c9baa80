"""What the autograd formulas of the RoI operators share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def remember_input(ctx: Any, input: Tensor) -> None:
    """Keeps the shape and the memory order the gradient of `input` shall have."""
    ctx.shape = input.shape
    ctx.channels_last = not input.is_contiguous() and input.is_contiguous(
        memory_format=torch.channels_last
    )
