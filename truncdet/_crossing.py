"""The border of a black box: values are rounded and widened going in, gradients coming out.

`Enter` is the way in. Its backward receives the wide gradient, rounds it and narrows it. `Leave`
is the way out, used when certifying: its backward runs first, while the box's graph is still
there, and sends |g| through it to get each cell's sum of magnitudes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._certify import unproved_cells
from truncdet._errors import TruncdetError
from truncdet._truncate import round_significand

Rounding = int | torch.dtype | None  # significant bits, a literal cast, or nothing


def cross(value: Tensor, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """Rounds, then converts. From double, bits first: then float32 holds them exactly.

    A literal cast of a double rounds twice, since torch goes through float32; so does the
    published recipe. Each step is monotone, which is all that certification needs.
    """
    if isinstance(rounding, torch.dtype):
        return value.to(rounding).to(dtype)
    if rounding is None:
        return value.to(dtype)
    return round_significand(value, rounding).to(dtype)


class Call:
    """What one certified call must remember between the two backwards.

    It holds no tensor of the graph, which points at it: the cycle would never be freed.
    """

    def __init__(self, counts: list[Tensor], n: int | None) -> None:
        self.counts = counts  # the wrapper's list; every backward appends one
        self.n = n
        # Of the backward that is running:
        self.contributions = 0
        self.absolute: list[Tensor | None] = []
        self.unproved: Tensor | None = None

    def start(self, contributions: int, absolute: list[Tensor | None], device: Any) -> None:
        """Opens the count of one backward; the magnitudes are in the order of the slots."""
        self.contributions, self.absolute = self.n or contributions, absolute
        self.unproved = torch.zeros((), dtype=torch.int64, device=device)
        self.counts.append(self.unproved)

    def count(self, slot: int, grad: Tensor, rounding: Rounding, dtype: torch.dtype) -> None:
        """Adds the unproved cells of one gradient to the count of this backward."""
        absolute = self.absolute[slot] if self.absolute else None
        if absolute is None or self.unproved is None:
            raise TruncdetError(
                "wrap: certify met a gradient that did not pass through the outputs"
            )
        self.absolute[slot] = None
        mask = unproved_cells(
            grad, absolute, self.contributions, lambda value: cross(value, rounding, dtype)
        )
        self.unproved += mask.sum().to(self.unproved.device)


class Enter(torch.autograd.Function):
    """Rounds and widens; straight-through, the gradient is rounded and narrowed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rounding: Rounding,
        grad_rounding: Rounding,
        dtype: torch.dtype,
        call: Call | None,
        slot: int,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.back = (grad_rounding, x.dtype)
        ctx.call, ctx.slot = call, slot
        return cross(x, rounding, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None, None
        rounding, dtype = ctx.back
        if ctx.call is not None:
            ctx.call.count(ctx.slot, grad.detach(), rounding, dtype)
        narrow = Enter.apply(grad, rounding, rounding, dtype, None, 0)
        return narrow, None, None, None, None, None


class Leave(torch.autograd.Function):
    """Narrows the outputs; the backward also runs the box's backward on magnitudes."""

    @staticmethod
    def forward(ctx: Any, call: Call, dtype: torch.dtype, inner: int, *tensors: Tensor) -> Any:
        # `tensors` are the entered ones, then the outputs. Saved as inputs they keep the graph
        # alive without a cycle: this node points at theirs, never the reverse.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.inner = call, inner
        return tuple(output.to(dtype, copy=True) for output in tensors[inner:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, inner = ctx.call, ctx.inner
        entered, outputs = ctx.saved_tensors[:inner], ctx.saved_tensors[inner:]
        wide = [None if g is None else g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
        pairs = [(o, g) for o, g in zip(outputs, wide, strict=True) if g is not None and o.grad_fn]
        magnitudes: tuple[Tensor | None, ...] = ()
        if pairs:
            magnitudes = torch.autograd.grad(
                [o for o, _ in pairs],
                entered,
                [g.abs() for _, g in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        contributions = max(1, sum(g.numel() for _, g in pairs))
        call.start(contributions, list(magnitudes), outputs[0].device)
        return (None, None, None, *[None] * inner, *wide)
