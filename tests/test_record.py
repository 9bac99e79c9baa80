"""record: what a trace holds, files, crashes, no false alarms, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trace_cases as cases
from torch import nn
from torch.nn import functional

import truncdet
from truncdet._digest import digest_words_reference
from truncdet._trace_file import read


def residual() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.relu(self.a(x), inplace=True) + x
            return x + self.b(x)

    return Residual()


class Dictionary(nn.Module):
    """Takes keyword arguments and gives a dictionary of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        y = self.layer(x)
        return {"both": (y, y * 2)}


class Recurrent(nn.Module):
    """An LSTM, which gives nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x[None])[0]
        return out


class Checkpointed(nn.Module):
    """Runs its part twice, once inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return out


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 3),
    "perceptron": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(2), nn.Flatten()
    ),
    "residual": residual,
    "shared layer": shared,
    "recurrent": Recurrent,
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    ),
    "embedding": lambda: nn.Sequential(Quantised(), nn.Embedding(5, 4)),
    "dictionary": lambda: KeywordOnly(Dictionary()),
    "checkpointed": Checkpointed,
}


class Quantised(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 2).long().clamp(max=4)


class KeywordOnly(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x=x)


def train(name: str, level: str, device: torch.device, steps: int = 3) -> Any:
    torch.manual_seed(0)
    model = NETWORKS[name]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with truncdet.record(model, optimizer, level) as trace:
        for _ in range(steps):
            out = model(torch.randn(6, 8, device=device))
            while not isinstance(out, torch.Tensor):
                out = out["both"] if isinstance(out, dict) else out[0] + out[1]
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    return trace


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_trainings_raise_no_alarm(name: str, level: str, device: torch.device) -> None:
    one, other = (train(name, level, device) for _ in range(2))
    verdict = truncdet.compare(one, other)
    assert verdict.equal is True, verdict
    assert verdict.steps == 3 and len(one.steps[0].keys) > 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_seen_in_its_dtype(dtype: torch.dtype, device: torch.device) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 3).to(device)
        with truncdet.record(model) as trace, torch.autocast(device.type, dtype=dtype):
            model(torch.randn(6, 8, device=device)).sum().backward()
        return trace

    one, other = run(), run()
    assert truncdet.compare(one, other).equal is True
    name = str(dtype).removeprefix("torch.")
    assert any(k.layout.startswith(name) and k.kind == "out" for k in one.steps[0].keys)


def test_what_torch_compile_made_is_one_unit() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="aot_eager")
        model = nn.Sequential(inner, nn.Linear(8, 2))
        with truncdet.record(model) as trace:
            model(torch.randn(4, 8)).sum().backward()
        return trace

    one, other = run(), run()
    assert truncdet.compare(one, other).equal is True
    modules = {key.module for key in one.steps[0].keys if key.phase == "forward"}
    assert modules == {"", "0", "1"}


def test_a_digest_is_the_one_of_the_reference(device: torch.device) -> None:
    model = nn.Linear(3, 2, bias=False).to(device)
    x = torch.randn(4, 3, device=device)
    with truncdet.record(model) as trace:
        model(x)
    step = trace.steps[0]
    expected = torch.zeros(1, dtype=torch.int64)
    digest_words_reference(x.cpu(), expected, 0, 0)
    key = next(number for number, key in enumerate(step.keys) if key.op == "batch")
    assert step.digests[key] == int(expected)


def test_layouts_count() -> None:
    def run(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 1)
        with truncdet.record(model) as trace:
            model(x)
        return trace

    x = torch.randn(2, 3, 4, 4)
    last = x.contiguous(memory_format=torch.channels_last)
    assert truncdet.compare(run(x), run(x)).equal is True
    assert truncdet.compare(run(x), run(last)).equal is False


def test_every_so_manieth_step_is_recorded() -> None:
    trace = cases.train(cases.network(), steps=5, every=2)
    assert [step.number for step in trace.steps] == [0, 2, 4]


def test_losses_are_kept() -> None:
    trace = cases.train(cases.network())
    assert all(0 < step.losses["loss"] < 10 for step in trace.steps)


def test_a_file_reads_back_as_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    trace = cases.train(cases.network(), path=path)
    found = read(path)
    assert found.complete and found.head == trace.head
    assert found.steps == trace.steps
    saved = tmp_path / "b.trace"
    trace.save(saved)
    assert saved.read_bytes() == path.read_bytes()
    assert truncdet.compare(path, str(saved)).equal is True
    assert path.stat().st_size < 20_000


def test_a_crash_leaves_the_steps_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"

    def batch(step: int) -> torch.Tensor:
        if step == 2:
            raise KeyError("planted")
        return torch.ones(4, 3, 8, 8)

    with pytest.raises(KeyError, match="planted"):
        cases.train(cases.network(), path=path, batch=batch)
    trace = read(path)
    assert not trace.complete and [step.number for step in trace.steps] == [0, 1]
    whole = cases.train(cases.network(), batch=lambda step: torch.ones(4, 3, 8, 8))
    verdict = truncdet.compare(path, whole)
    assert verdict.equal is None and "trace_a ends after 2 steps" in verdict.reason


@pytest.mark.parametrize("cut", [5, 10, 200])
def test_a_file_that_was_cut_off_reads_up_to_the_last_whole_step(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    whole = cases.train(cases.network(), path=path)
    path.write_bytes(path.read_bytes()[:-cut])
    trace = read(path)
    assert not trace.complete
    assert trace.steps == whole.steps[: len(trace.steps)] and len(trace.steps) >= 2


def test_a_line_that_is_lost_ends_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    cases.train(cases.network(), path=path)
    lines = path.read_bytes().split(b"\n")
    # The first step has the keys that those behind it mean by number.
    path.write_bytes(b"\n".join(lines[:1] + lines[2:]))
    assert not read(path).complete and not read(path).steps


def test_a_damaged_line_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    cases.train(cases.network(), path=path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"step":1', b'"step":7')
    path.write_bytes(b"\n".join(lines))
    assert [step.number for step in read(path).steps] == [0]
    path.write_bytes(b"not a trace\n")
    with pytest.raises(ValueError, match=r"^read: trace 'a.trace' must be a file that truncdet"):
        read(path)


def test_nothing_is_left_behind_also_after_an_exception() -> None:
    model = cases.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entries = torch.autograd.backward, torch.autograd.grad
    before = copy.deepcopy({k: v for k, v in model.state_dict().items()})
    with pytest.raises(KeyError), truncdet.record(model, optimizer, "op"):
        model(torch.ones(4, 3, 8, 8)).sum().backward()
        raise KeyError
    assert (torch.autograd.backward, torch.autograd.grad) == entries
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert list(model.state_dict()) == list(before)


def test_recording_changes_no_bit_of_a_training() -> None:
    def run(recorded: bool) -> str:
        model = cases.network(nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        if recorded:
            cases.train(model, optimizer=optimizer)
        else:
            generator = torch.Generator().manual_seed(1)
            for _ in range(cases.STEPS):
                x = torch.randn(4, 3, 8, 8, generator=generator)
                loss = functional.cross_entropy(model(x), torch.arange(4))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return truncdet.digest(model.state_dict()).hex

    assert run(True) == run(False)


def test_values_are_kept_and_compared_where_asked() -> None:
    def run(fault: cases.Fault, keep: Any = None) -> Any:
        model = cases.network(cases.FaultyForward(fault))
        return cases.train(model, fault=fault, keep=keep)

    verdict, _ = cases.two_runs(run)
    assert verdict.difference is None
    again = truncdet.compare(run(cases.Fault(0), verdict.place), run(cases.Fault(1), verdict.place))
    assert again.difference is not None
    assert again.difference.elements == 1 and again.difference.first_index == (0, 0, 0, 0)
    assert again.difference.max_ulp is not None and 0 < again.difference.max_ulp < 64
    found = again.as_dict()
    assert (found["schema"], found["elements"], found["equal"]) == (1, 1, False)


def test_recordings_of_other_settings_are_not_compared() -> None:
    one, other = (cases.train(cases.network(), every=n) for n in (1, 2))
    with pytest.raises(ValueError, match=r"^compare: trace_b must be recorded with every=1"):
        truncdet.compare(one, other)
    with pytest.raises(TypeError, match=r"^compare: trace_b must be a Trace or a path, got int"):
        truncdet.compare(one, 3)  # type: ignore[arg-type]


def test_no_recorded_step_is_no_verdict() -> None:
    model = nn.Linear(1, 1)
    with truncdet.record(model) as trace:
        pass
    assert truncdet.compare(trace, trace).equal is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": 3}, TypeError, "record: model must be an nn.Module, got int"),
        ({"optimizer": 3}, TypeError, "record: optimizer must be a torch.optim.Optimizer or None"),
        ({"level": "all"}, ValueError, "record: level must be one of module, op, got 'all'"),
        ({"every": 0}, ValueError, "record: every must be an int of at least 1, got 0"),
        ({"every": True}, ValueError, "record: every must be an int of at least 1, got True"),
        ({"path": __file__}, ValueError, "record: path must name no file yet"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        with truncdet.record(**{"model": nn.Linear(1, 1), **arguments}):
            pass
