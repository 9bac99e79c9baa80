"""Embeddings, grid_sample, histograms and segments under the patch: options, and wrong calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _aten_draw import assert_same_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from truncdet.integrations import aten
from truncdet.integrations._aten_sampling import sampling_cudnn

import truncdet
from truncdet.testing import assert_bitwise_equal

INDEX = torch.tensor([0, 2, 2, 0, 1, 2])
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty
ops = torch.ops.aten


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    assert not aten.is_patched()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_gradient(look_up: Callable[..., Tensor], dtype: torch.dtype, **options: Any) -> Tensor:
    table = drawn(0, 3, 5).to(dtype).requires_grad_()
    out = look_up(table, **options)
    return torch.autograd.grad(out, table, drawn(1, *out.shape).to(dtype))[0]


BAGS: dict[str, dict[str, Any]] = {
    f"{mode}{' scaled' * scale}{' padded' * padded}": {
        "mode": mode,
        "scale_grad_by_freq": scale,
        "padding_idx": 2 if padded else None,
    }
    for mode in ("sum", "mean")
    for scale in (False, True)
    for padded in (False, True)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", BAGS)
def test_bags_have_truncdets_bits(name: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    options = BAGS[name]
    for index, starts in ((INDEX.to(kind), OFFSETS.to(kind)), (INDEX.to(kind).view(2, 3), None)):
        call = {"offsets": starts, **options}
        expected = table_gradient(
            lambda w, i=index, **o: truncdet.embedding_bag(i, w, **o), dtype, **call
        )

        def plain(w: Tensor, i: Tensor = index, **o: Any) -> Tensor:
            return F.embedding_bag(i, w, **o)

        # Scaled by hand, which PyTorch 2.11 does wrongly on the CPU.
        native = table_gradient(plain, dtype, **{**call, "scale_grad_by_freq": False})
        if options["scale_grad_by_freq"]:
            native /= torch.bincount(INDEX)[:, None]
        with aten.patched():
            assert_bitwise_equal(table_gradient(plain, dtype, **call), expected)
        torch.testing.assert_close(expected, native, rtol=2e-2, atol=2e-2)


def test_bags_with_an_end_and_bags_with_weights() -> None:
    weights = drawn(4, 6).requires_grad_()
    ends = torch.tensor([0, 3, 3, 6])

    def gradients(bag: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        table = drawn(0, 3, 5).requires_grad_()
        out = bag(
            INDEX, table, ends, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return torch.autograd.grad(out, (table, weights), drawn(1, 3, 5))

    expected, plain = gradients(truncdet.embedding_bag), gradients(F.embedding_bag)
    with aten.patched():
        found = gradients(F.embedding_bag)
    assert_bitwise_equal(found[0], expected[0])
    assert_bitwise_equal(found[1], plain[1])


def test_the_largest_of_a_bag_gets_its_gradient_and_an_empty_bag_none() -> None:
    def gradient() -> Tensor:
        return table_gradient(
            lambda w: F.embedding_bag(INDEX.flip(0), w, OFFSETS, mode="max"), torch.float32
        )

    plain = gradient()
    with aten.patched():
        found = gradient()
    torch.testing.assert_close(found, plain)
    assert (plain != 0).sum() == (found != 0).sum() <= 15


def test_embedding_modules_and_sparse_gradients() -> None:
    layer = torch.nn.Embedding(3, 5, padding_idx=0)
    expected = torch.autograd.grad(
        truncdet.embedding(INDEX, layer.weight, 0), layer.weight, drawn(1, 6, 5)
    )[0]
    sparse = torch.nn.Embedding(3, 5, sparse=True)
    plain = torch.autograd.grad(sparse(INDEX), sparse.weight, drawn(1, 6, 5))[0]
    with aten.patched():
        found = torch.autograd.grad(layer(INDEX), layer.weight, drawn(1, 6, 5))[0]
        still_sparse = torch.autograd.grad(sparse(INDEX), sparse.weight, drawn(1, 6, 5))[0]
        none = torch.autograd.grad(layer(INDEX[:0]), layer.weight, drawn(1, 0, 5))[0]
    assert_bitwise_equal(found, expected)
    assert still_sparse.is_sparse
    assert_bitwise_equal(still_sparse.coalesce().values(), plain.coalesce().values())
    assert none.shape == (3, 5) and not none.any()


IMAGE, PLACES = drawn(0, 2, 3, 4, 5), drawn(1, 2, 6, 7, 2)
GRAD = drawn(2, 2, 3, 6, 7)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_what_of_grid_sample_is_not_wanted_is_not_computed(wanted: tuple[bool, bool]) -> None:
    arguments = GRAD, IMAGE, PLACES, 0, 0, False
    expected = torch.ops.truncdet.grid_sample_backward(*arguments, True, True)
    plain = ops.grid_sampler_2d_backward(*arguments, list(wanted))
    with aten.patched():
        found = ops.grid_sampler_2d_backward(*arguments, list(wanted))
    assert [x is None for x in found] == [x is None for x in plain] == [not wanted[0], False]
    for x, full, has, native in zip(found, expected, wanted, plain, strict=True):
        if x is not None:
            assert_bitwise_equal(x, full if has else torch.zeros_like(full))
            assert x.stride() == native.stride()


def test_the_kernel_for_cudnn_is_the_one_of_its_only_mode() -> None:
    expected = torch.ops.truncdet.grid_sample_backward(GRAD, IMAGE, PLACES, 0, 0, True, True, True)
    found = sampling_cudnn(IMAGE, PLACES, GRAD)
    assert found is not None
    for ours, full in zip(found, expected, strict=True):
        assert_bitwise_equal(ours, full)
    assert sampling_cudnn(IMAGE, PLACES, GRAD[:1]) is None


@pytest.mark.cuda
def test_on_a_gpu_aligned_corners_reach_the_same_bits_by_cudnn() -> None:
    def gradients(sample: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        image, places = (x.cuda().requires_grad_() for x in (IMAGE, PLACES))
        out = sample(image, places, align_corners=True)
        return torch.autograd.grad(out, (image, places), GRAD.cuda())

    expected = gradients(truncdet.grid_sample)
    with aten.patched():
        found = gradients(F.grid_sample)
    for ours, full in zip(found, expected, strict=True):
        assert_bitwise_equal(ours, full)


def test_histc_is_left_alone_until_floats_no_longer_count() -> None:
    few, many = torch.ones(2**11).half(), torch.ones(2**11 + 1).half()
    assert few.histc(1).item() == 2**11
    with aten.patched():
        assert few.histc(1).item() == 2**11
        out = torch.empty(0, dtype=torch.float16)
        assert torch.histc(many, 2, 0, 2, out=out) is out
        assert_bitwise_equal(out, truncdet.histc(many, 2, 0, 2))
        assert_bitwise_equal(many.histc(2, 0, 2), out)
    many = torch.ones(2**12 + 4).half()
    with aten.patched():
        assert many.histc(1, 0, 2).item() == 2**12 + 4
    assert many.histc(1, 0, 2).item() < 2**12 + 4


def test_counts_and_extrema_are_the_originals() -> None:
    def all_of() -> list[Tensor]:
        lengths = torch.tensor([4, 0, 2])
        return [
            torch.bincount(INDEX),
            torch.bincount(INDEX, INDEX),
            torch.bincount(INDEX[:0], torch.zeros(0)),
            ops.embedding_dense_backward(torch.ones(6, 5).long(), INDEX, 3, -1, False),
            *(torch.segment_reduce(drawn(0, 6), how, lengths=lengths) for how in ("max", "prod")),
        ]

    plain = all_of()
    with aten.patched():
        for found, expected in zip(all_of(), plain, strict=True):
            assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("initial", [None, 0, 2.5])
def test_segments_of_every_kind(how: str, initial: float | None) -> None:
    data = drawn(0, 2, 6, 3)
    lengths = torch.tensor([[4, 0, 2], [1, 2, 3]])
    offsets = torch.tensor([[0, 4, 4, 6], [0, 1, 3, 6]])
    for given in ({"lengths": lengths}, {"offsets": offsets}):
        options = {**given, "axis": 1, "initial": initial}
        expected = truncdet.segment_reduce(data, how, **options)
        plain = torch.segment_reduce(data, how, **options)
        with aten.patched():
            found = torch.segment_reduce(data, how, **options)
            leaf = data.double().requires_grad_()
            # The gradient of an empty mean is PyTorch's.
            (slope,) = torch.autograd.grad(torch.segment_reduce(leaf, how, **options).sum(), leaf)
        assert_bitwise_equal(found, expected)
        torch.testing.assert_close(found, plain, equal_nan=True)
        assert slope.shape == data.shape


WRONG: dict[str, Callable[[], Any]] = {
    "grid of another batch": lambda: ops.grid_sampler_2d_backward(
        GRAD, IMAGE, PLACES[:1], 0, 0, False, [True, True]
    ),
    "grid of another dtype": lambda: ops.grid_sampler_2d_backward(
        GRAD, IMAGE, PLACES.double(), 0, 0, False, [True, True]
    ),
    "bicubic volumes": lambda: ops.grid_sampler_3d_backward(
        drawn(0, 1, 1, 2, 2, 2),
        drawn(0, 1, 1, 3, 3, 3),
        drawn(0, 1, 2, 2, 2, 3),
        2,
        0,
        False,
        [True, True],
    ),
    "no cells": lambda: ops.grid_sampler_2d_backward(
        GRAD, IMAGE[..., :0], PLACES, 0, 0, False, [True, True]
    ),
    "embedding of floats": lambda: ops.embedding_dense_backward(
        drawn(0, 6, 5), INDEX.float(), 3, -1, False
    ),
    "embedding of another number": lambda: ops.embedding_dense_backward(
        drawn(0, 7, 5), INDEX, 3, -1, False
    ),
    "negative bins": lambda: torch.bincount(-INDEX, drawn(0, 6)),
    "bins of floats": lambda: torch.bincount(drawn(0, 6), drawn(0, 6)),
    "weights of another length": lambda: torch.bincount(INDEX, drawn(0, 5)),
    "a negative number of bins": lambda: torch.bincount(INDEX, drawn(0, 6), -1),
    "a histogram without bins": lambda: torch.ones(2**12).half().histc(0),
    "limits in the wrong order": lambda: torch.ones(2**12).half().histc(2, 3, 1),
    "limits that are not finite": lambda: torch.ones(2**12).half().histc(2, 0, float("inf")),
    "segments that do not cover": lambda: torch.segment_reduce(
        drawn(0, 6), "sum", lengths=torch.tensor([2, 2])
    ),
    "segments of negative length": lambda: torch.segment_reduce(
        drawn(0, 6), "sum", lengths=torch.tensor([8, -2])
    ),
    "segments twice": lambda: torch.segment_reduce(
        drawn(0, 6), "median", lengths=torch.tensor([6])
    ),
    "no segments": lambda: torch.segment_reduce(drawn(0, 6), "mean"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_the_very_error_that_it_does_without_the_patch(name: str) -> None:
    assert_same_error(WRONG[name])


def test_derivatives_keep_autograds_formulas() -> None:
    table = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    factor = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    columns = INDEX[:, None].expand(-1, 2)
    with aten.patched():
        for function in (
            lambda w, f: F.embedding(INDEX, w) * f,
            lambda w, f: w.scatter_reduce(0, columns, f, "mean").square(),
            lambda w, f: w.index_reduce(0, INDEX, f, "mean").square(),
        ):
            assert torch.autograd.gradcheck(function, (table, factor), nondet_tol=0.0)
            assert torch.autograd.gradgradcheck(function, (table, factor), nondet_tol=0.0)
        for sums in (
            lambda w, f: F.embedding_bag(INDEX.view(2, 3), w, mode="mean") * f[:2],
            lambda w, f: F.grid_sample(w[None, None], f[None, :, None] / 2, align_corners=False),
        ):
            assert torch.autograd.gradcheck(sums, (table, factor), nondet_tol=0.0)


def test_autocast_casts_as_before() -> None:
    image, places = IMAGE.bfloat16().requires_grad_(), PLACES.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.autograd.grad(
            F.grid_sample(image, places, align_corners=False).sum(), (image, places)
        )
        with aten.patched():
            out = F.grid_sample(image, places, align_corners=False)
            found = torch.autograd.grad(out.sum(), (image, places))
    expected = torch.autograd.grad(
        truncdet.grid_sample(image.float(), places, align_corners=False).sum(), (image, places)
    )
    assert [x.dtype for x in found] == [x.dtype for x in plain]
    for ours, full in zip(found, expected, strict=True):
        assert_bitwise_equal(ours, full)


def test_vmap_and_fake_tensors() -> None:
    upstream = drawn(3, 2, 6, 5)
    weights = drawn(0, 2, 3, 5)

    def slope(w: Tensor, g: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda w: (F.embedding(INDEX, w) * g).sum())(w)
        return found

    with aten.patched():
        mapped = torch.func.vmap(slope)(weights, upstream)
        with FakeTensorMode() as mode:
            table = mode.from_tensor(drawn(0, 3, 5)).requires_grad_()
            F.embedding(mode.from_tensor(INDEX), table).sum().backward()
            image = mode.from_tensor(IMAGE).requires_grad_()
            F.grid_sample(image, mode.from_tensor(PLACES)).sum().backward()
    rows = INDEX[:, None].expand(-1, 5)
    expected = [truncdet.scatter_add(torch.zeros(3, 5), 0, rows, g) for g in upstream]
    torch.testing.assert_close(mapped, torch.stack(expected))
    assert table.grad is not None and table.grad.shape == (3, 5)
    assert image.grad is not None and image.grad.shape == IMAGE.shape
