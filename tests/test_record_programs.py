"""record around programs that do unusual things: they run as without it, and steps stay apart."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import truncdet


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    "program",
    [
        lambda m, x: torch.autograd.grad(outputs=m(x).sum(), inputs=x),
        lambda m, x: torch.autograd.grad(m(x).sum(), [x]),
        lambda m, x: torch.autograd.backward(tensors=[m(x).sum()]),
        lambda m, x: torch.autograd.backward([get_gradient_edge(m(x).sum())]),
        lambda m, x: torch.autograd.backward(iter([m(x).sum(), m(x).sum()])),
        lambda m, x: torch.func.jvp(m, (x.detach(),), (torch.ones(3, 4),)),
        lambda m, x: torch.func.vmap(m)(x),
        lambda m, x: torch.func.jacrev(m)(x),
        lambda m, x: torch.func.hessian(lambda y: m(y).square().sum())(x),
    ],
)
def test_ways_to_differentiate_run_as_they_do_without(program: Any, level: str) -> None:
    def run(recorded: bool) -> list[torch.Tensor | None]:
        model, x = linear(), torch.ones(3, 4, requires_grad=True)
        if recorded:
            with truncdet.record(model, level=level):
                result = program(model, x)
        else:
            result = program(model, x)
        found = result if isinstance(result, (list, tuple)) else [result]
        return [*found, x.grad, model.weight.grad]

    for mine, plain in zip(run(True), run(False), strict=True):
        assert (mine is None) == (plain is None)
        assert mine is None or plain is None or torch.equal(mine, plain)


@pytest.mark.parametrize("starts", [lambda m: m.to("meta"), lambda m: nn.LazyLinear(2)])
def test_models_without_data_run(starts: Any) -> None:
    model = starts(linear())
    device = next(iter(model.parameters())).device
    with truncdet.record(model) as trace:
        model(torch.ones(3, 4, device=device)).sum().backward()
    assert trace.complete


def test_copies_and_pickles_of_a_recorded_model_record_nothing(tmp_path: Path) -> None:
    model, x = linear(), torch.ones(3, 4)
    with truncdet.record(model, path=tmp_path / "trace") as trace:
        model(x).sum().backward()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            other(x)
    for other in copies:
        assert torch.equal(other(x), model(x))
    assert len(trace.steps) == 1
    assert truncdet.compare(trace, tmp_path / "trace").equal


def test_a_step_that_raises_ends_with_it() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail() -> float:
        raise KeyError

    with truncdet.record(model, optimizer) as trace:
        for number in range(5):
            model(torch.ones(3, 4)).sum().backward()
            if number == 1:
                with pytest.raises(KeyError):
                    optimizer.step(fail)
            else:
                optimizer.step()
    assert len(trace.steps) == 5


def test_a_closure_that_calls_the_model_is_one_step() -> None:
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    with truncdet.record(model, optimizer) as trace:
        for _ in range(2):
            optimizer.step(closure)
    assert len(trace.steps) == 2


def test_overlapping_recordings_end_in_any_order() -> None:
    before = torch.autograd.backward, torch.autograd.grad
    models = linear(), linear()
    first, second = map(truncdet.record, models)
    traces = first.__enter__(), second.__enter__()
    for model in models:
        model(torch.ones(3, 4)).sum().backward()
    first.__exit__(None, None, None)
    models[1](torch.ones(3, 4)).sum().backward()
    second.__exit__(None, None, None)
    assert (torch.autograd.backward, torch.autograd.grad) == before
    assert [len(trace.steps) for trace in traces] == [1, 2]
