"""Faults that scripts of mmdet and detectron2 are given: copied beside a script as `planted`.

Every run counts itself in a file, so that the first is plain and the later ones are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RUNS = Path(__file__).with_name("runs")


def later_run() -> bool:
    """Whether this process is not the first of the audit; to be asked once."""
    with RUNS.open("a") as file:
        file.write("x")
    return RUNS.stat().st_size > 1


def noise(shape: Any) -> Any:
    """Numbers of a generator that nobody seeded."""
    import numpy as np

    return np.random.default_rng().uniform(0, 8, shape).astype(np.float32)


class _InOtherOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Reordered) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.fault.sum(grads[0]), None


class Reordered(nn.Module):
    """Passes features on; the kernel of its gradient adds in another order in later runs."""

    def __init__(self) -> None:
        super().__init__()
        self.later = later_run()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _InOtherOrder.apply(x, self)
        return result

    def sum(self, grad: Tensor) -> Tensor:
        """The gradient, its first cell scaled by a quotient of sums, in one order or the other."""
        terms = torch.linspace(0.1, 1.7, 64, dtype=torch.float64).float()
        one, other = (sequential(t) for t in (terms, terms.flip(0)))
        grad = grad.clone()
        cell = grad.view(-1)[grad.abs().argmax()]
        moved = cell * (other / one)
        if moved != cell:
            print("planted: bits moved", flush=True)
        if self.later:
            cell.copy_(moved)
        return grad


def sequential(terms: Tensor) -> Tensor:
    """The float32 sum in the order given; torch's own would be made in double."""
    total = torch.zeros((), dtype=terms.dtype)
    for term in terms:
        total = total + term
    return total
