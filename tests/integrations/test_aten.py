"""aten under the patch: every operator in every form, what is left alone, and back again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _aten_cases import GRADIENTS, SAMPLING, Function
from _aten_sums import ADDITIONS, SUMS
from torch import Tensor
from truncdet.integrations import aten
from truncdet.integrations._aten_table import OPERATORS

import truncdet
from truncdet.testing import assert_bitwise_equal

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
NAMES = [name + end for name, operator in OPERATORS.items() for end in operator.forms]


def dumped() -> list[str]:
    return [torch._C._dispatch_dump(name) for name in NAMES]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = dumped()
    yield
    assert not aten.is_patched()
    assert dumped() == before


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(function: Function, x: Tensor, layout: torch.memory_format) -> Tensor:
    leaf = x.detach().contiguous(memory_format=layout).requires_grad_()
    out = function(leaf)
    upstream = drawn(1, *out.shape).to(out).contiguous(memory_format=layout)
    return torch.autograd.grad(out, leaf, upstream)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*GRADIENTS, *SAMPLING])
def test_gradients_have_truncdets_bits_and_forwards_their_own(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    case = {**GRADIENTS, **SAMPLING}[name]
    x = drawn(0, *case.shape).to(device, dtype)
    plain_forward = case.plain(x)
    for layout in (torch.contiguous_format, *LAST.get(x.dim(), ())):
        expected = gradient_of(case.ours, x, layout)
        plain = gradient_of(case.plain, x, layout)
        with aten.patched():
            found = gradient_of(case.plain, x, layout)
            assert_bitwise_equal(case.plain(x), plain_forward)
        assert_bitwise_equal(found, expected)
        assert found.stride() == plain.stride()
        # Of half values the plain kernels of a GPU round every addition, in any order, and
        # those of grid_sample the places as well.
        if (device.type == "cpu" and name in GRADIENTS) or dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2)
        if device.type == "cpu":
            assert_bitwise_equal(gradient_of(case.plain, x, layout), plain)


def test_patched_gradients_are_not_plain_ones_by_accident() -> None:
    def all_of() -> dict[str, Tensor]:
        return {
            name: gradient_of(case.plain, drawn(0, *case.shape), torch.contiguous_format)
            for name, case in GRADIENTS.items()
        }

    plain = all_of()
    with aten.patched():
        ours = all_of()
    same = {GRADIENTS[name].op for name in plain if torch.equal(plain[name], ours[name])}
    # A cell that few windows chose adds the same numbers in the same order.
    assert same <= {"adaptive_max_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}


@pytest.mark.parametrize(
    "op", [name for name, operator in OPERATORS.items() if ".grad_input" in operator.forms]
)
def test_gradients_into_a_tensor_are_ours_too(op: str) -> None:
    packet = getattr(torch.ops.aten, op.removeprefix("aten::"))
    if "max_pool" in op:
        x = drawn(0, 2, 3, 9, 5)
        out, indices = F.adaptive_max_pool2d(x, 4, return_indices=True)
        arguments: tuple[Any, ...] = (torch.ones_like(out), x, indices)
    else:
        axes = int(op[-len("xd_backward")])
        size = [2, 3, 9, 5, 4][: axes + 2]
        output = [4, 7, 3][:axes]
        arguments = (drawn(1, 2, 3, *output), output, size, False)
    with aten.patched():
        expected = packet(*arguments)
        for target in (torch.empty(0), torch.empty_like(expected)):
            assert packet(*arguments, grad_input=target) is target
            assert_bitwise_equal(target, expected)
        with pytest.raises(RuntimeError, match="dtype"):
            packet(*arguments, grad_input=torch.empty(0, dtype=torch.float64))


def contributions(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """An input [4, 3], 64 row numbers and as many contributions of widely spread magnitudes."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 4, (64,), generator=draw)
    spread = 2.0 ** torch.randint(-8, 8, (64, 1), generator=draw)
    source = torch.randn(64, 3, generator=draw, dtype=torch.float64) * spread
    return drawn(4, 4, 3).to(device, dtype), rows.to(device), source.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*SUMS, *ADDITIONS])
def test_sums_have_truncdets_bits_in_every_order(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if (name, dtype, device.type) == ("embedding_bag max backward", torch.bfloat16, "cuda"):
        pytest.skip("PyTorch has no such kernel for bfloat16 on CUDA")
    case = {**SUMS, **ADDITIONS}[name]
    x, rows, source = contributions(dtype, device)
    shows = dtype in (torch.float32, torch.float64)  # it adds halves in float32, and rounds at last
    expected = case.ours(x, case.indices(rows), source)
    plain, changed = case.plain(x, case.indices(rows), source), False
    for seed in range(5):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).to(device)
        arguments = x, case.indices(rows[order]), source[order]
        changed |= not torch.equal(case.plain(*arguments), plain)
        with aten.patched():
            assert_bitwise_equal(case.plain(*arguments), expected)
    assert changed or not shows, "the plain operator must depend on the order"


def test_operators_in_place_change_their_input_once() -> None:
    x, rows, source = contributions(torch.float32, torch.device("cpu"))
    with aten.patched():
        for case in (x.index_add_, x.scatter_add_):
            version = x._version
            index = rows if case == x.index_add_ else rows[:, None].expand(-1, 3)
            assert case(0, index, source) is x
            assert x._version == version + 1
        transposed = x.t().contiguous().t()
        expected = truncdet.index_add(transposed, 0, rows, source)
        assert_bitwise_equal(transposed.index_add_(0, rows, source), expected)
        assert transposed.stride() == (1, 4)


def test_derivatives_of_sums_keep_autograds_formulas() -> None:
    x, rows, source = (
        t.double().requires_grad_() if t.is_floating_point() else t
        for t in contributions(torch.float32, torch.device("cpu"))
    )
    columns = rows[:, None].expand(-1, 3)
    with aten.patched():
        for function in (
            lambda x, s: x.scatter_add(0, columns, s),
            lambda x, s: x.clone().index_add_(0, rows, s, alpha=2),
            lambda x, s: (x.gather(0, columns) * s).sum(0),
        ):
            assert torch.autograd.gradcheck(function, (x, source), nondet_tol=0.0)
            assert torch.autograd.gradgradcheck(function, (x, source[:]), nondet_tol=0.0)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)
def test_integers_and_complex_numbers_are_the_originals(dtype: torch.dtype) -> None:
    index = torch.tensor([0, 1, 1])
    x, source = torch.ones(2).to(dtype), torch.tensor([1.0, 2.0, 3.0]).to(dtype)

    def all_of() -> list[Tensor]:
        return [
            x.scatter_add(0, index, source),
            x.clone().scatter_add_(0, index, source),
            torch.index_add(x, 0, index, source, out=torch.empty(0, dtype=dtype)),
            x.clone().index_add_(0, index, source),
        ]

    plain = all_of()
    with aten.patched():
        for found, expected in zip(all_of(), plain, strict=True):
            assert_bitwise_equal(found, expected)


def test_enable_covers_a_model_and_disable_ends_it() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.Upsample(scale_factor=1.7, mode="bilinear"),
        torch.nn.AdaptiveAvgPool2d((5, 4)),
    )
    image = drawn(0, 2, 1, 9, 8)

    def weights() -> Tensor:
        return torch.autograd.grad(model(image).square().sum(), model[0].weight)[0]  # type: ignore[arg-type]

    def by_hand() -> Tensor:
        x = truncdet.interpolate(model[0](image), scale_factor=1.7, mode="bilinear")
        loss = truncdet.adaptive_avg_pool2d(x, (5, 4)).square().sum()
        return torch.autograd.grad(loss, model[0].weight)[0]  # type: ignore[arg-type]

    plain, expected = weights(), by_hand()
    assert not torch.equal(plain, expected)
    truncdet.enable(frameworks=["torch"])
    try:
        assert_bitwise_equal(weights(), expected)
    finally:
        truncdet.disable()
    assert_bitwise_equal(weights(), plain)


def test_undo_is_exact_after_nested_scopes_and_exceptions() -> None:
    before = dumped()
    with pytest.raises(KeyError), aten.patched():
        inside = dumped()
        assert inside != before
        with pytest.raises(OSError), aten.patched("off"):
            assert dumped() == before
            raise OSError
        assert [text.count("CPU:") for text in dumped()] == [text.count("CPU:") for text in inside]
        with pytest.raises(IndexError):
            torch.zeros(2).index_add_(5, torch.tensor([0]), torch.ones(1))
        raise KeyError
    assert (aten.unpatch(), dumped()) == (False, before)
    aten.patch()
    aten.patch("off")
    assert (aten.mode(), dumped()) == ("off", before)


def test_every_kernel_of_the_table_is_overridden_and_no_other() -> None:
    def others() -> list[str]:
        names = (
            "aten::index_put_",
            "aten::scatter.src",
            "aten::scatter.value_reduce",
            "aten::gather",
            "aten::upsample_nearest2d",
        )
        return [torch._C._dispatch_dump(name) for name in names]

    before, untouched = dumped(), others()
    with aten.patched():
        for name, old, new in zip(NAMES, before, dumped(), strict=True):
            changed = set(new.splitlines()) - set(old.splitlines())
            keys = {line.split(":")[0].split(" ")[0] for line in changed}
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            assert keys == {key for key in ("CPU", "CUDA") if has(name, key)} != set(), name
        assert others() == untouched


def test_modes_are_checked() -> None:
    for mode in ("truncate", "snap", "fast"):
        with pytest.raises(ValueError, match=r"aten\.patch: mode must be one of fixed_point, off"):
            aten.patch(mode)
        with pytest.raises(ValueError, match=r"aten\.patched: mode must be one of"):
            aten.patched(mode).__enter__()
    assert aten.mode() == "off"


def test_what_is_covered_follows_the_mode() -> None:
    op = "aten::upsample_bilinear2d_backward"
    assert not aten.covers(op, torch.float32, {})
    with aten.patched():
        assert aten.covers(op, torch.float32, {})
        assert aten.covers("aten::index_add", torch.bfloat16, {})
        assert aten.covers("aten::_embedding_bag_backward", torch.float32, {"mode": 2})
        assert not aten.covers(op, torch.complex64, {})
        assert not aten.covers("aten::median", torch.float32, {})


def test_another_thread_gets_the_same_kernels() -> None:
    x, rows, source = contributions(torch.float32, torch.device("cpu"))
    found: list[Tensor] = []

    def work() -> None:
        found.append(x.index_add(0, rows, source))

    with aten.patched():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    for result in found:
        assert_bitwise_equal(result, truncdet.index_add(x, 0, rows, source))


@pytest.mark.parametrize("name", ["bilinear", "max 2d", "average 3d"])
def test_empty_batches_have_empty_gradients(name: str) -> None:
    case = GRADIENTS[name]
    with aten.patched():
        x = torch.zeros(0, *case.shape[1:], requires_grad=True)
        case.plain(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
