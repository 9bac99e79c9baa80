"""aten under the patch, in odd company: wrong calls, aliases, vmap, compilers, autocast, meta."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _aten_draw import Draw, assert_same_error, assert_same_kind
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from truncdet.integrations import aten

import truncdet
from truncdet import _sticky
from truncdet.testing import assert_bitwise_equal

INDEX = torch.tensor([0, 1, 1, 0])
SOURCE = torch.tensor([1.0, 2.0, 3.0, 2.0**-25])


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    assert not aten.is_patched()


FLOATS = (torch.float32,) * 8 + (torch.float16, torch.int64)


# What the dispatcher calls it, whether its index is a vector, and what it may be told to do.
REDUCTIONS = ("sum", "mean", "prod", "amax", "average")
OPERATORS: dict[str, tuple[bool, dict[str, tuple[Any, ...]]]] = {
    "scatter_add": (False, {}),
    "scatter_reduce": (False, {"reduce": REDUCTIONS, "include_self": (True, False)}),
    "scatter": (False, {"reduce": ("add", "add", "multiply", "mean")}),
    "index_add": (True, {"alpha": (*[1] * 6, -2.5, True, 1e300, 1j, float("inf"))}),
    "index_reduce": (True, {"reduce": ("mean", *REDUCTIONS), "include_self": (True, False)}),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("form", ["new", "in place", "out"])
def test_random_calls_succeed_and_fail_as_they_do_without_the_patch(
    operator: str, form: str
) -> None:
    draw, worked = Draw(7), 0
    function: Callable[..., Tensor] = getattr(torch, operator)
    method: Callable[..., Tensor] = getattr(Tensor, f"{operator}_")
    by_rows, choices = OPERATORS[operator]
    for _ in range(400):
        shape = [draw.number(0, 3) for _ in range(draw.number(0, 3))]
        x = draw.tensor(draw.shape(*shape), *FLOATS)
        dim = draw.number(-1, max(len(shape) - 1, 0)) if draw.number(0, 9) else draw.number(-4, 4)
        n = draw.number(0, 5)
        along = [n if d == dim % max(len(shape), 1) else m for d, m in enumerate(shape)]
        size = x.size(dim) if x.dim() and -x.dim() <= dim < x.dim() else 1
        index = draw.index([n] if by_rows else draw.shape(*along), size)
        source = draw.tensor(draw.shape(*along), *FLOATS)
        options = {name: draw.one_of(*values) for name, values in choices.items()}
        target = draw.tensor(draw.one_of(list(x.shape), [0], [2, 2]), *FLOATS)
        if target.shape != x.shape:
            target = target[:0]

        def call(
            x: Tensor = x,
            arguments: tuple[Any, ...] = (dim, index, source),
            options: dict[str, Any] = options,
            target: Tensor = target,
        ) -> Tensor:
            if form == "new":
                return function(x, *arguments, **options)
            if form == "out":
                return function(x, *arguments, **options, out=target.clone())
            return method(x.clone(), *arguments, **options)

        worked += assert_same_kind(
            call, (x.shape, x.dtype, dim, index, source.shape, source.dtype, options)
        )
    assert 15 < worked < 350


def backward(op: str) -> Callable[..., Tensor]:
    packet: Callable[..., Tensor] = getattr(torch.ops.aten, op)
    return packet


WRONG = {
    "grad of another size": lambda: backward("upsample_bilinear2d_backward")(
        torch.ones(1, 1, 3, 3), [4, 4], [1, 1, 2, 2], False
    ),
    "too few sizes": lambda: backward("upsample_bilinear2d_backward")(
        torch.ones(1, 1, 4, 4), [4, 4], [1, 2, 2], False
    ),
    "no cells": lambda: backward("upsample_linear1d_backward")(
        torch.ones(1, 1, 4), [4], [1, 1, 0], False
    ),
    "integer grad": lambda: backward("upsample_linear1d_backward")(
        torch.ones(1, 1, 4, dtype=torch.int32), [4], [1, 1, 2], False
    ),
    "pool of another type": lambda: backward("_adaptive_avg_pool2d_backward")(
        torch.ones(1, 2, 2), torch.ones(1, 4, 4, dtype=torch.float64)
    ),
    "pool of another rank": lambda: backward("_adaptive_avg_pool2d_backward")(
        torch.ones(1, 1, 1, 2, 2), torch.ones(1, 1, 1, 4, 4)
    ),
    "pool of volumes of another rank": lambda: backward("_adaptive_avg_pool3d_backward")(
        torch.ones(1, 2, 2), torch.ones(1, 4, 4)
    ),
    "indices of another type": lambda: backward("adaptive_max_pool2d_backward")(
        torch.ones(1, 2, 2), torch.ones(1, 4, 4), torch.zeros(1, 2, 2, dtype=torch.int32)
    ),
    "max pool of another type": lambda: backward("adaptive_max_pool2d_backward")(
        torch.ones(1, 2, 2), torch.ones(1, 4, 4).double(), torch.zeros(1, 2, 2).long()
    ),
    "target with one element for all": lambda: torch.zeros(1)
    .expand(2)
    .scatter_add_(0, INDEX, SOURCE),
    "target that is the source": lambda: (lambda x: x.scatter_add_(0, INDEX, x))(SOURCE.clone()),
    "out that overlaps the source": lambda: (
        lambda x: torch.index_add(torch.zeros(4), 0, INDEX, x[:4], out=x[2:])
    )(torch.ones(6)),
    "complex alpha": lambda: torch.zeros(2).index_add(0, INDEX, SOURCE, alpha=1j),
    "out of another type": lambda: torch.index_add(
        torch.zeros(2), 0, INDEX, SOURCE, out=torch.zeros(2).double()
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_the_very_error_that_it_does_without_the_patch(name: str) -> None:
    assert_same_error(WRONG[name])


@pytest.mark.cuda
def test_tensors_of_two_devices_raise_too() -> None:
    x, index, source = torch.zeros(2).cuda(), INDEX.cuda(), SOURCE.cuda()
    pooled, indices = F.adaptive_max_pool2d(torch.rand(1, 4, 4).cuda(), 2, return_indices=True)
    for call in (
        lambda: x.index_add(0, INDEX, source),
        lambda: x.scatter_add_(0, index, SOURCE),
        lambda: torch.scatter_add(x, 0, index, source, out=torch.zeros(2)),
        lambda: backward("adaptive_max_pool2d_backward")(
            pooled, torch.rand(1, 4, 4).cuda(), indices.cpu()
        ),
        lambda: backward("_adaptive_avg_pool2d_backward")(pooled, torch.rand(1, 4, 4)),
    ):
        with pytest.raises(RuntimeError), aten.patched():
            call()


def test_an_index_out_of_range_raises_before_anything_changes() -> None:
    x = torch.zeros(2)
    with aten.patched():
        for bad in (torch.tensor([0, 2]), torch.tensor([0, -1])):
            with pytest.raises(ValueError, match=r"scatter_add: index must be in \[0, 2\), got"):
                x.scatter_add_(0, bad, torch.ones(2))
            with pytest.raises(ValueError, match=r"index_add: index must be in \[0, 2\), got"):
                x.index_add_(0, bad, torch.ones(2))
    assert x.tolist() == [0, 0]


@pytest.mark.parametrize("operator", ["scatter_add", "index_add"])
def test_a_call_reports_what_an_earlier_one_met(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pending() -> None:
        raise truncdet.TruncdetError("met before")

    monkeypatch.setattr(_sticky, "raise_pending", pending)
    with aten.patched(), pytest.raises(truncdet.TruncdetError, match="met before"):
        getattr(torch, operator)(torch.zeros(2), 0, INDEX, SOURCE)


@pytest.mark.cuda
def test_on_a_gpu_it_is_dropped_and_reported_by_the_next_call() -> None:
    x = torch.zeros(2, device="cuda")
    with aten.patched():
        x.index_add_(0, torch.tensor([0, 2], device="cuda"), torch.ones(2, device="cuda"))
        with pytest.raises(truncdet.TruncdetError, match="index_add"):
            truncdet.check()
    assert x.tolist() == [1, 0]


def test_out_may_be_the_input_or_another_part_of_its_memory() -> None:
    memory = torch.zeros(10)
    x, source = memory[:2], memory[6:]
    source.copy_(SOURCE)
    expected = truncdet.index_add(x, 0, INDEX, source)
    with aten.patched():
        assert_bitwise_equal(x.clone().index_add_(0, INDEX, source), expected)
        assert torch.index_add(x, 0, INDEX, source, out=x) is x
        assert_bitwise_equal(x, expected)
        # Two such halves of a last place count together only in an exact sum.
        columns = torch.tensor([1.0, 2.0**-24]).repeat(4, 1)
        columns[:, 0].scatter_add_(0, INDEX, columns[:, 1])
    assert columns[:, 0].tolist() == [1 + 2.0**-23, 1 + 2.0**-23, 1, 1]
    assert columns[:, 1].tolist() == [2.0**-24] * 4


def test_out_of_another_shape_is_resized_with_the_same_warning() -> None:
    def told() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = torch.zeros(3)
            torch.index_add(torch.zeros(2), 0, INDEX, SOURCE, out=out)
        assert out.shape == (2,)
        return [str(warning.message).split(" since")[0] for warning in caught]

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        plain = told()
        with aten.patched():
            assert told() == plain != []
    finally:
        torch.set_warn_always(always)


def test_vmap_and_functorch_reach_the_kernels() -> None:
    x, source = torch.zeros(3, 2), torch.stack([SOURCE, -SOURCE, SOURCE.flip(0)])
    with aten.patched():
        mapped = torch.func.vmap(lambda a, s: a.scatter_add(0, INDEX, s))(x, source)
        slope = torch.func.grad(lambda a: a[None].gather(1, INDEX[None]).mul(SOURCE).sum())(x[0])
        functional = torch.func.functionalize(lambda a: a.clone().index_add_(0, INDEX, SOURCE))
        assert_bitwise_equal(functional(x[0]), truncdet.index_add(x[0], 0, INDEX, SOURCE))
    rows = [truncdet.scatter_add(a, 0, INDEX, s) for a, s in zip(x, source, strict=True)]
    assert_bitwise_equal(mapped, torch.stack(rows))
    assert_bitwise_equal(slope, truncdet.scatter_add(x[0], 0, INDEX, SOURCE))


def pooling(x: Tensor, source: Tensor) -> Tensor:
    pooled = F.adaptive_avg_pool2d(x, (3, 4)).flatten()
    added = pooled.scatter_add(0, INDEX, source).index_add(0, INDEX, source * pooled[:4])
    return (added.gather(0, INDEX) * x.flatten()[INDEX]).square().sum()


def resizing(x: Tensor, source: Tensor) -> Tensor:
    return pooling(F.interpolate(x, scale_factor=1.7, mode="bilinear"), source)


def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    x = torch.linspace(-1, 1, 20).reshape(1, 1, 4, 5).requires_grad_()
    source = SOURCE.clone().requires_grad_()
    return torch.autograd.grad(function(x, source), (x, source))


# AOTAutograd takes interpolation apart: its sums are other ones, see below.
@pytest.mark.parametrize(("backend", "model"), [("eager", resizing), ("aot_eager", pooling)])
@pytest.mark.parametrize("when", ["before", "while"])
def test_compiled_code_calls_the_kernels_in_force_when_it_runs(
    when: str, backend: str, model: Callable[..., Tensor]
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = gradients(model)
    if when == "before":
        for found, expected in zip(gradients(compiled), plain, strict=True):
            assert_bitwise_equal(found, expected)
    with aten.patched():
        ours = gradients(model)
        for found, expected in zip(gradients(compiled), ours, strict=True):
            assert_bitwise_equal(found, expected)
    assert any(not torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    for found, expected in zip(gradients(compiled), plain, strict=True):
        assert_bitwise_equal(found, expected)


def test_interpolation_that_aot_autograd_took_apart_adds_by_index_put() -> None:
    torch._dynamo.reset()
    calls: list[bool] = []

    def spy(keys: Any, *arguments: Any) -> Any:
        calls.append(arguments[3])
        return original.call_boxed(keys, *arguments)

    compiled = torch.compile(resizing, backend="aot_eager", fullgraph=True)
    with aten.patched():
        original = torch.library.get_kernel("aten::_index_put_impl_", "CPU")
        library: Any = torch.library.Library("aten", "IMPL")
        library.impl("_index_put_impl_", spy, "CPU", with_keyset=True, allow_override=True)
        try:
            found = gradients(compiled)
        finally:
            library._destroy()
        again = gradients(compiled)
        ours = gradients(resizing)
    assert sum(calls) > 1  # one of them is pooling's
    for first, second, expected in zip(found, again, ours, strict=True):
        assert_bitwise_equal(first, second)
        torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_change_no_bit(guard: Callable[[], Any]) -> None:
    expected = truncdet.index_add(torch.zeros(2), 0, INDEX, SOURCE)
    with aten.patched(), guard():
        x = torch.zeros(2)
        assert_bitwise_equal(x.index_add(0, INDEX, SOURCE), expected)
        assert_bitwise_equal(x.index_add_(0, INDEX, SOURCE), expected)
        assert not x.requires_grad


def test_negative_views_are_resolved_first() -> None:
    view = torch.complex(SOURCE, SOURCE).conj().imag
    assert view.is_neg()
    with aten.patched():
        found = torch.zeros(2).scatter_add(0, INDEX, view)
        torch.zeros(4).scatter_add_(0, INDEX, view)
    assert_bitwise_equal(found, truncdet.scatter_add(torch.zeros(2), 0, INDEX, -SOURCE))


def test_autocast_casts_as_before() -> None:
    x = torch.rand(1, 1, 3, 3).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        F.interpolate(x, scale_factor=2, mode="bilinear").sum().backward()
        plain = x.grad
        x.grad = None
        with aten.patched():
            out = F.interpolate(x, scale_factor=2, mode="bilinear")
            out.sum().backward()
            summed = torch.zeros(2).index_add(0, INDEX, SOURCE)
    assert plain is not None and x.grad is not None
    assert (x.grad.dtype, summed.dtype) == (plain.dtype, torch.float32)


def test_meta_and_fake_tensors_have_shapes_and_no_kernels() -> None:
    with aten.patched():
        meta = torch.zeros(2, device="meta").scatter_add(
            0, INDEX.to("meta"), torch.empty(4, device="meta")
        )
        with FakeTensorMode() as mode:
            x = mode.from_tensor(torch.rand(1, 1, 3, 3)).requires_grad_()
            F.interpolate(x, scale_factor=2, mode="bilinear").sum().backward()
            fake = mode.from_tensor(torch.zeros(2)).index_add(
                0, mode.from_tensor(INDEX), mode.from_tensor(SOURCE)
            )
    assert meta.shape == fake.shape == (2,)
    assert x.grad is not None and x.grad.shape == x.shape


def test_second_derivatives_go_through_the_overridden_backward() -> None:
    x = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    with aten.patched():
        for function in (
            lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
            lambda x: F.interpolate(x, size=(5, 3), mode="bicubic", align_corners=True),
            lambda x: F.adaptive_avg_pool2d(x, 2),
            lambda x: F.adaptive_max_pool2d(x, 2),
        ):
            assert torch.autograd.gradcheck(function, x, nondet_tol=0.0)
            assert torch.autograd.gradgradcheck(lambda x, f=function: f(x).square(), x)


def test_the_deterministic_flag_does_not_take_the_calls_away() -> None:
    expected = truncdet.index_add(torch.zeros(2), 0, INDEX, SOURCE)
    torch.use_deterministic_algorithms(True)
    try:
        with aten.patched():
            assert_bitwise_equal(torch.zeros(2).index_add(0, INDEX, SOURCE), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_torchscript_reaches_the_kernels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(
            lambda x, i, s: x.scatter_add(0, i, s), (torch.zeros(2), INDEX, SOURCE)
        )
    with aten.patched():
        found = traced(torch.zeros(2), INDEX, SOURCE)
    assert_bitwise_equal(found, truncdet.scatter_add(torch.zeros(2), 0, INDEX, SOURCE))


@pytest.mark.cuda
def test_a_cuda_graph_captures_the_kernels() -> None:
    x, index, source = torch.zeros(2).cuda(), INDEX.cuda(), SOURCE.cuda()
    with aten.patched():
        x.index_add(0, index, source)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = x.index_add(0, index, source)
        graph.replay()
    expected = truncdet.index_add(x, 0, index, source)
    torch.cuda.synchronize()
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 1), (4, 1), (1, 4)])
def test_sums_into_rows_that_share_elements_lose_nothing(strides: tuple[int, int]) -> None:
    rows, values = torch.tensor([0, 1, 1, 3]), torch.arange(1.0, 13).view(4, 3)
    columns = rows[:, None].expand(4, 3)

    def run(add: Callable[[Tensor], Tensor]) -> Tensor:
        memory = torch.zeros(16)
        add(memory.as_strided((4, 3), strides))
        return memory

    for add in (
        lambda x: x.index_add_(0, rows, values),
        lambda x: x.scatter_add_(0, columns, values),
        lambda x: x.index_put_((rows,), values, True),
        lambda x: torch.index_add(x, 0, rows, values, out=x),
    ):
        expected = run(add)
        with aten.patched():
            assert torch.equal(run(add), expected)
