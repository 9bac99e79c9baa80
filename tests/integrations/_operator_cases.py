"""Inputs for the frameworks' operators beside RoIAlign, their calls, and the same of truncdet's.

A `Case` is called with its inputs and returns one tensor; `ours` computes the same by truncdet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import truncdet

Call = Callable[..., Tensor]
Inputs = dict[str, Tensor]


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return low + values * (high - low)


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, 1), generator=generator).float()


def boxes(count: int = 40) -> Tensor:
    """Crowded rows [K, 5], some of them partly outside a map of 9 x 10."""
    corner = uniform(count, 2, low=-2, high=8, seed=1)
    size = uniform(count, 2, low=0.5, high=12, seed=2)
    return torch.cat([images(count), corner, corner + size], 1)


def rotated(count: int = 40) -> Tensor:
    """Crowded rows [K, 6], angles in radians."""
    centre = uniform(count, 2, high=10, seed=1)
    size = uniform(count, 2, low=0.5, high=8, seed=2)
    return torch.cat([images(count), centre, size, uniform(count, 1, low=-3, high=3, seed=3)], 1)


def features(channels: int) -> Tensor:
    return draw(2, channels, 9, 10)


def convolution(batch: int = 2, groups: int = 1, deform_groups: int = 2) -> Inputs:
    """Inputs of a deformable convolution of 3 x 3 taps with samples outside the map."""
    return {
        "input": draw(batch, 4, 9, 10),
        "offset": draw(batch, 18 * deform_groups, 7, 8, scale=3.0, seed=1),
        "mask": uniform(batch, 9 * deform_groups, 7, 8, seed=2),
        "weight": draw(6, 4 // groups, 3, 3, seed=3),
        "bias": draw(6, seed=4),
    }


SHAPES = torch.tensor([[4, 5], [2, 3]])
STARTS = torch.tensor([0, 20])


def attention() -> Inputs:
    """Inputs of deformable attention: 2 images, 7 queries, 4 heads of 8, 2 levels, 3 points."""
    weights = draw(2, 7, 4, 6, seed=2).softmax(-1).view(2, 7, 4, 2, 3)
    return {
        "value": draw(2, 26, 4, 8),
        "locations": uniform(2, 7, 4, 2, 3, 2, low=-0.2, high=1.2, seed=1),
        "weights": weights,
    }


@dataclass(frozen=True)
class Case:
    """One call, what it computes in terms of truncdet, and the inputs with gradients."""

    call: Call
    ours: Call
    inputs: Callable[[], Inputs]
    rois: Callable[[int], Tensor] | None = None

    def run(self, function: Call | None = None, order: Tensor | None = None) -> list[Tensor]:
        """Output and gradients; the rows of the output in the order of `rois`."""
        leaves = {name: x.clone().requires_grad_() for name, x in self.inputs().items()}
        rows = () if self.rois is None else (self.rois(40),)
        if order is not None:
            rows = (rows[0][order],)
        out = (function or self.call)(*leaves.values(), *rows)
        upstream = draw(*out.shape, seed=9).to(out)
        grads = torch.autograd.grad(
            out, list(leaves.values()), upstream if order is None else upstream[order]
        )
        out = out.detach()
        return [out if order is None else out[order.argsort()], *grads]


def orders(count: int = 40) -> Iterator[Tensor]:
    for seed in range(12):
        yield torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def differs(case: Case) -> bool:
    """Whether some order of the RoIs changes a bit."""
    first = case.run()
    return any(not all(map(torch.equal, first, case.run(order=order))) for order in orders())


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Checks the published closeness of the output, and that gradients differ by rounding alone."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        largest = float(b.abs().max())
        bound = 1e-5 if index == 0 else 1e-4
        assert a.dtype == b.dtype and float((a - b).abs().max()) <= bound * largest, index


def same(*arguments: Any) -> Any:
    """truncdet.deform_conv2d in the order (input, offset, mask, weight, bias)."""
    x, offset, mask, weight, bias = arguments
    return truncdet.deform_conv2d(x, offset, weight, bias, mask=mask)
