"""scatter_add and index_add: kernels are the reference, and no order changes a bit."""

import pytest
import torch
from exact_arithmetic import fractions_of, from_words, infinity, sign_bit, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scatter_cases import (
    CANCELLING,
    bound,
    each_dtype,
    each_exact,
    each_path,
    one_cell,
    random_floats,
    random_index,
)

from truncdet import index_add, scatter_add
from truncdet._scatter import SCATTER_ADD, accumulate_reference
from truncdet._scatter_shapes import expand_index
from truncdet.testing import assert_bitwise_equal


def reference_along(input, dim, index, src, exact):
    """The reference on tensors whose index is as large as src: dim first, the rest in one."""
    moved = [x.movedim(dim, 0).flatten(1).unsqueeze(0) for x in (input, index, src)]
    out = accumulate_reference(*moved, exact, SCATTER_ADD)
    return out.reshape(input.movedim(dim, 0).shape).movedim(0, dim)


@each_dtype
@each_exact
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("count", [1, 2, 33, 1025])
def test_scatter_add_is_the_reference(device, dtype, exact, dim, count):
    shape, many = [3, 5, 2], [3, 5, 2]
    many[dim] = count
    input, src = (random_floats(s, dtype, device, seed=i) for i, s in enumerate((shape, many)))
    index = random_index(many, shape[dim], device)
    expected = reference_along(input, dim, index, src, exact)
    assert_bitwise_equal(scatter_add(input, dim, index, src, exact=exact), expected)


@each_dtype
@each_exact
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_add_is_the_reference(device, dtype, exact, dim):
    shape, many = [3, 5, 2], [3, 5, 2]
    many[dim] = 301
    input, source = (random_floats(s, dtype, device, seed=i) for i, s in enumerate((shape, many)))
    index = random_index([301], shape[dim], device)
    wide = expand_index(index, dim, source.shape)
    expected = reference_along(input, dim, wide, source, exact)
    assert_bitwise_equal(index_add(input, dim, index, source, exact=exact), expected)
    narrow = index.to(torch.int32)
    assert_bitwise_equal(index_add(input, dim, narrow, source, exact=exact), expected)


@each_path
@each_dtype
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_kernel_is_the_reference_for_any_words(accumulate, dtype, data):
    """The C++ header against the Python statement: any words, near-cancellation with `input`."""
    anything = st.integers(0, 2 * sign_bit(dtype) - 1)
    finite = st.tuples(st.integers(0, infinity(dtype) - 1), st.sampled_from([0, sign_bit(dtype)]))
    middle = infinity(dtype) >> 1
    near = st.integers(middle - 40, middle + 40).flatmap(
        lambda word: st.sampled_from([word, word | sign_bit(dtype)])
    )
    kind = data.draw(st.sampled_from([anything, finite.map(sum), near]))
    src = from_words(data.draw(st.lists(kind, min_size=1, max_size=9)), dtype)
    exact = data.draw(st.booleans())
    total = one_cell(accumulate_reference, src, exact=exact)
    moved = (words_of(-total)[0] + data.draw(st.integers(-2, 2))) % (2 * sign_bit(dtype))
    existing = from_words([data.draw(st.one_of(st.just(moved), kind))], dtype)
    assert_bitwise_equal(
        one_cell(accumulate, src, existing=existing, exact=exact),
        one_cell(accumulate_reference, src, existing=existing, exact=exact),
    )


def test_large_sums_are_the_reference(device):
    values = random_floats((200_003,), torch.float32, device)
    index = random_index((200_003,), 7, device)
    input = random_floats((7,), torch.float32, device, seed=5)
    views = (x.reshape(1, -1, 1) for x in (input, index, values))
    expected = accumulate_reference(*views, False, SCATTER_ADD).flatten()
    assert_bitwise_equal(scatter_add(input, 0, index, values), expected)
    assert_bitwise_equal(index_add(input, 0, index, values), expected)


@each_exact
def test_thousand_permutations_of_a_cancelling_sum_keep_the_bits(device, exact):
    values = torch.tensor(CANCELLING * 50, device=device)
    first = one_cell(torch.ops.truncdet._accumulate, values, exact=exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        order = torch.randperm(values.numel(), generator=generator).to(device)
        again = one_cell(torch.ops.truncdet._accumulate, values[order], exact=exact)
        assert_bitwise_equal(again, first)
    error = abs(fractions_of(first)[0] - sum(fractions_of(values)))
    assert error <= bound(values, first, exact)


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.float64])
def test_permutations_change_the_bits_of_plain_sums(device, sum_dtype):
    """The negative control: in double, too, rounded to float32 as an accumulator would be."""
    values = torch.tensor(CANCELLING * 50, device=device)
    index = torch.zeros(values.numel(), dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(30):
        order = torch.randperm(values.numel(), generator=generator).to(device)
        cell = torch.zeros(1, dtype=sum_dtype, device=device)
        seen.update(
            words_of(torch.scatter_add(cell, 0, index, values[order].to(sum_dtype)).float())
        )
    assert len(seen) > 1


@each_dtype
@each_exact
def test_permuted_contributions_keep_the_bits(device, dtype, exact):
    input = random_floats((5, 3), dtype, device)
    src = random_floats((400, 3), dtype, device, seed=1)
    index = random_index((400,), 5, device)
    first = index_add(input, 0, index, src, exact=exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = torch.randperm(400, generator=generator).to(device)
        again = index_add(input, 0, index[order], src[order], exact=exact)
        assert_bitwise_equal(again, first)


def test_number_of_threads_does_not_matter():
    input, src = (random_floats(s, torch.float32, "cpu") for s in ((9, 40, 50), (9, 900, 50)))
    index = random_index((900,), 40, "cpu")
    first = index_add(input, 1, index, src)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert_bitwise_equal(index_add(input, 1, index, src), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cuda
@each_dtype
@each_exact
def test_cuda_gives_the_bits_of_the_cpu(dtype, exact):
    for dim, count in ((0, 70_001), (1, 513)):
        shape, many = [40, 30], [40, 30]
        many[dim] = count
        input, src = (random_floats(s, dtype, "cpu", seed=i) for i, s in enumerate((shape, many)))
        index = random_index(many, shape[dim], "cpu")
        there = scatter_add(
            *(x if isinstance(x, int) else x.cuda() for x in (input, dim, index, src)), exact=exact
        )
        assert_bitwise_equal(there.cpu(), scatter_add(input, dim, index, src, exact=exact))


@each_dtype
@each_exact
def test_nan_and_infinity_reach_only_their_cells(device, dtype, exact):
    inf, nan = torch.inf, torch.nan
    src = torch.tensor([1.0, nan, inf, inf, -inf, -inf, inf, 3.0, inf], dtype=dtype, device=device)
    index = torch.tensor([0, 1, 2, 3, 3, 4, 4, 5, 6], device=device)
    src[5:7] = -inf  # twice the same infinity
    input = torch.tensor([0.5, 1, 1, 1, 1, 0.25, -inf, nan, inf], dtype=dtype, device=device)
    got = scatter_add(input, 0, index, src, exact=exact)
    expected = torch.tensor([1.5, nan, inf, nan, -inf, 3.25, nan, nan, inf], dtype=dtype)
    assert_bitwise_equal(got, expected)


@each_dtype
def test_cells_with_a_zero_sum_keep_their_bits(device, dtype):
    inf, sign = infinity(dtype), sign_bit(dtype)
    words = [sign, 1, sign | (inf + 5), inf, 0, sign, inf + 1]
    input = from_words(words, dtype, device)
    index = torch.tensor([0, 0, 2, 3, 4, 4], device=device)
    src = torch.tensor([1.0, -1.0, 0.0, -0.0, -2.0, 2.0], dtype=dtype, device=device)
    for exact in (False, True):
        assert words_of(scatter_add(input, 0, index, src, exact=exact)) == words
        assert words_of(scatter_add(input, 0, index, torch.zeros_like(src), exact=exact)) == words


def test_grad_scaler_sees_an_overflow(device):
    source = torch.ones(3, device=device, requires_grad=True)
    index = torch.zeros(3, dtype=torch.int64, device=device)
    total = index_add(torch.zeros(1, device=device), 0, index, source)
    (total * torch.inf).sum().backward()
    assert not source.grad.isfinite().any()
