"""truncdet.fixedpoint, function by function, against exact integers and fractions."""

import math
from fractions import Fraction

import pytest
import torch
from exact_arithmetic import (
    FLOATS,
    fractions_of,
    from_words,
    infinity,
    nearest_word,
    of_word,
    sign_bit,
    words_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from truncdet import fixedpoint as fp

COMPUTED = [torch.float64, torch.float32]
TWO = Fraction(2)


def words(dtype, *, nonfinite=False):
    """Magnitude words: every exponent is as likely as any other, and so are the edges."""
    top = (1 << 8 * dtype.itemsize - 1) - 1 if nonfinite else infinity(dtype) - 1
    size = st.integers(0, top.bit_length()).map(lambda bits: min(top, (1 << bits) - 1))
    edges = st.sampled_from([0, 1, infinity(dtype) >> 1, infinity(dtype) - 1])
    return st.one_of(st.integers(0, top), size.flatmap(lambda most: st.integers(0, most)), edges)


def signed_words(dtype, **options):
    return st.tuples(words(dtype, **options), st.sampled_from([0, sign_bit(dtype)])).map(sum)


def sums():
    """int64 values of every size."""
    return st.integers(0, 62).flatmap(lambda bits: st.integers(-(1 << bits), 1 << bits))


def each(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).split(".")[1])


@pytest.fixture(params=[False, True], ids=["", "flush_denormal"], autouse=True)
def denormal_mode(request):
    """Every test below also runs with subnormals flushed to zero: no function may notice."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def scalar(value):
    return torch.tensor(value, dtype=torch.int64)


def test_headroom_is_the_least_power_of_two_that_holds_the_count():
    assert fp.headroom(0) == fp.headroom(1) == 0
    for count in (*range(2, 70), (1 << 40) - 1, 1 << 40, (1 << 40) + 1, 1 << 60):
        assert 1 << (fp.headroom(count) - 1) < count <= 1 << fp.headroom(count)


@pytest.mark.parametrize("count", [-1, (1 << 60) + 1])
def test_headroom_refuses_counts_without_room_for_the_sum(count):
    with pytest.raises(
        ValueError, match=rf"headroom: count must be in \[0, 2\*\*60\], got {count}"
    ):
        fp.headroom(count)


def test_contributions_are_computed_in_float64_for_float64_only():
    assert [fp.compute_dtype(dtype) for dtype in FLOATS] == [torch.float64] + [torch.float32] * 3


@each(FLOATS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_magnitudes_and_exponents(dtype, data):
    magnitude = data.draw(words(dtype))
    x = from_words([magnitude, magnitude | sign_bit(dtype)], dtype)
    assert fp.magnitude(x).tolist() == [magnitude, magnitude]
    e = int(fp.exponent_above(scalar(magnitude), dtype))
    value = of_word(magnitude, dtype)
    assert e == 0 if value == 0 else TWO ** (e - 1) <= value < TWO**e


@each(FLOATS)
def test_amax_word_looks_at_finite_values_only(dtype):
    inf, sign = infinity(dtype), sign_bit(dtype)
    x = from_words([3, sign | 7, inf, inf | sign, inf + 1, sign | (inf + 1), 0], dtype)
    assert int(fp.amax_word(x)) == 7
    assert int(fp.amax_word(x[2:6])) == 0
    assert int(fp.amax_word(x[:0])) == 0
    assert int(fp.amax_word(from_words([inf - 1, inf], dtype))) == inf - 1


@each(COMPUTED)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_scale_exponent_is_exact_and_drops_what_is_not_normal(dtype, data):
    x = from_words([data.draw(signed_words(dtype, nonfinite=True))], dtype)
    fmt = fp.FORMATS[dtype]
    # Scales bring values below one: larger results are never asked for.
    e = int(fp.exponent_above(fp.amax_word(x), dtype))
    shift = data.draw(st.integers(-2 * fmt.max_exponent, fmt.max_exponent)) - e
    (got,) = fractions_of(fp.scale_exponent(x, scalar(shift)))
    exact = fractions_of(x)[0] * TWO**shift if x.isfinite().all() else 0
    assert got == (exact if abs(exact) >= TWO**fmt.min_exponent else 0)


def test_scale_exponent_gives_plus_zero_for_what_it_drops():
    x = torch.tensor([-1.0, -0.0, math.inf, -math.inf, math.nan])
    assert words_of(fp.scale_exponent(x, scalar(-127))) == [0] * 5


@each(COMPUTED)
def test_power_of_two(dtype):
    fmt = fp.FORMATS[dtype]
    exponents = torch.arange(fmt.min_exponent, fmt.max_exponent + 1)
    got = fractions_of(fp.power_of_two(exponents, dtype))
    assert got == [TWO**e for e in exponents.tolist()]


@each(COMPUTED)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_quantise_rounds_to_nearest_even_and_the_rest_is_kept(dtype, data):
    fmt = fp.FORMATS[dtype]
    below_one = (fmt.max_exponent << fmt.fraction_bits) - 1
    normal = st.one_of(
        st.integers(1 << fmt.fraction_bits, below_one),
        st.integers((fmt.max_exponent - 70) << fmt.fraction_bits, below_one),
        # Few significant bits: ties.
        st.integers(1, 70).map(lambda k: (fmt.max_exponent - k) << fmt.fraction_bits),
        st.integers(1, 70).map(
            lambda k: ((2 * (fmt.max_exponent - k) + 1) << fmt.fraction_bits) // 2
        ),
        st.just(0),
    )
    magnitude = data.draw(normal)
    x = from_words([magnitude | data.draw(st.sampled_from([0, sign_bit(dtype)]))], dtype)
    g = data.draw(st.integers(0, fp.MAX_HEADROOM))
    unit = TWO ** (fp.SUM_BITS - g)
    (exact,) = fractions_of(x)
    high = fp.quantise(x, scalar(g))
    assert int(high) == round(exact * unit)  # Fraction rounds ties to even, too
    rest = fp.quantise_rest(x, high, scalar(g))
    assert int(rest) == round((exact * unit - int(high)) * unit)


@each(FLOATS)
def test_nonfinite_flags(dtype):
    inf, sign = infinity(dtype), sign_bit(dtype)
    x = from_words([0, sign, inf - 1, inf, inf | sign, inf + 1, sign | (inf + 1)], dtype)
    assert fp.nonfinite_flags(x).tolist() == [0, 0, 0, fp.PLUS_INF, fp.MINUS_INF, fp.NAN, fp.NAN]


def finish_word(dtype, high, low, e, g, existing, flags=None):
    result = fp.finish(
        scalar([high]),
        None if low is None else scalar([low]),
        scalar(e),
        scalar(g),
        dtype,
        existing=from_words([existing], dtype),
        flags=None if flags is None else scalar([flags]),
    )
    assert result.dtype == dtype
    return words_of(result)[0]


def exact_sum(high, low, e, g):
    quantum = e + g - fp.SUM_BITS
    return high * TWO**quantum + (low or 0) * TWO ** (quantum + g - fp.SUM_BITS)


def exponents(dtype):
    kind = fp.FORMATS[fp.compute_dtype(dtype)]
    lowest = kind.min_exponent - kind.fraction_bits + 1
    return st.integers(lowest, kind.max_exponent + 1)


@each(FLOATS)
@pytest.mark.parametrize("two_limbs", [False, True], ids=["one_limb", "two_limbs"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_finish_rounds_once(dtype, two_limbs, data):
    e, g = data.draw(exponents(dtype)), data.draw(st.integers(0, fp.MAX_HEADROOM))
    high, low = data.draw(sums()), data.draw(sums()) if two_limbs else None
    total = exact_sum(high, low, e, g)
    existing = data.draw(signed_words(dtype))
    if data.draw(st.booleans()):
        # Near-cancellation: the sum and what is there differ by a few units, or by none.
        near = nearest_word(-total, dtype) + data.draw(st.integers(-2, 2))
        if 0 <= near % sign_bit(dtype) < infinity(dtype) and 0 <= near < 2 * sign_bit(dtype):
            existing = near
    if total == 0:
        assert finish_word(dtype, high, low, e, g, existing) == existing
        return
    here = fractions_of(from_words([existing], dtype))[0]
    assert finish_word(dtype, high, low, e, g, existing) == nearest_word(here + total, dtype)


@each(FLOATS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_finish_meets_ties_and_their_neighbours(dtype, data):
    """Sums half-way between two results, subnormal ones included, and one unit beside."""
    magnitude = data.draw(words(dtype))
    tie = (of_word(magnitude, dtype) + of_word(magnitude + 1, dtype)) / 2
    # The unit of the sums lies 1 to 8 places below the last bit of the tie.
    spare = data.draw(st.integers(1, 8))
    last = tie.denominator.bit_length() - 1 if tie.denominator > 1 else 0
    last = last or -((tie.numerator & -tie.numerator).bit_length() - 1)
    quantum = -last - spare
    kind = fp.FORMATS[fp.compute_dtype(dtype)]
    g = data.draw(st.integers(0, fp.MAX_HEADROOM))
    e = quantum - g + fp.SUM_BITS
    if not kind.min_exponent - kind.fraction_bits < e <= kind.max_exponent + 1:
        e, g = e + g, 0
    high = int(tie / TWO**quantum) + data.draw(st.integers(-1, 1))
    assert abs(high) < 1 << fp.SUM_BITS
    expected = nearest_word(high * TWO**quantum, dtype)
    assert finish_word(dtype, high, None, e, g, 0) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_rounding_through_float32_would_be_wrong(dtype):
    """Just above a tie of the half type: float32 forgets the excess and the tie goes to even."""
    precision = fp.FORMATS[dtype].precision
    tie = (1 << 61) + (1 << (61 - precision))
    e, g = 1, 0  # in units of 2^-61
    once = from_words([finish_word(dtype, tie + 1, None, e, g, 0)], dtype)
    twice = from_words([finish_word(torch.float32, tie + 1, None, e, g, 0)], torch.float32)
    assert once.item() == 1 + 2.0 ** (1 - precision)
    assert twice.to(dtype).item() == 1.0


@each(FLOATS)
def test_a_zero_sum_keeps_the_bits_of_what_is_there(dtype):
    inf, sign = infinity(dtype), sign_bit(dtype)
    for word in (0, sign, 1, sign | 1, inf - 1, inf, inf | sign, inf + 3, sign | (inf + 5)):
        assert finish_word(dtype, 0, None, 0, 0, word) == word
        assert finish_word(dtype, 0, 0, 0, 0, word) == word
        assert finish_word(dtype, 0, None, 0, 0, word, flags=0) == word
    # One unit of the first limb is undone by the second.
    assert finish_word(dtype, 1, -(1 << fp.SUM_BITS), 0, 0, sign) == sign


@each(FLOATS)
def test_finish_combines_what_is_not_finite(dtype):
    inf, sign = infinity(dtype), sign_bit(dtype)
    nan = infinity(dtype) + (1 << (fp.FORMATS[dtype].fraction_bits - 1))
    one = nearest_word(Fraction(1), dtype)
    for flags, existing, expected in [
        (fp.NAN, one, nan),
        (fp.PLUS_INF, one, inf),
        (fp.MINUS_INF, one, inf | sign),
        (fp.PLUS_INF | fp.MINUS_INF, one, nan),
        (fp.NAN | fp.PLUS_INF, one, nan),
        (fp.PLUS_INF, inf, inf),
        (fp.PLUS_INF, inf | sign, nan),
        (fp.MINUS_INF, inf, nan),
        (fp.MINUS_INF, inf | sign, inf | sign),
        (fp.PLUS_INF, sign | (inf + 1), nan),
        (0, sign | (inf + 1), nan),
        (0, inf, inf),
        (0, inf | sign, inf | sign),
    ]:
        for high in (5, 0) if flags else (5,):
            assert finish_word(dtype, high, None, 0, 0, existing, flags) == expected
            assert finish_word(dtype, high, 3, 0, 0, existing, flags) == expected


@each(FLOATS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_round_exact(dtype, data):
    fmt = fp.FORMATS[dtype]
    total = data.draw(st.integers(0, 130).flatmap(lambda b: st.integers(-(1 << b), 1 << b)))
    quantum = data.draw(st.integers(2 * fmt.min_exponent - 60, fmt.max_exponent))
    existing = data.draw(signed_words(dtype))
    signed = existing - 2 * sign_bit(dtype) if existing & sign_bit(dtype) else existing
    got = fp.round_exact(total, quantum, signed, fmt) & (2 * sign_bit(dtype) - 1)
    here = fractions_of(from_words([existing], dtype))[0]
    assert got == nearest_word(here + total * TWO**quantum, dtype)
