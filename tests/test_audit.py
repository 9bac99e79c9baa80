"""audit: operators whose bits move are counted and named; nothing else is, and effects are once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import truncdet
from truncdet._trace_ulp import difference

LIB = torch.library.Library("truncdet_test_audit", "DEF")
LIB.define("moves(Tensor x, float by) -> Tensor")
LIB.define("moves_(Tensor(a!) x, float by) -> ()")
CALLS = [0]


def _moved(x: torch.Tensor, by: float) -> torch.Tensor:
    CALLS[0] += 1
    y = x.clone()
    y.view(-1)[: CALLS[0] % 3] *= 1 + by
    return y


def _write(x: torch.Tensor, value: torch.Tensor) -> None:
    x.copy_(value)


LIB.impl("moves", _moved, "CompositeExplicitAutograd")
LIB.impl("moves_", lambda x, by: _write(x, _moved(x, by)), "CompositeExplicitAutograd")


def test_a_deterministic_step_has_no_findings(device: torch.device) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout(0.5), nn.Flatten()
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.randn(2, 3, 6, 6, device=device)).square().sum().backward()
        optimizer.step()

    with truncdet.deterministic():
        report = truncdet.audit(step)
    assert report.equal and report.calls > 20, report
    assert "no bit moved" in str(report)


@pytest.mark.parametrize("name", ["moves", "moves_"])
def test_an_operator_that_moves_is_counted_and_named(name: str) -> None:
    x = torch.ones(4)

    def step() -> None:
        for _ in range(2):
            getattr(torch.ops.truncdet_test_audit, name)(x.clone(), 1e-6)
        (x + 1).sum()

    report = truncdet.audit(step, repeats=4)
    assert [found.op for found in report.findings] == [f"truncdet_test_audit::{name}"]
    (found,) = report.findings
    assert (found.phase, found.calls, found.moved) == ("forward", 2, 2)
    assert found.elements == 2 and found.max_ulp == 8
    assert found.source.startswith("test_audit.py:")
    assert f"truncdet_test_audit::{name} (forward)" in str(report)
    assert report.as_dict()["findings"][0]["moved"] == 2


class Odd(torch.autograd.Function):
    """Its kernels are NumPy's, which no dispatcher sees."""

    moves = ""
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Odd.kernel("forward", x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return Odd.kernel("backward", grads[0])

    @staticmethod
    def kernel(which: str, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone()
        if which == Odd.moves:
            Odd.calls += 1
            y.numpy()[0] += Odd.calls
        return y


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("early", [False, True])
def test_custom_functions_are_repeated(
    which: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name bound at import, as mmcv's are, is C's method: its forward cannot be reached.
    apply: Callable[..., torch.Tensor] = Odd.apply if early else lambda x: Odd.apply(x)
    monkeypatch.setattr(Odd, "moves", which)
    x = torch.ones(3, requires_grad=True)
    report = truncdet.audit(lambda: apply(x).sum().backward())
    names = {"forward": "Odd", "backward": "OddBackward"}
    expected = [] if early and which == "forward" else [names[which]]
    assert [found.op for found in report.findings] == expected


def test_effects_happen_once_and_the_random_state_goes_on() -> None:
    def run(audited: bool) -> tuple[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()

        for _ in range(2):
            if audited:
                truncdet.audit(step)
            else:
                step()
        return truncdet.digest(model.state_dict()).hex, torch.rand(3)

    (plain, draws), (audited, after) = run(False), run(True)
    assert plain == audited and torch.equal(draws, after)


def test_patches_are_gone_after_an_exception() -> None:
    before = torch.autograd.Function.__dict__["apply"], torch.autograd.backward
    with pytest.raises(KeyError):
        truncdet.audit(lambda: {}["missing"])
    assert (torch.autograd.Function.__dict__["apply"], torch.autograd.backward) == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "audit: step_fn must be callable, got int"),
        ((print, 1), ValueError, "audit: repeats must be an int of at least 2, got 1"),
        ((print, 2.0), ValueError, "audit: repeats must be an int of at least 2, got 2.0"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        truncdet.audit(*arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_distances_are_counted_in_representable_numbers(dtype: torch.dtype) -> None:
    one = torch.ones(2, 3, dtype=dtype)
    other = one.clone()
    other[1, 0] = torch.nextafter(one[0, 0], one[0, 0] * 2) if dtype.itemsize > 2 else 1
    if dtype.itemsize == 2:
        other.view(torch.int16)[1, 0] += 1
    found = difference(one, other)
    assert (found.elements, found.first_index, found.max_ulp) == (1, (1, 0), 1)
    zeros = difference(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype))
    assert zeros.max_ulp == 1
    assert difference(one, one.clone()).elements == 0
    nan = torch.full((1,), torch.nan, dtype=dtype)
    assert difference(nan, torch.ones(1, dtype=dtype)).max_ulp is None


@pytest.mark.cuda
def test_float_atomics_are_found_and_gone_under_truncdet() -> None:
    index = torch.randint(100, (200_000,), device="cuda")
    values = torch.randn(200_000, device="cuda")

    def step() -> None:
        torch.zeros(100, device="cuda").index_add_(0, index, values)

    found = truncdet.audit(step, repeats=10).findings
    assert [entry.op for entry in found] == ["aten::index_add_"]
    with truncdet.deterministic():
        assert truncdet.audit(step, repeats=10).equal


class _Scaled(torch.autograd.Function):
    """With an argument that is no tensor, and one that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, other: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.factor, None, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.mul_(-0.5)


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 1, None


class _LetsGo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        kept = ctx.kept
        del ctx.kept
        return 2 * kept * g


def _gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.arange(1.0, 4, requires_grad=True)
    (function(x * 1).square() * 3).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("function", "repeated"),
    [
        (lambda x: _Scaled.apply(x, 0.5, torch.ones(3)), ["_ScaledBackward"]),
        (_InPlace.apply, ["_InPlaceBackward"]),
        (_LetsGo.apply, []),
    ],
)
def test_a_function_is_left_as_it_is(function: Any, repeated: list[str]) -> None:
    expected, found = _gradient(function), []
    report = truncdet.audit(lambda: found.append(_gradient(function)))
    assert report.equal
    assert torch.equal(found[0], expected)
    skipped = {name for name in report.skipped if name.endswith("Backward")}
    assert skipped == (set() if repeated else {"_LetsGoBackward"})


def test_a_function_that_writes_to_its_arguments_runs_once() -> None:
    count = torch.zeros(())
    report = truncdet.audit(lambda: _gradient(lambda x: _Counting.apply(x, count)))
    assert count == 1 and "_Counting" in report.skipped


def test_a_backward_that_moves_is_found_past_arguments_that_are_no_tensors() -> None:
    class Moves(_Scaled):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return _moved(g, 1e-3), None, None

    report = truncdet.audit(lambda: _gradient(lambda x: Moves.apply(x, 0.5, x)), repeats=4)
    assert [entry.op for entry in report.findings] == ["MovesBackward"]


def _drawn(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(3, generator=generator)


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.full((3,), 3.0).requires_grad_(False).mul_(torch.full((3,), 2.0)),
        lambda: (lambda y: y.mul_(y))(torch.full((3,), 3.0)),
        lambda: (lambda y: torch.add(y, 1, out=y))(torch.ones(3)),
        lambda: (lambda y: torch.cumsum(y, 0, out=y))(torch.ones(3)),
        lambda: (lambda y: y[:1].add_(y[:1]))(torch.ones(3)),
        lambda: nn.LSTM(3, 4)(torch.randn(2, 1, 3)),
        lambda: list(torch.utils.data.DataLoader(list(range(9)), shuffle=True)),
        lambda: torch.func.jvp(nn.Linear(4, 2), (torch.ones(3, 4),), (torch.ones(3, 4),)),
    ],
)
def test_what_repeats_is_not_accused(step: Callable[[], object]) -> None:
    report = truncdet.audit(step)
    assert report.equal and report.calls, report


def test_a_generator_ends_where_one_run_would_have_left_it() -> None:
    mine, other = (torch.Generator().manual_seed(3) for _ in range(2))
    found: list[torch.Tensor] = []
    assert truncdet.audit(lambda: found.append(_drawn(mine))).equal
    assert torch.equal(found[0], _drawn(other))
    assert torch.equal(mine.get_state(), other.get_state())
