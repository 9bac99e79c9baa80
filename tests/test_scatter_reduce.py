"""scatter_reduce and torch_scatter's names: sums and means without an order."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from scatter_cases import bound, each_dtype, random_floats, random_index
from scatter_group import CANCELLING_300, assert_compiles, assert_gradients, assert_same_as, orders

import truncdet
from truncdet import TruncdetError, _sticky, scatter, scatter_add, scatter_reduce
from truncdet._count import count_reference
from truncdet._divide import divide_reference
from truncdet._scatter import SCATTER_ADD, accumulate_reference
from truncdet.fixedpoint import compute_dtype
from truncdet.testing import assert_bitwise_equal

each_reduce = pytest.mark.parametrize("reduce", ["sum", "mean"])
each_self = pytest.mark.parametrize("include_self", [True, False], ids=["self", "no_self"])


@each_reduce
@each_self
@pytest.mark.parametrize("dim", [0, 1, -1, "repeated"])
def test_values_and_gradients_are_torchs(device, reduce, include_self, dim):
    input = random_floats((4, 5, 3), torch.float64, device, 1)
    if dim == "repeated":
        dim, index = 0, random_index((6, 1, 1), 4, device).expand(6, 5, 3)
    else:
        index = random_index((3, 5, 2), input.size(dim), device)

    def through(op):
        return lambda x, y: op(x, dim, index, y, reduce, include_self=include_self)

    src = random_floats(index.shape, torch.float64, device, 1, seed=4)
    assert_same_as(through(scatter_reduce), through(torch.scatter_reduce), input, src)


@each_dtype
@each_self
def test_a_mean_is_the_reference_sum_divided_once(device, dtype, include_self):
    input, src = (random_floats(s, dtype, device, 2, seed=i) for i, s in enumerate(((7,), (900,))))
    index = random_index((900,), 6, device)
    column = index.cpu().reshape(1, -1, 1)
    counts = count_reference(column, 7).flatten()
    start = input.cpu() if include_self else input.cpu().masked_fill(counts > 0, 0)
    wide = start.to(compute_dtype(dtype)).reshape(1, -1, 1)
    sums = accumulate_reference(wide, column, src.cpu().reshape(1, -1, 1), False, SCATTER_ADD)
    expected = divide_reference(sums.flatten(), counts + int(include_self), dtype)
    got = scatter_reduce(input, 0, index, src, "mean", include_self=include_self)
    assert_bitwise_equal(got, expected)


@each_dtype
@each_reduce
@each_self
def test_permuted_contributions_keep_the_bits(device, dtype, reduce, include_self):
    src = torch.tensor(CANCELLING_300, device=device).to(dtype)
    index = random_index((300,), 3, device)
    input = src.new_ones(4)
    first = scatter_reduce(input, 0, index, src, reduce, include_self=include_self)
    for order in orders(300):
        order = order.to(device)
        again = scatter_reduce(
            input, 0, index[order], src[order], reduce, include_self=include_self
        )
        assert_bitwise_equal(again, first)


@each_dtype
def test_means_stay_inside_the_published_bound(device, dtype):
    src = random_floats((400,), dtype, device, 2)
    index = random_index((400,), 5, device)
    got = scatter_reduce(src.new_zeros(5), 0, index, src, "mean", include_self=False)
    for cell in range(5):
        values = src[index == cell]
        n, exact = values.numel(), sum(fractions_of(values))
        result = fractions_of(got[cell])[0]
        wide = torch.tensor(float(exact), dtype=compute_dtype(dtype))
        # n of the published bound counts the whole index.
        allowed = bound(src.to(compute_dtype(dtype)), wide, False) / n
        assert abs(result - Fraction(exact, n)) <= allowed + half_ulp(result, dtype)


def test_cells_that_nothing_reaches_keep_their_bits(device):
    input = torch.tensor([-0.0, torch.nan, 5.0], device=device)
    index, src = torch.tensor([2], device=device), torch.tensor([1.0], device=device)
    for reduce in ("sum", "mean"):
        for include_self in (True, False):
            got = scatter_reduce(input, 0, index, src, reduce, include_self=include_self)
            assert_bitwise_equal(got[:2], input[:2])
    nothing = scatter_reduce(input, 0, index[:0], src, "mean", include_self=False)
    assert_bitwise_equal(nothing, input)


def test_nonfinite_values_reach_their_cells_alone(device):
    src = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf, 3.0], device=device)
    index = torch.tensor([0, 1, 2, 3, 0], device=device)
    got = scatter_reduce(torch.zeros(4, device=device), 0, index, src, "mean", include_self=False)
    expected = torch.tensor([2.0, torch.inf, torch.nan, -torch.inf])
    assert_bitwise_equal(got, expected)


def test_a_half_mean_does_not_overflow_on_the_way(device):
    src = torch.full((3000,), 60000.0, dtype=torch.float16, device=device)
    index = torch.zeros(3000, dtype=torch.int64, device=device)
    got = scatter_reduce(src.new_zeros(1), 0, index, src, "mean", include_self=False)
    assert got.item() == 60000.0


@each_reduce
@each_self
def test_gradients(device, reduce, include_self):
    input, src = (random_floats(s, torch.float64, device, 0) for s in ((4, 3), (6, 3)))
    index = random_index((6, 2), 4, device)
    assert_gradients(
        lambda x, y: scatter_reduce(x, 0, index, y, reduce, include_self=include_self), input, src
    )


@each_reduce
def test_half_gradients_have_the_types_of_the_inputs(device, reduce):
    input, src = (torch.ones(n, dtype=torch.float16, device=device) for n in (2, 4))
    index = torch.tensor([0, 0, 0, 1], device=device)
    for x in (input, src):
        x.requires_grad_()
    out = scatter_reduce(input, 0, index, src, reduce)
    grads = torch.autograd.grad(out, (input, src), torch.tensor([4.0, 4.0], device=device).half())
    assert [g.dtype for g in grads] == [torch.float16] * 2
    assert grads[1].tolist() == ([4.0] * 4 if reduce == "sum" else [1.0, 1.0, 1.0, 2.0])


@each_reduce
def test_compiles_in_one_graph(device, reduce):
    input, src = (random_floats(s, torch.float32, device) for s in ((4, 3), (6, 3)))
    index = random_index((6, 1), 4, device).expand(6, 3)
    assert_compiles(lambda x, y: scatter_reduce(x, 0, index, y, reduce), input, src)
    assert_compiles(lambda y: scatter(y, index, 0, dim_size=5, reduce=reduce), src)


def plain_scatter(src, index, dim, size, reduce):
    """torch_scatter's definition in torch's words; `index` of src's shape."""
    shape = list(src.shape)
    shape[dim] = size
    sums = src.new_zeros(shape).scatter_add(dim, index, src)
    counts = src.new_zeros(shape).scatter_add(dim, index, torch.ones_like(src))
    return sums / counts.clamp(min=1) if reduce == "mean" else sums


@pytest.mark.parametrize("reduce", ["sum", "add", "mean"])
@pytest.mark.parametrize("more", [None, 0, 2])
@pytest.mark.parametrize("kind", ["vector", "negative dim", "matrix", "column", "first dim"])
def test_scatter_broadcasts_the_index_as_torch_scatter_does(device, reduce, more, kind):
    src = random_floats((4, 6, 3), torch.float64, device, 1)
    vector = random_index((6,), 5, device)
    matrix = random_index((4, 6), 5, device)
    index, dim, wide = {
        "vector": (vector, 1, vector[None, :, None]),
        "negative dim": (vector, -2, vector[None, :, None]),
        "matrix": (matrix, 1, matrix[:, :, None]),
        "column": (matrix[:, :1], 1, matrix[:, :1, None]),
        "first dim": (vector[:4], 0, vector[:4, None, None]),
    }[kind]
    wide = wide.expand(src.shape)
    size = int(wide.max()) + 1 + (more or 0)
    dim_size = None if more is None else size
    assert_same_as(
        lambda x: scatter(x, index, dim, dim_size=dim_size, reduce=reduce),
        lambda x: plain_scatter(x, wide, dim, size, reduce),
        src,
    )


def test_scatter_adds_to_a_given_output_and_counts_only_the_source(device):
    src = torch.tensor([2.0, 4.0, 6.0], device=device)
    index = torch.tensor([0, 0, 2], device=device)
    out = torch.ones(4, device=device)
    assert truncdet.scatter_sum(src, index, out=out) is out
    assert out.tolist() == [7.0, 1.0, 7.0, 1.0]
    out = torch.ones(4, device=device)
    assert truncdet.scatter_mean(src, index, out=out) is out
    assert out.tolist() == [3.5, 1.0, 7.0, 1.0]
    assert truncdet.scatter_sum(src[:0], index[:0]).shape == (0,)
    assert truncdet.scatter_sum(src[:0], index[:0], dim_size=3).tolist() == [0.0] * 3


@each_dtype
def test_scatter_sum_is_scatter_add(device, dtype):
    src = random_floats((50, 4), dtype, device)
    index = random_index((50,), 7, device)
    wide = index[:, None].expand(50, 4)
    expected = scatter_add(src.new_zeros(7, 4), 0, wide, src)
    assert_bitwise_equal(truncdet.scatter_sum(src, index, 0, dim_size=7), expected)


@pytest.mark.parametrize("name", ["scatter_reduce", "scatter"])
def test_index_out_of_range(device, name):
    src, index = torch.ones(3, device=device), torch.tensor([0, 5, 1], device=device)

    def call():
        if name == "scatter":
            return scatter(src, index, dim_size=2)
        return scatter_reduce(torch.zeros(2, device=device), 0, index, src, "mean")

    if device.type == "cpu":
        text = rf"^{name}: index must be in \[0, 2\), got 5 at position 1$"
        with pytest.raises(ValueError, match=text):
            call()
        return
    assert call().tolist() == ([1.0, 1.0] if name == "scatter" else [0.5, 0.5])
    with pytest.raises(TruncdetError, match=f"^{name}: an index was out of range"):
        _sticky.check()


def test_wrong_arguments_are_named():
    x, i = torch.ones(3), torch.tensor([0, 1, 0])
    for text, error, call in [
        (
            "scatter_reduce: reduce must be 'sum' or 'mean', got 'prod'",
            ValueError,
            lambda: scatter_reduce(x, 0, i, x, "prod"),
        ),
        (
            "scatter_reduce: src must have input's dtype, torch.float32",
            TypeError,
            lambda: scatter_reduce(x, 0, i, x.half(), "sum"),
        ),
        ("scatter_reduce: dim must be in", ValueError, lambda: scatter_reduce(x, 1, i, x, "sum")),
        (
            "scatter: reduce must be 'sum', 'add' or 'mean', got 'max'",
            ValueError,
            lambda: scatter(x, i, reduce="max"),
        ),
        (
            "scatter: src must have at least one dimension",
            ValueError,
            lambda: scatter(torch.tensor(1.0), i),
        ),
        (
            r"scatter: index must broadcast to src's shape, \[3\], got \[2\]",
            ValueError,
            lambda: scatter(x, i[:2]),
        ),
        ("scatter: dim must be in", ValueError, lambda: scatter(x, i, 1)),
        (
            "scatter: src must have input's dtype",
            TypeError,
            lambda: scatter(x, i, out=torch.zeros(2).double()),
        ),
    ]:
        with pytest.raises(error, match=f"^{text}"):
            call()
