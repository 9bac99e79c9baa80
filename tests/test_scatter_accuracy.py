"""scatter_add and index_add against exact sums: bound, range, subnormals."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import (
    LAYOUT,
    fractions_of,
    from_words,
    half_ulp,
    infinity,
    nearest_word,
    sign_bit,
    words_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scatter_cases import bound, each_dtype, each_exact, each_path, one_cell

from truncdet.testing import assert_bitwise_equal


@each_path
@each_dtype
@each_exact
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_errors_stay_inside_the_published_bound(accumulate, dtype, exact, data):
    # Exponents far from overflow, since an infinite result has no error to speak of.
    stored, largest, _ = LAYOUT[dtype]
    word = st.integers(0, ((2 * largest - 6) << stored) - 1)
    signed = st.tuples(word, st.sampled_from([0, sign_bit(dtype)])).map(sum)
    src = from_words(data.draw(st.lists(signed, min_size=1, max_size=20)), dtype)
    existing = from_words([data.draw(signed)], dtype)
    result = one_cell(accumulate, src, existing=existing, exact=exact)
    exactly = sum(fractions_of(src)) + fractions_of(existing)[0]
    assert abs(fractions_of(result)[0] - exactly) <= bound(src, result, exact)


@each_path
@each_dtype
@pytest.mark.parametrize("above", [0, 1], ids=["power_of_two", "next_above"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 64, 65])
def test_full_head_room_does_not_overflow(accumulate, dtype, above, count):
    """amax at and beside a power of two, every contribution as large as it can be."""
    largest = from_words([nearest_word(Fraction(8), dtype) + above - 1], dtype)
    values = largest.expand(count).contiguous()
    expected = nearest_word(count * fractions_of(largest)[0], dtype)
    assert words_of(one_cell(accumulate, values)) == [expected]
    assert words_of(one_cell(accumulate, -values)) == [expected | sign_bit(dtype)]


@each_path
def test_exact_keeps_what_one_limb_loses(accumulate):
    values = torch.tensor([2.0**100, 2.0**-10, -(2.0**100), 2.0**-10])
    assert one_cell(accumulate, values).item() == 0.0
    assert one_cell(accumulate, values, exact=True).item() == 2.0**-9


@each_path
@each_exact
@each_dtype
def test_smallest_and_largest_numbers(accumulate, exact, dtype):
    smallest = from_words([1], dtype)
    largest = from_words([infinity(dtype) - 1], dtype)
    assert words_of(one_cell(accumulate, smallest.expand(5), exact=exact)) == [5]
    assert words_of(one_cell(accumulate, -smallest, existing=-smallest)) == [sign_bit(dtype) | 2]
    assert words_of(one_cell(accumulate, largest.expand(2), exact=exact)) == [infinity(dtype)]
    # Partial sums beyond the largest number do no harm: only the total counts.
    back = torch.cat([largest, largest, largest, -largest, -largest])
    assert words_of(one_cell(accumulate, back, exact=exact)) == [infinity(dtype) - 1]
    total = one_cell(accumulate, torch.cat([largest, largest]), existing=-largest, exact=exact)
    assert words_of(total) == [infinity(dtype) - 1]


@each_path
@each_dtype
@each_exact
def test_the_smallest_number_decides_a_tie(accumulate, dtype, exact):
    """However far below the sum `input` lies, it takes part in the one rounding."""
    one = nearest_word(Fraction(1), dtype)
    half_step = half_ulp(Fraction(1), dtype)
    tie = from_words([one, nearest_word(half_step, dtype)], dtype)
    smallest = from_words([1], dtype)
    for existing, expected in ((smallest, one + 1), (smallest * 0, one), (-smallest, one)):
        assert words_of(one_cell(accumulate, tie, existing=existing, exact=exact)) == [expected]
        negated = one_cell(accumulate, -tie, existing=-existing, exact=exact)
        assert words_of(negated) == [expected | sign_bit(dtype)]


@each_path
@pytest.mark.parametrize("magnitude", [1e-38, 1e-42, 1e38])
def test_tiny_and_huge_gradients(accumulate, magnitude):
    values = torch.tensor([magnitude, magnitude, -magnitude, magnitude])
    expected = nearest_word(sum(fractions_of(values)), torch.float32)
    assert words_of(one_cell(accumulate, values)) == [expected]


@each_path
@each_dtype
@each_exact
def test_flushing_denormals_changes_nothing(accumulate, dtype, exact):
    sign = sign_bit(dtype)
    src = from_words([1, 3, sign | 2, 1, *range(40)], dtype)
    mixed = torch.cat([src, from_words([infinity(dtype) // 3], dtype)])
    existing = from_words([sign | 7], dtype)
    cases = [(values, at) for values in (src, mixed) for at in (existing, -existing)]
    before = [one_cell(accumulate, v, existing=at, exact=exact) for v, at in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [one_cell(accumulate, v, existing=at, exact=exact) for v, at in cases]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    total = (sum(range(40)) + 3 - 7) * fractions_of(from_words([1], dtype))[0]
    assert words_of(before[0]) == [nearest_word(total, dtype)]
