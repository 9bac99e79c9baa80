"""What the autograd formulas of average and max pooling share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._errors import TruncdetError


def remember_input(ctx: Any, input: Tensor) -> None:
    """Keeps the shape and the memory order the gradient of `input` shall have."""
    ctx.shape = input.shape
    ctx.channels_last = not input.is_contiguous() and input.is_contiguous(
        memory_format=torch.channels_last
    )


def no_double_backward(*_: Any) -> None:
    """The formula of a backward operator: there is none, and that is said."""
    raise TruncdetError("roi_align: a second derivative is not implemented")
