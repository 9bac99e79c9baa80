"""What makes recording cheap must not make it wrong: one launch for many, reuse, nothing held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import trace_cases as cases
from torch import Tensor, nn

import truncdet
from truncdet import _trace_ring
from truncdet._digest import digest_words_reference
from truncdet._digest_many import digest_many, digest_many_reference


def reference(tensor: Tensor) -> int:
    sums = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    digest_words_reference(tensor.contiguous(), sums, 0, 0)
    return int(sums)


def some_tensors(device: torch.device) -> list[Tensor]:
    """Every size of words, unaligned starts, lengths around a vector of 16 bytes, and none."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        for count in (0, 1, 3, 17, 255, 4099, 300_001):
            for start in (0, 1, 5):
                size = ((count + start) * dtype.itemsize,)
                raw = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
                found.append(raw.view(dtype)[start:].to(device))
    found.append(torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last))
    found.append(torch.ones((), device=device, requires_grad=True))
    return found


def test_many_are_each_what_the_reference_gives(device: torch.device) -> None:
    tensors = some_tensors(device) * 4  # more than one launch takes
    assert len(tensors) > 2 * 128
    sums = [torch.full((len(tensors) + 5,), 7, device=device) for _ in range(2)]
    digest_many(tensors, sums[0], 3)
    digest_many_reference(tensors, sums[1], 3)
    assert torch.equal(*sums)
    assert sums[0][:3].tolist() == [7] * 3 and sums[0][-2:].tolist() == [7] * 2
    for count in (0, 1, 2, 8, 9, 128, 129):  # each size of a launch
        few = torch.zeros(count, dtype=torch.int64, device=device)
        digest_many(tensors[:count], few, 0)
        assert torch.equal(few, sums[0][3 : 3 + count] - 7)


def test_what_many_cannot_take_is_an_error(device: torch.device) -> None:
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    if truncdet.build_info()["extension"] == "none":
        pytest.skip("the reference checks nothing")
    with pytest.raises(RuntimeError, match="tensors must be dense in memory"):
        digest_many([torch.ones(4, 4, device=device)[:, ::2]], sums, 0)
    with pytest.raises(RuntimeError, match="slot must be from 0 to 3, got 4"):
        digest_many([torch.ones(4, device=device)], sums, 4)
    with pytest.raises(RuntimeError, match="slot must be from 0 to 2, got 3"):
        digest_many([torch.ones(4, device=device)] * 2, sums, 3)


@pytest.mark.cuda
def test_many_do_not_wait() -> None:
    tensors = some_tensors(torch.device("cuda"))
    sums = torch.zeros(len(tensors), dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        digest_many(tensors, sums, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def double(y: Tensor) -> None:
    y.mul_(2)


def write_one(y: Tensor) -> None:
    y[0, 0] = 5


def write_a_view(y: Tensor) -> None:
    y[1:].add_(1)


def clamp(y: Tensor) -> None:
    nn.functional.relu(y, inplace=True)


def other_memory(y: Tensor) -> None:
    y.data = y.data + 1  # no version counts this


class Between(nn.Module):
    """Writes into what one module gave before the next takes it, and digests it by itself."""

    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Identity(), nn.Identity()
        self.write = write
        self.expected: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x * 1)
        self.expected.append(reference(y))
        self.write(y)
        self.expected.append(reference(y))
        y = self.two(y)
        self.write(y)  # what was given is seen as it was given
        return y


@pytest.mark.parametrize("write", [double, write_one, write_a_view, clamp, other_memory])
@pytest.mark.parametrize("level", ["module", "op"])
def test_what_is_written_between_two_looks_is_read_again(
    write: Callable[[Tensor], None], level: str, device: torch.device
) -> None:
    model = Between(write)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(device)
    with truncdet.record(model, level=level) as trace, torch.no_grad():
        model(x)
    seen = {
        (key.module, key.kind): digest
        for key, digest in zip(trace.steps[0].keys, trace.steps[0].digests, strict=True)
        if key.op == "Identity"
    }
    before, after = model.expected
    assert before != after
    assert seen[("one", "out")] == before
    assert seen[("two", "in")] == seen[("two", "out")] == after


def test_gradients_that_are_added_in_place_are_each_seen(device: torch.device) -> None:
    """Of a leaf that two backwards add to, the sum is observed, not what came first."""
    layer = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with truncdet.record(layer, optimizer) as trace:
        layer(torch.ones(1, 3, device=device)).sum().backward()
        layer(torch.full((1, 3), 3.0, device=device)).sum().backward()
        assert layer.weight.grad is not None
        expected = reference(layer.weight.grad)
        optimizer.step()
    (found,) = (
        digest
        for key, digest in zip(trace.steps[0].keys, trace.steps[0].digests, strict=True)
        if key.op == "gradient" and key.slot == "weight"
    )
    assert found == expected


def test_state_is_digested_by_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(tensors: list[Tensor], sums: Tensor, slot: int) -> None:
        sizes.append(len(tensors))
        digest_many(tensors, sums, slot)

    monkeypatch.setattr(_trace_ring, "digest_many", counted)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with truncdet.record(model, optimizer) as trace:
        for _ in range(3):
            sizes.clear()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    # Gradients, parameters and momenta by one call each; of the rest, none twice.
    assert sizes.count(40) == 3
    # A layer has an output and two nodes; the batch, the random state and the loss are few.
    assert len(sizes) < 3 + 3 * 20 + 8
    assert sum(sizes) < len(trace.steps[-1].keys) - 2 * 20


def test_what_changes_in_a_model_is_followed() -> None:
    """Parameters that are replaced, frozen or added, and buffers that are assigned, are seen."""

    def run(change: bool) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with truncdet.record(model, optimizer) as trace:
            for step in range(4):
                if step == 1:
                    model[2].weight.requires_grad_(False)
                if step == 2:
                    model[1].running_mean = model[1].running_mean + (1 if change else 0)
                    model[0].weight.data = model[0].weight.data.t().contiguous().t()
                    model.add_module("3", nn.Linear(2, 2))
                optimizer.zero_grad()
                model(torch.ones(3, 4)).square().sum().backward()
                optimizer.step()
        return trace

    one, other = run(False), run(False)
    assert truncdet.compare(one, other).equal is True
    names = [
        {(key.op, f"{key.module}.{key.slot}") for key in step.keys if key.kind == "state"}
        for step in one.steps
    ]
    assert ("gradient", "2.weight") in names[0] and ("gradient", "2.weight") not in names[1]
    assert ("parameter", "3.bias") in names[2] and ("parameter", "3.bias") not in names[1]
    layouts = [
        {key.layout for key in step.keys if (key.op, key.module) == ("parameter", "0")}
        for step in one.steps
    ]
    assert layouts[1] != layouts[2]  # other strides, other words
    verdict = truncdet.compare(one, run(True))
    assert verdict.place is not None and (verdict.place.step, verdict.place.key.slot) == (
        2,
        "running_mean",
    )


class _Watched(torch.autograd.Function):
    held: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        class Kept:
            pass

        ctx.kept = Kept()
        _Watched.held.append(weakref.ref(ctx.kept))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 2


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Watched.apply(x)
        return result


def test_graphs_live_no_longer_than_without_it() -> None:
    _Watched.held.clear()
    model = nn.Sequential(nn.Linear(2, 2), Doubled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with truncdet.record(model, optimizer):
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            del loss
        gc.collect()
        assert [kept() for kept in _Watched.held] == [None, None]


def test_a_node_is_seen_once_each_time_it_runs() -> None:
    """Also where its graph is kept, from one backward to the next and from one step to the next."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with truncdet.record(model, optimizer) as trace:
        kept = model(torch.ones(1, 2))
        (kept * 2).sum().backward(retain_graph=True)
        (kept * 3).sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) + kept).sum().backward(retain_graph=True)
        optimizer.step()
    tanh = [
        sum(key.op == "TanhBackward0" and key.kind == "out" for key in step.keys)
        for step in trace.steps
    ]
    assert tanh == [2, 2]
    count = len(trace.steps[-1].keys)
    kept.sum().backward()  # after the recording nothing is seen
    assert len(trace.steps[-1].keys) == count


def test_a_fault_is_still_named_where_keys_are_reused() -> None:
    """In a late step, when every list is known, by name and number."""

    def run(fault: cases.Fault) -> Any:
        model = cases.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        calls = [0]

        def spoil(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == 5:
                state = optimizer.state[model[4].weight]["momentum_buffer"]
                fault.step = cases.FAULTY_STEP
                state.copy_(fault(state))

        optimizer.register_step_post_hook(spoil)
        return cases.train(model, optimizer=optimizer, steps=6)

    verdict, _ = cases.two_runs(run)
    assert verdict.place is not None
    key = verdict.place.key
    assert (verdict.place.step, key.phase, key.op) == (4, "optimizer", "SGD")
    assert key.slot == "[4]['momentum_buffer']"
