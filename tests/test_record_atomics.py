"""Real culprits: kernels that add floats with atomics are named, what is around them is not.

On a GPU nothing is planted: each case runs until its bits have moved, and says so first. On the
CPU, where these kernels add in order, the order is planted, which tests the cases themselves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from trace_cases import sequential

import truncdet

TRIES = 50  # runs in which bits have to move, or the case is no case


class Planted(TorchDispatchMode):
    """One operator gives what another order of additions would give in one cell."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.moved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == self._name:
            terms = torch.linspace(0.1, 1.7, 64, dtype=torch.float64).float()
            one, other = (sequential(t) for t in (terms, terms.flip(0)))
            flat = result.view(-1)
            cell = flat[flat.abs().argmax()]
            before = cell.clone()
            cell.mul_(other / one)
            self.moved |= bool(cell != before)
        return result


class _AtomicConv(torch.autograd.Function):
    """A convolution whose weight's gradient is added up with float atomics, place by place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        columns = F.unfold(x, weight.shape[2:]).transpose(1, 2).flatten(0, 1)
        places = grads[0].flatten(2).transpose(1, 2).flatten(0, 1)
        terms = (places[:, :, None] * columns[:, None, :]).flatten(1)
        total = terms.new_zeros(1, terms.shape[1])
        total.index_add_(0, terms.new_zeros(len(terms), dtype=torch.long), terms)
        return torch.nn.grad.conv2d_input(x.shape, weight, grads[0]), total.view_as(weight)


class AtomicConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _AtomicConv.apply(x, self.weight)
        return result


class Sums(nn.Module):
    """Many rows into a few, by index_add or scatter_add."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x), device=x.device) % 3
        start = x.new_zeros(3, x.shape[1])
        if self.how == "index_add":
            return start.index_add(0, index, x)
        return start.scatter_add(0, index[:, None].expand_as(x), x)


@dataclass(frozen=True)
class Case:
    """A network, what is to be named in it, and the operator whose order is planted on a CPU."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    phase: str
    module: str
    op: str
    kernel: str


def convolution() -> nn.Module:
    return nn.Sequential(
        AtomicConv(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    )


def summing(how: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Sums(how), nn.Linear(8, 2))


def upsampling() -> nn.Module:
    up = nn.Upsample(scale_factor=16, mode="bilinear")
    return nn.Sequential(nn.Conv2d(2, 4, 1), up, nn.Conv2d(4, 2, 1))


CASES = {
    "convolution": Case(
        convolution, (8, 3, 66, 66), "backward", "0", "_AtomicConvBackward", "aten::index_add_"
    ),
    "interpolate": Case(
        upsampling,
        (2, 2, 24, 24),
        "backward",
        "1",
        "UpsampleBilinear2DBackward0",
        "aten::upsample_bilinear2d_backward",
    ),
    **{
        how: Case(
            functools.partial(summing, how),
            (1 << 16, 4),
            "forward",
            "1",
            "Sums",
            f"aten::{how}",
        )
        for how in ("index_add", "scatter_add")
    },
}


@dataclass(frozen=True)
class Run:
    trace: Any
    digest: str  # of the output and all gradients, which knows nothing of the trace


@contextlib.contextmanager
def cudnn_deterministic() -> Iterator[None]:
    """Leaves no other culprit than the one of the case."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def run(case: Case, device: torch.device, planted: bool, level: str = "module") -> Run:
    """One forward and backward from the seed, recorded."""
    torch.manual_seed(0)
    model = case.make().to(device)
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(1)).to(device)
    x.requires_grad_()  # a sum over all cells, as a weight's gradient is, may hide one that moved
    mode = Planted(case.kernel) if planted else None
    with cudnn_deterministic(), mode or contextlib.nullcontext():
        with truncdet.record(model, level=level) as trace:
            out = model(x)
            out.square().mean().backward()
    assert mode is None or mode.moved, "what was planted changed no bit"
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return Run(trace, truncdet.digest([out.detach(), *grads]).hex)


def until_moved(one_run: Callable[[bool], Run], device: torch.device) -> tuple[Run, Run]:
    """Two runs whose bits differ; fails where none of many do."""
    first = one_run(False)
    for _ in range(TRIES):
        other = one_run(device.type == "cpu")
        if other.digest != first.digest:
            return first, other
    pytest.fail(f"bits did not move in {TRIES} runs")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_that_moves_is_named(name: str, device: torch.device) -> None:
    case = CASES[name]
    first, other = until_moved(lambda planted: run(case, device, planted), device)
    assert first.digest != other.digest
    verdict = truncdet.compare(first.trace, other.trace)
    assert verdict.equal is False and verdict.place is not None
    key = verdict.place.key
    assert (key.phase, key.module, key.op, key.kind) == (case.phase, case.module, case.op, "out")
    # What it took was equal, so that what feeds it is not at fault; nor is the batch norm.
    assert verdict.equal_inputs and "BatchNorm" not in verdict.reason


@pytest.mark.parametrize("name", ["index_add", "scatter_add"])
def test_at_level_op_the_operator_and_its_line_are_named(name: str, device: torch.device) -> None:
    case = CASES[name]
    first, other = until_moved(lambda planted: run(case, device, planted, "op"), device)
    verdict = truncdet.compare(first.trace, other.trace)
    assert verdict.equal is False and verdict.place is not None
    key = verdict.place.key
    assert (key.op, key.module, key.kind) == (f"aten::{name}", "1", "out")
    assert key.source.startswith("test_record_atomics.py:") and verdict.equal_inputs


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_under_truncdet_it_is_equal(name: str) -> None:
    device, case = torch.device("cuda"), CASES[name]
    until_moved(lambda planted: run(case, device, planted), device)
    with truncdet.deterministic(seed=0):
        first, *others = (run(case, device, False) for _ in range(5))
    assert {other.digest for other in others} == {first.digest}
    assert all(truncdet.compare(first.trace, other.trace).equal is True for other in others)


def mask_rcnn() -> Callable[[torch.device, bool], Run]:
    """A step of the tiny Mask R-CNN of the experiments."""
    pytest.importorskip("torchvision")
    sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
    made: Any = importlib.import_module("_mask_rcnn")
    original = made.make_model("tiny")

    def step(device: torch.device, planted: bool) -> Run:
        torch.manual_seed(0)
        model = copy.deepcopy(original).to(device)
        images, targets = made.make_batch("tiny", device)
        mode = Planted("torchvision::_roi_align_backward") if planted else None
        with cudnn_deterministic(), mode or contextlib.nullcontext():
            with truncdet.record(model) as trace:
                losses = model(images, targets)
                torch.stack([losses[name] for name in sorted(losses)]).sum().backward()
        assert mode is None or mode.moved, "what was planted changed no bit"
        grads = [p.grad for p in model.parameters()]
        return Run(trace, truncdet.digest(grads).hex)

    return step


def test_roi_align_is_the_first_culprit_of_a_mask_rcnn(device: torch.device) -> None:
    step = mask_rcnn()
    first, other = until_moved(lambda planted: step(device, planted), device)
    assert first.digest != other.digest
    verdict = truncdet.compare(first.trace, other.trace)
    assert verdict.equal is False and verdict.place is not None
    key = verdict.place.key
    assert (key.phase, key.kind) == ("backward", "out"), verdict
    assert "roialign" in key.op.lower().replace("_", ""), verdict
    assert key.module in ("roi_heads.box_roi_pool", "roi_heads.mask_roi_pool"), verdict
    assert verdict.equal_inputs


@pytest.mark.cuda
def test_a_mask_rcnn_under_truncdet_is_equal() -> None:
    step, device = mask_rcnn(), torch.device("cuda")
    until_moved(lambda planted: step(device, planted), device)
    with truncdet.deterministic(seed=0):
        first, *others = (step(device, False) for _ in range(4))
    assert {other.digest for other in others} == {first.digest}
    assert all(truncdet.compare(first.trace, other.trace).equal is True for other in others)
