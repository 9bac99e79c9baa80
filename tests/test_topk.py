"""topk: torch's values, and of equal elements those with the lower index."""

import pytest
import torch
from exact_arithmetic import FLOATS
from scatter_cases import each_dtype, random_floats
from scatter_group import assert_compiles, assert_gradients

import truncdet
from truncdet import topk
from truncdet.testing import assert_bitwise_equal

op = torch.ops.truncdet.topk.default
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
each_type = pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=lambda d: str(d).split(".")[1])
each_largest = pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])


def tied(shape, dtype, device, seed=0):
    """Few different numbers, zeros of both signs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=generator).to(torch.float64)
    if not dtype.is_floating_point:
        return x.abs().to(dtype).to(device)
    x = torch.where(torch.rand(shape, generator=generator) < 0.5, x, -x)
    x = torch.where(x == 3, torch.inf, torch.where(x == -3, -torch.inf, x))
    return x.to(dtype).to(device)


def stated(input, k, dim, largest):
    """The definition: a stable sort by comparisons, one slice at a time."""
    rows = input.cpu().movedim(dim, -1)
    indices = []
    for row in rows.reshape(-1, rows.size(-1)).double().tolist():
        # NaN differs from itself; it is larger than all, and no two are different.
        def key(i, row=row):
            size = (1, 0.0) if row[i] != row[i] else (0, row[i])
            return size if not largest else (-size[0], -size[1])

        indices.append(sorted(range(len(row)), key=key)[:k])
    picked = torch.tensor(indices, dtype=torch.int64).reshape(*rows.shape[:-1], k).movedim(-1, dim)
    picked = picked.to(input.device)
    return input.gather(dim, picked), picked


@each_type
@each_largest
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_of_equal_elements_the_lower_index_is_taken(device, dtype, largest, dim):
    input = tied((4, 50, 7), dtype, device)
    size = input.size(dim)
    for k in {0, 1, size // 2, size}:
        assert_bitwise_equal(topk(input, k, dim, largest), stated(input, k, dim, largest))


@each_dtype
@each_largest
def test_nan_is_larger_than_every_number(device, dtype, largest):
    """Of both signs and with any payload; the bits of what is taken stay."""
    input = tied((3, 40), dtype, device)
    words = input.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    words[:, 5], words[:, 30] = -1, torch.iinfo(words.dtype).max
    input[:, 17] = torch.nan
    assert input[:, [5, 17, 30]].isnan().all()
    assert_bitwise_equal(topk(input, 6, 1, largest), stated(input, 6, 1, largest))
    assert_bitwise_equal(topk(input, 40, 1, largest), stated(input, 40, 1, largest))


@each_dtype
@each_largest
def test_values_are_torchs(device, dtype, largest):
    input = random_floats((3, 1000), dtype, device, 4)
    for k in (1, 10, 999):
        values, indices = topk(input, k, largest=largest)
        assert_bitwise_equal(values, torch.topk(input, k, largest=largest).values)
        assert_bitwise_equal(values, input.gather(1, indices))


def test_a_large_slice(device):
    input = random_floats((2, 100_000), torch.float32, device, 1).round()
    for k in (2000, 90_000):
        order = torch.sort(input.cpu(), dim=1, descending=True, stable=True)
        expected = [x[:, :k] for x in order]
        assert_bitwise_equal(topk(input, k), tuple(expected))


def test_scalars_and_empty_tensors(device):
    scalar = torch.tensor(3.0, device=device)
    assert [x.tolist() for x in topk(scalar, 1, 0)] == [3.0, 0]
    assert [x.shape for x in topk(scalar, 0)] == [(0,), (0,)]
    for shape, dim, k in (((0, 5), 1, 2), ((0, 5), 0, 0), ((3, 0), 1, 0)):
        pair = topk(torch.zeros(shape, device=device), k, dim)
        expected = torch.topk(torch.zeros(shape, device=device), k, dim)
        assert [x.shape for x in pair] == [x.shape for x in expected]


@each_dtype
def test_layouts_change_nothing(device, dtype):
    input = tied((4, 5, 6, 7), dtype, device)
    expected = topk(input, 3, 1)
    for other in (
        input.contiguous(memory_format=torch.channels_last),
        input.transpose(0, 3).contiguous().transpose(0, 3),
        torch.stack([input] * 2, -1)[..., 0],
    ):
        assert not other.is_contiguous()
        assert_bitwise_equal(topk(other, 3, 1), expected)


@each_dtype
def test_the_gradient_goes_where_elements_were_taken(device, dtype):
    input = tied((3, 20), dtype, device).requires_grad_()
    values, indices = topk(input, 5)
    assert not indices.requires_grad
    grad = random_floats((3, 5), dtype, device)
    grad[0, 0] = -0.0
    expected = torch.zeros_like(input).scatter(1, indices, grad)
    assert_bitwise_equal(torch.autograd.grad(values, input, grad)[0], expected)


def test_gradients(device):
    input = random_floats((3, 9), torch.float64, device, 0)
    for dim, largest in ((0, True), (1, False)):
        assert_gradients(lambda x, d=dim, up=largest: topk(x, 2, d, up)[0], input)


def test_operator_checks(device):
    for dtype in (torch.float32, torch.float64):
        input = tied((3, 20), dtype, device).requires_grad_()
        torch.library.opcheck(op, (input, 4, 1, True))
        torch.library.opcheck(op, (input, 2, -2, False))


def test_compiles_in_one_graph(device):
    input = random_floats((3, 20), torch.float32, device, 1)
    assert_compiles(lambda x: topk(x, 4)[0] * 2, input)


@pytest.mark.cuda
@each_type
def test_cuda_takes_what_the_cpu_takes(dtype):
    input = tied((3, 5000), dtype, "cpu")
    for largest in (True, False):
        there = topk(input.cuda(), 300, 1, largest)
        assert_bitwise_equal([x.cpu() for x in there], list(topk(input, 300, 1, largest)))


def test_wrong_arguments_are_named():
    x = torch.zeros(3, 4)
    for text, error, args in [
        ("input must be a Tensor, got list", TypeError, ([1], 1)),
        ("input must be float64, .* or of integers, got torch.bool", TypeError, (x.bool(), 1)),
        (r"dim must be in \[-2, 1\], got 2", ValueError, (x, 1, 2)),
        (r"k must be in \[0, 4\], got 5", ValueError, (x, 5)),
        (r"k must be in \[0, 3\], got -1", ValueError, (x, -1, 0)),
        (r"k must be in \[0, 1\], got 2", ValueError, (x[0, 0], 2)),
    ]:
        with pytest.raises(error, match="^topk: " + text):
            topk(*args)


def test_is_public():
    assert truncdet.topk is topk
