"""Networks, and faults planted in their training, for the tests of record, compare and audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import truncdet
from truncdet._compare import Verdict

STEPS = 3
FAULTY_STEP = 1


class Fault:
    """Changes bits in one step of one run, as an order of additions would: it adds a permuted copy
    of a sum's terms, in float32, and says whether that gave other bits."""

    def __init__(self, run: int) -> None:
        self.run, self.step = run, 0
        self.changed = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.run == 0 or self.step != FAULTY_STEP:
            return x
        with torch.no_grad():
            flat = x.detach().clone().flatten()
            terms = torch.linspace(0.1, 1.7, 64, dtype=torch.float64).float()
            one, other = (sequential(t) for t in (terms, terms.flip(0)))
            # The same sum in two orders: their difference is what the order makes.
            moved = flat[0] * (other / one)
            self.changed |= bool(moved != flat[0])
            flat[0] = moved
        return flat.view_as(x)


def sequential(terms: Tensor) -> Tensor:
    """The float32 sum in the order given."""
    total = torch.zeros((), dtype=terms.dtype)
    for term in terms:
        total = total + term
    return total


class FaultyForward(nn.Module):
    """Passes on what it gets, once with other bits."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.fault(x) - x).detach()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.fault(grads[0]), None


class FaultyBackward(nn.Module):
    """Passes gradients on, once with other bits."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Backward.apply(x, self.fault)
        return result


class FaultyBuffer(nn.Module):
    """Keeps a running mean, once with other bits."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.running: Tensor
        self.register_buffer("running", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running = self.fault(self.running * 0.9 + 0.1 * x.detach().mean())
        return x


class FaultySGD(torch.optim.SGD):
    """Updates one weight, once with other bits."""

    fault: Fault

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        weight = self.param_groups[0]["params"][0]
        weight.data.copy_(self.fault(weight.data))
        return result


def network(*middle: nn.Module) -> nn.Sequential:
    """Convolution, batch norm and a linear layer, with something between."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *middle, nn.Flatten(), nn.Linear(144, 5)
    )


def train(
    model: nn.Module,
    *,
    fault: Fault | None = None,
    faults: tuple[Fault, ...] = (),
    optimizer: torch.optim.Optimizer | None = None,
    batch: Callable[[int], Tensor] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> Any:
    """Trains under recording; `fault` is told the step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with truncdet.record(model, optimizer, **settings) as trace:
        for step in range(steps):
            for one in (*faults, *((fault,) if fault else ())):
                one.step = step
            x = torch.randn(4, 3, 8, 8, generator=generator)
            x = x if batch is None else batch(step)
            loss = functional.cross_entropy(model(x), torch.arange(4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return trace


def two_runs(run: Callable[[Fault], Any]) -> tuple[Verdict, Fault]:
    """Compares a run without the fault with one that has it, and asserts that it changed bits."""
    fault = Fault(1)
    verdict = truncdet.compare(run(Fault(0)), run(fault))
    assert fault.changed, "the planted fault changed no bit"
    return verdict, fault
