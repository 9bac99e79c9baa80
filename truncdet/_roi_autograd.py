"""What the autograd formulas of the RoI operators share."""

from __future__ import annotations

from collections.abc import Callable
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


def without_second_derivative(op: str) -> Callable[..., None]:
    """The formula of a backward operator: there is none, and that is said."""

    def formula(*_: Any) -> None:
        raise TruncdetError(f"{op}: a second derivative is not implemented")

    return formula


no_double_backward = without_second_derivative("roi_align")
