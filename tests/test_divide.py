"""Quotients of sums and counts: one rounding in every type, and the kernel is the reference."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import FLOATS, fractions_of, from_words, nearest_word, sign_bit, words_of
from scatter_cases import each_dtype

from truncdet._divide import divide, divide_reference
from truncdet.fixedpoint import compute_dtype
from truncdet.testing import assert_bitwise_equal

COUNTS = [0, 1, 2, 3, 7, 10, 1000, 2**24 - 1, 2**24 + 1, 2**36]


def any_values(dtype, count=4000):
    """Words of every kind, subnormal numbers, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(0)
    bits = 8 * dtype.itemsize
    high = torch.randint(0, 1 << (bits // 2), (count,), generator=generator)
    low = torch.randint(0, 1 << (bits // 2), (count,), generator=generator)
    words = [(a << (bits // 2)) | b for a, b in zip(high.tolist(), low.tolist(), strict=True)]
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -3.0]
    return torch.cat([torch.tensor(special, dtype=dtype), from_words(words, dtype)])


def some_counts(count):
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(COUNTS)[torch.randint(0, len(COUNTS), (count,), generator=generator)]


@each_dtype
def test_kernel_is_the_reference(device, dtype):
    for values in (any_values(compute_dtype(dtype)), any_values(dtype)):
        for counts in (some_counts(values.numel()), None):
            there = None if counts is None else counts.to(device)
            for to in {dtype, compute_dtype(dtype)}:
                got = torch.ops.truncdet._divide(values.to(device), there, to)
                assert_bitwise_equal(got, divide_reference(values, counts, to))


@each_dtype
def test_one_count_serves_the_dimensions_that_follow(device, dtype):
    values = any_values(compute_dtype(dtype))[:3600].reshape(12, 30, 10).to(device)
    counts = some_counts(360).reshape(12, 30).to(device)
    wide = counts.unsqueeze(-1).expand(12, 30, 10)
    assert_bitwise_equal(divide(values, counts, dtype), divide(values, wide, dtype))
    whole = divide(values, counts[:, :1].expand(12, 30), dtype)
    assert_bitwise_equal(
        divide(values.transpose(0, 1), counts[:, 0].expand(30, 12), dtype),
        whole.transpose(0, 1).contiguous(),
    )


@each_dtype
@pytest.mark.parametrize("count", [2, 3, 1000, 2**24 + 1, 2**36])
def test_quotients_are_correctly_rounded(dtype, count):
    values = any_values(compute_dtype(dtype), 60)
    values = values[values.isfinite()]
    got = divide(values, torch.full((values.numel(),), count), dtype)
    for exact, word in zip(fractions_of(values), words_of(got), strict=True):
        expected = nearest_word(Fraction(exact, count), dtype)
        assert word & (sign_bit(dtype) - 1) == expected & (sign_bit(dtype) - 1)


def test_a_quotient_a_hair_above_a_tie_is_rounded_up(device):
    """m / n = (b + 1 / n) / 2^60 with b half way between two doubles: no tie, by 113 bits."""
    found = 0
    for b in range(2**53 + 1, 2**53 + 4001, 4):  # the lower neighbour of b is even
        n = -pow(b, -1, 2**60) % 2**60
        m = (b * n + 1) >> 60
        if n < 2**59 or m >= 2**53:
            continue
        value = torch.tensor([float(m)], dtype=torch.float64, device=device)
        got = divide(value, torch.tensor([n], device=device), torch.float64)
        assert fractions_of(got)[0] == Fraction(b + 1, 2**60)
        found += 1
    assert found > 10


def test_in_float_it_is_the_division_of_the_processor(device):
    values, counts = any_values(torch.float32), some_counts(4007) % 2**24
    finite = values.isfinite()
    got = divide(values.to(device), counts.to(device), torch.float32)
    assert_bitwise_equal(got[finite.to(device)], (values / counts.clamp(min=1))[finite])


def test_the_sum_of_a_half_mean_does_not_overflow(device):
    sums = torch.full((3,), 6e6, device=device)
    counts = torch.full((3,), 100, device=device)
    assert divide(sums, counts, torch.float16).tolist() == [60000.0] * 3


@each_dtype
def test_flushing_denormals_changes_nothing(dtype):
    values = from_words(list(range(1, 200)), compute_dtype(dtype))
    counts = torch.arange(1, 200) % 7
    before = divide(values, counts, dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = divide(values, counts, dtype)
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)


def test_gradients_and_operator_checks(device):
    values = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    counts = torch.tensor([0, 1, 2, 3], device=device)
    op = torch.ops.truncdet._divide
    call = lambda x: op(x, counts, torch.float64)  # noqa: E731
    assert torch.autograd.gradcheck(call, (values,), nondet_tol=0)
    assert torch.autograd.gradgradcheck(call, (values,), nondet_tol=0)
    torch.library.opcheck(op.default, (values, counts, torch.float64))
    for dtype in FLOATS[1:]:
        x = torch.randn(3, device=device).requires_grad_()
        torch.library.opcheck(op.default, (x, None, dtype))
        (grad,) = torch.autograd.grad(op(x, None, dtype), x, torch.ones(3, device=device).to(dtype))
        assert grad.dtype == torch.float32


def test_empty(device):
    x = torch.zeros(0, 3, device=device)
    counts = torch.zeros(0, dtype=torch.int64, device=device)
    assert divide(x, counts, torch.float16).shape == (0, 3)
