"""Terms of nll_loss and their transpose in plain tensor operations; see _nll_loss.py."""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._divide import divide


def terms(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, operator: int
) -> tuple[Tensor, Tensor]:
    """input [N, C, L] and target [N, L] give terms and factors [N, L]."""
    kind = fp.compute_dtype(input.dtype)
    ignored = target == ignore_index
    outside = ((target < 0) | (target >= input.size(1))) & ~ignored
    if operator != 0 and not target.is_cpu:
        _sticky.note_out_of_range(operator, outside)
    term = target.new_zeros(target.shape, dtype=kind)
    if input.size(1) == 0:
        return term, term.clone()
    unused = ignored | outside
    classes = target.masked_fill(unused, 0)
    term = input.gather(1, classes.unsqueeze(1)).squeeze(1).to(kind)
    factor = torch.ones_like(term)
    if weight is not None:
        factor = weight.to(kind)[classes]
        term = term * factor

    def used(x: Tensor) -> Tensor:
        return x.masked_fill(x.isnan(), torch.nan).masked_fill(unused, 0)

    return used(-term), used(factor)


def spread(
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """grad and target [N, L] give [N, C, L] of `dtype`; grad is of the type that is computed in."""
    value = grad if weight is None else grad * weight.to(grad.dtype)[target.clamp(0, classes - 1)]
    value = divide(-value, None, dtype)
    value = value.masked_fill(value.isnan(), torch.nan).unsqueeze(1)
    own = torch.arange(classes, device=target.device).reshape(1, -1, 1) == target.unsqueeze(1)
    own &= (target != ignore_index).unsqueeze(1)
    return torch.where(own, value, torch.zeros_like(value))
