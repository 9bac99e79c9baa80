"""Planted faults: the first is named, by phase, module and operator, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trace_cases as cases
from torch import nn

import truncdet

LEVELS = ("module", "op")


@pytest.mark.parametrize("level", LEVELS)
def test_a_fault_in_forward_names_the_module(level: str) -> None:
    def run(fault: cases.Fault) -> Any:
        model = cases.network(cases.FaultyForward(fault))
        return cases.train(model, fault=fault, level=level)

    verdict, _ = cases.two_runs(run)
    assert verdict.equal is False and verdict.place is not None
    assert (verdict.place.step, verdict.place.key.phase) == (cases.FAULTY_STEP, "forward")
    assert verdict.place.key.module == "3"
    if level == "module":
        assert verdict.place.key.op == "FaultyForward" and verdict.equal_inputs == ("[0][0]",)
    else:
        assert verdict.place.key.source.startswith("trace_cases.py:")


@pytest.mark.parametrize("level", LEVELS)
def test_a_fault_in_backward_names_the_node_and_its_module(level: str) -> None:
    def run(fault: cases.Fault) -> Any:
        model = cases.network(cases.FaultyBackward(fault))
        return cases.train(model, fault=fault, level=level)

    verdict, _ = cases.two_runs(run)
    assert verdict.equal is False and verdict.place is not None
    key = verdict.place.key
    assert (verdict.place.step, key.phase, key.module) == (cases.FAULTY_STEP, "backward", "3")
    if level == "module":
        assert key.op == "_BackwardBackward" and verdict.equal_inputs == ("0",)


@pytest.mark.parametrize("level", LEVELS)
def test_a_fault_in_the_optimizer_names_the_parameter(level: str) -> None:
    def run(fault: cases.Fault) -> Any:
        model = cases.network()
        optimizer = cases.FaultySGD(model.parameters(), lr=0.1)
        optimizer.fault = fault
        return cases.train(model, fault=fault, optimizer=optimizer, level=level)

    verdict, _ = cases.two_runs(run)
    assert verdict.equal is False and verdict.place is not None
    assert verdict.place.step == cases.FAULTY_STEP
    if level == "module":
        key = verdict.place.key
        assert (key.phase, key.module, key.slot) == ("optimizer", "0", "weight")


@pytest.mark.parametrize("level", LEVELS)
def test_a_fault_in_a_buffer_names_it(level: str) -> None:
    def run(fault: cases.Fault) -> Any:
        return cases.train(cases.network(cases.FaultyBuffer(fault)), fault=fault, level=level)

    verdict, _ = cases.two_runs(run)
    assert verdict.equal is False and verdict.place is not None
    assert verdict.place.step == cases.FAULTY_STEP and verdict.place.key.module == "3"
    if level == "module":
        assert (verdict.place.key.phase, verdict.place.key.slot) == ("buffer", "running")


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with noise of a generator that nobody seeds, as in a worker that was forgotten."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.Generator()
        noise.seed()
        x = torch.full((3, 8, 8), float(index))
        return x + torch.randn(3, 8, 8, generator=noise)


def test_an_unseeded_worker_is_a_fault_of_the_data() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=1)
        batches = list(loader)
        return cases.train(cases.network(), batch=lambda step: batches[step]), batches

    (one, first), (other, second) = run(), run()
    assert not torch.equal(first[0], second[0])
    verdict = truncdet.compare(one, other)
    assert verdict.equal is False and verdict.place is not None
    assert (verdict.place.step, verdict.place.key.phase, verdict.place.key.op) == (
        0,
        "data",
        "batch",
    )


def test_dropout_without_a_seed_is_a_fault_of_the_random_state() -> None:
    def run(seed: int) -> Any:
        model = cases.network(nn.Dropout(0.5))
        torch.manual_seed(seed)
        return cases.train(model)

    verdict = truncdet.compare(run(1), run(2))
    assert verdict.equal is False and verdict.place is not None
    assert (verdict.place.step, verdict.place.key.op) == (0, "random state")
    assert truncdet.compare(run(1), run(1)).equal is True


def test_of_two_faults_the_earlier_is_named() -> None:
    def run(backward: cases.Fault, forward: cases.Fault) -> Any:
        # The earlier one in time is in the forward, though it stands behind the other.
        model = cases.network(cases.FaultyBackward(backward), cases.FaultyForward(forward))
        return cases.train(model, faults=(backward, forward))

    faults = cases.Fault(1), cases.Fault(1)
    verdict = truncdet.compare(run(cases.Fault(0), cases.Fault(0)), run(*faults))
    assert all(fault.changed for fault in faults)
    assert verdict.place is not None
    assert (verdict.place.key.phase, verdict.place.key.module) == ("forward", "4")


class Changed(nn.Module):
    """Swaps two elements, or flips the same bit of two, in one step of the second run."""

    def __init__(self, fault: cases.Fault, how: str) -> None:
        super().__init__()
        self.fault, self.how = fault, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault.run == 0 or self.fault.step != cases.FAULTY_STEP:
            return x * 1
        y = (x * 1).detach().clone()
        flat = y.view(-1)
        positive = (flat > 0).nonzero().flatten()
        i, j = int(positive[0]), int(positive[-1])
        if self.how == "swap":
            flat[[i, j]] = flat[[j, i]]
        else:  # a sum or an exclusive or of the words stays the same
            words = flat.view(torch.int32)
            words[i] += 1
            words[j] -= 1
        self.fault.changed = not torch.equal(y, x)
        return y + 0 * x


@pytest.mark.parametrize("how", ["swap", "double flip"])
def test_changes_that_position_blind_hashes_miss_are_seen(how: str) -> None:
    verdict, _ = cases.two_runs(
        lambda fault: cases.train(cases.network(Changed(fault, how)), fault=fault)
    )
    assert verdict.equal is False and verdict.place is not None
    assert (verdict.place.step, verdict.place.key.module) == (cases.FAULTY_STEP, "3")


def test_a_faulty_convolution_is_blamed_and_batch_norm_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(fault: cases.Fault) -> Any:
        model = cases.network()
        # The weight's gradient, as an unordered algorithm would give it.
        model[0].weight.register_hook(lambda grad: fault(grad))
        return cases.train(model, fault=fault)

    verdict, _ = cases.two_runs(run)
    assert verdict.place is not None
    assert (verdict.place.key.phase, verdict.place.key.module) == ("backward", "0")
    assert "BatchNorm" not in verdict.reason


def test_a_module_called_in_another_order_is_a_difference() -> None:
    class Either(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            self.one, self.two, self.swapped = nn.Linear(4, 4), nn.Linear(4, 4), swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.one(x)
            return y if self.swapped else self.two(y)

    def run(swapped: bool) -> Any:
        torch.manual_seed(0)
        model = Either(swapped)
        with truncdet.record(model) as trace:
            model(torch.ones(2, 4)).sum().backward()
        return trace

    verdict = truncdet.compare(run(False), run(True))
    assert verdict.equal is False and "only the first run has" in verdict.reason
    verdict = truncdet.compare(run(True), run(False))
    assert verdict.equal is False and "only the second run has" in verdict.reason
