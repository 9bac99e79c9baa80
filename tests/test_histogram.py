"""bincount and histc: torch's bins, sums without an order, counts of integers."""

import pytest
import torch
from scatter_cases import random_floats, random_index
from scatter_group import CANCELLING_300, orders

from truncdet import bincount, histc, index_add
from truncdet._count import count_reference
from truncdet.testing import assert_bitwise_equal


@pytest.mark.parametrize("minlength", [0, 20])
@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_bincount_is_torchs(device, minlength, count, kind):
    index = random_index((count,), 9, "cpu").to(kind)
    doubles = random_floats((count,), torch.float64, "cpu", 1)
    for weights in (None, doubles, doubles.float(), doubles.half(), doubles.long()):
        there = None if weights is None else weights.to(device)
        got = bincount(index.to(device), there, minlength)
        expected = torch.bincount(index, weights, minlength)
        torch.testing.assert_close(got.cpu(), expected)
        assert got.dtype == expected.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_no_order(device, dtype):
    weights = torch.tensor(CANCELLING_300, dtype=dtype, device=device)
    index = random_index((300,), 3, device)
    first = bincount(index, weights)
    assert_bitwise_equal(first, index_add(weights.new_zeros(3), 0, index, weights))
    for order in orders(300):
        order = order.to(device)
        assert_bitwise_equal(bincount(index[order], weights[order]), first)


@pytest.mark.parametrize("cells", [1, 7, 5000])
@pytest.mark.parametrize("shape", [(1, 9000, 1), (3, 301, 4), (2, 0, 3)], ids=str)
def test_counts_are_the_reference(device, cells, shape):
    index = random_index(shape, cells + 2, "cpu") - 1
    expected = count_reference(index, cells)
    assert_bitwise_equal(torch.ops.truncdet._count(index.to(device), cells), expected)
    wide = index.transpose(0, 2).contiguous().transpose(0, 2)
    assert_bitwise_equal(torch.ops.truncdet._count(wide.to(device), cells), expected)
    torch.library.opcheck(torch.ops.truncdet._count.default, (index.to(device), cells))


LIMITS = [(100, -1, 1), (7, -0.3, 2.7), (1, 0, 1), (13, -3, -1), (33, 0, 0), (5, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_histc_is_torchs_on_the_cpu_to_the_last_count(device, dtype, limits):
    x = random_floats((40, 50), dtype, "cpu", 1)
    edges = torch.arange(-1000, 1001, dtype=dtype) / 333
    for values in (x, edges, x[:0], torch.ones(5, dtype=dtype)):
        assert_bitwise_equal(histc(values.to(device), *limits), torch.histc(values, *limits))
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    if limits[1] != limits[2]:
        assert_bitwise_equal(histc(x.to(device), *limits), torch.histc(x, *limits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_histc_of_half_types_has_the_bins_of_float(device, dtype):
    x = random_floats((3000,), dtype, device, 1)
    expected = histc(x.float(), 20, -2, 2).to(dtype)
    assert_bitwise_equal(histc(x, 20, -2, 2), expected)


def test_compiles_in_one_graph(device):
    x = random_floats((300,), torch.float32, device, 1)
    compiled = torch.compile(lambda v: histc(v, 9, -1, 1), fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(compiled(x), histc(x, 9, -1, 1))
    torch.library.opcheck(torch.ops.truncdet.histc.default, (x, 9, -1.0, 1.0))


def test_wrong_arguments_are_named(device):
    i, x = torch.tensor([0, 1], device=device), torch.ones(2, device=device)
    for text, error, call in [
        ("bincount: input must be of integers, got torch.float32", TypeError, lambda: bincount(x)),
        (
            "bincount: input must be a vector, got 2 dimensions",
            ValueError,
            lambda: bincount(i[None]),
        ),
        (
            "bincount: minlength must not be negative, got -1",
            ValueError,
            lambda: bincount(i, minlength=-1),
        ),
        (
            r"bincount: weights must have input's shape, \[2\], got \[1\]",
            ValueError,
            lambda: bincount(i, x[:1]),
        ),
        ("bincount: input must not be negative, got -1", ValueError, lambda: bincount(i - 1)),
        ("histc: input must be float64, .*, got torch.int64", TypeError, lambda: histc(i)),
        ("histc: bins must be positive, got 0", ValueError, lambda: histc(x, 0)),
        (
            "histc: min and max must be finite, got 0.0 and inf",
            ValueError,
            lambda: histc(x, 3, 0, torch.inf),
        ),
        (
            "histc: min and max must be finite, got nan and nan",
            ValueError,
            lambda: histc(x * torch.nan, 3),
        ),
        ("histc: max must be at least min, got 0.0 and 1.0", ValueError, lambda: histc(x, 3, 1, 0)),
    ]:
        with pytest.raises(error, match=f"^{text}"):
            call()
