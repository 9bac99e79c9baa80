"""The sum of all elements of a tensor in fixed point, and the quotient of two such sums.

Both are operators of their own, so that a compiler cannot replace the quotient by a cheaper one
that is not rounded correctly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _scatter as _scatter  # defines the op that `total` calls
from truncdet._library import LIB

LIB.define("_ratio(Tensor x, Tensor divisor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _ratio(x: Tensor, divisor: Tensor) -> Tensor:
    quotient = x / divisor
    # Processors differ in the NaN that they make.
    return quotient.masked_fill_(quotient.isnan(), torch.nan)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.truncdet._ratio(grad, ctx.saved_tensors[0]), None


LIB.impl("_ratio", _ratio, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_ratio", torch.div, lib=LIB)
torch.library.register_autograd("truncdet::_ratio", _backward, setup_context=_save, lib=LIB)


def ratio(x: Tensor, divisor: Tensor) -> Tensor:
    """x / divisor, of one shape and dtype; without a gradient for the divisor."""
    quotient: Tensor = torch.ops.truncdet._ratio(x, divisor)
    return quotient


def total(x: Tensor) -> Tensor:
    """A scalar of x's dtype, rounded once; 0 for an empty tensor."""
    place = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.numel())
    sums: Tensor = torch.ops.truncdet.scatter_add(x.new_zeros(1), 0, place, x.reshape(-1), False, 0)
    return sums.reshape(())
