"""truncate: round to nearest even on the word, straight-through gradient."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truncdet import truncate
from truncdet.testing import assert_bitwise_equal
from truncdet.testing import bits as words

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# dtype: stored significand bits, largest exponent
SHAPE = {
    torch.float64: (52, 1023),
    torch.float32: (23, 127),
    torch.float16: (10, 15),
    torch.bfloat16: (7, 127),
}
WORD = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def from_words(values, dtype, device="cpu"):
    width = 8 * dtype.itemsize
    signed = [v - (1 << width) if v >> (width - 1) else v for v in values]
    return torch.tensor(signed, dtype=WORD[dtype.itemsize], device=device).view(dtype)


def expected_word(word, dtype, keep):
    """The definition in exact arithmetic: x -> RNE to `keep` bits counted from the leading one."""
    mantissa, top = SHAPE[dtype]
    width = 8 * dtype.itemsize
    sign, magnitude = word >> (width - 1), word & ((1 << (width - 1)) - 1)
    field, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    if field == 2 * top + 1:
        return word
    integer = fraction if field == 0 else fraction | (1 << mantissa)
    scale = Fraction(2) ** (max(field, 1) - top - mantissa)
    if integer.bit_length() > keep:
        unit = 1 << (integer.bit_length() - keep)
        integer = round(Fraction(integer, unit)) * unit  # round() on Fraction: half to even
    value = integer * scale
    if value >= Fraction(2) ** (top + 1):
        magnitude = (2 * top + 1) << mantissa
    elif value < Fraction(2) ** (1 - top):
        magnitude = int(value / Fraction(2) ** (1 - top - mantissa))
    else:
        exponent = math.floor(math.log2(integer)) if integer < 2**50 else integer.bit_length() - 1
        lead = Fraction(integer, 1 << exponent) - 1
        biased = exponent + max(field, 1) - mantissa
        magnitude = (biased << mantissa) + int(lead * (1 << mantissa))
    return magnitude | (sign << (width - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_word_follows_the_definition(dtype, device):
    every = torch.arange(1 << 16, device=device).to(torch.int16).view(dtype)
    for keep in (2, 5, SHAPE[dtype][0]):
        positive = [expected_word(w, dtype, keep) for w in range(1 << 15)]
        expected = from_words(positive + [w | 1 << 15 for w in positive], dtype)
        assert_bitwise_equal(truncate(every, keep), expected, f"{keep} bits")


def interesting_words(dtype):
    """Uniform words are hardly ever ties or subnormal; these are built from fields."""
    mantissa, top = SHAPE[dtype]
    fields = st.one_of(st.sampled_from([0, 1, 2, 2 * top, 2 * top + 1]), st.integers(0, 2 * top))
    tails = st.integers(0, mantissa).flatmap(
        lambda shift: st.builds(
            lambda high, low: ((high << shift) + low) % (1 << mantissa),
            st.integers(0, (1 << mantissa) - 1),
            st.sampled_from([-1, 0, 1]),
        )
    )
    signs = st.integers(0, 1)
    return st.builds(
        lambda s, f, t: (s << (8 * dtype.itemsize - 1)) | (f << mantissa) | t, signs, fields, tails
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("flush", [False, True])
def test_random_words_follow_the_definition(dtype, flush):
    @settings(max_examples=150, deadline=None)
    @given(st.lists(interesting_words(dtype), min_size=1, max_size=40), st.integers(2, 55))
    def check(values, keep):
        expected = from_words([expected_word(w, dtype, keep) for w in values], dtype)
        assert_bitwise_equal(truncate(from_words(values, dtype), keep), expected)

    torch.set_flush_denormal(flush)
    try:
        check()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_named_cases(dtype, device):
    mantissa, top = SHAPE[dtype]
    inf = (2 * top + 1) << mantissa
    sign = 1 << (8 * dtype.itemsize - 1)
    cases = {
        0: 0,
        sign: sign,
        inf: inf,
        sign | inf: sign | inf,
        inf | 1: inf | 1,  # a NaN whose payload lies in the bits that are dropped
        sign | inf | 1: sign | inf | 1,
        inf + (1 << mantissa) - 1: inf + (1 << mantissa) - 1,
        inf - 1: inf,  # the largest finite number rounds to Inf
        sign | (inf - 1): sign | inf,
        1: 1,  # the smallest subnormal has one significant bit
        0b1001: 0b1000,  # subnormals at 3 bits: 9 -> 8 (tie), 11 -> 12 (tie), 13 -> 12 (tie)
        0b1011: 0b1100,
        0b1101: 0b1100,
        (1 << mantissa) - 1: 1 << mantissa,  # the largest subnormal becomes the smallest normal
    }
    x = from_words(list(cases), dtype, device)
    assert_bitwise_equal(truncate(x, 3), from_words(list(cases.values()), dtype))


def test_eleven_bits_equal_a_cast_to_half_inside_its_range(device):
    x = torch.randn(5000, device=device)
    x = x[x.abs() > 2**-13]
    assert_bitwise_equal(truncate(x), x.half().float())
    assert_bitwise_equal(truncate(x, 8), x.bfloat16().float())
    assert not torch.equal(truncate(x), x)


def test_exponents_outside_half_survive(device):
    x = torch.tensor([1e-8, 1e-30, 70000.0, 1e38], device=device)
    assert ((truncate(x) / x - 1).abs() <= 2**-11).all()
    assert (x.half().float() / x).tolist() != pytest.approx([1, 1, 1, 1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_formats_width_is_the_identity(dtype, device):
    x = torch.randn(100, dtype=torch.float64, device=device).to(dtype)
    p = SHAPE[dtype][0] + 1
    for keep in (p, p + 1, 100):
        assert_bitwise_equal(truncate(x, keep), x)
    assert not torch.equal(truncate(x, p - 1), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_denormals_are_zero_has_no_say(dtype, device):
    x = from_words([1, 0b1011, 0x7F, (1 << SHAPE[dtype][0]) - 1], dtype, device)
    expected = truncate(x, 3).clone()
    assert words(expected).tolist()[:3] == [1, 0b1100, 0x80]
    torch.set_flush_denormal(True)
    try:
        assert_bitwise_equal(truncate(x, 3), expected)
        y = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(truncate(y, 3, grad_bits=3), y, x)
        assert_bitwise_equal(grad, expected)
    finally:
        torch.set_flush_denormal(False)


def test_strides_empty_and_zero_dim(device):
    x = torch.randn(3, 4, 5, device=device)
    assert_bitwise_equal(truncate(x.permute(2, 0, 1)), truncate(x).permute(2, 0, 1).contiguous())
    assert_bitwise_equal(truncate(x[:1].expand(3, 4, 5)), truncate(x)[:1].expand(3, 4, 5))
    assert truncate(torch.zeros(0, 3, device=device)).shape == (0, 3)
    assert truncate(torch.tensor(1 + 2**-12, device=device)).item() == 1.0


def test_input_is_not_written(device):
    x = torch.randn(50, device=device)
    copy = x.clone()
    truncate(x, 3)
    assert_bitwise_equal(x, copy)


def test_gradient_passes_straight_through(device):
    x = torch.randn(50, device=device, requires_grad=True)
    g = torch.randn(50, device=device)
    for keep in (3, 11, 24):
        assert_bitwise_equal(torch.autograd.grad(truncate(x, keep), x, g)[0], g)
        rounded = torch.autograd.grad(truncate(x, keep, grad_bits=5), x, g)[0]
        assert_bitwise_equal(rounded, truncate(g, 5))
        assert not torch.equal(rounded, g)


def test_double_backward_passes_straight_through(device):
    x = torch.tensor([1.5, -2.0], device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((truncate(x, 11, grad_bits=11) ** 3).sum(), x, create_graph=True)
    assert grad.tolist() == [6.75, 12.0]
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.tolist() == [9.0, -12.0]
    # The outer gradient crosses the same rounding.
    (grad,) = torch.autograd.grad((truncate(x, 11, grad_bits=2) ** 3).sum(), x, create_graph=True)
    outer = torch.tensor([1 + 2**-2, 1.0], device=device)
    (second,) = torch.autograd.grad(grad, x, outer)
    assert second.tolist() == [8.0, -12.0]  # 9 * RN2(1.25) = 9 * 1, then 9 -> 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_literal_cast_is_the_published_recipe(dtype, device):
    x = torch.tensor([1.0001, 70000.0, 1e-8, 3e-6], device=device, requires_grad=True)
    g = torch.tensor([1.0001, 1e-8, 1e-6, 3e-7], device=device)
    y = truncate(x, dtype=dtype)
    assert y.dtype == torch.float32
    assert_bitwise_equal(y, x.to(dtype).float())
    assert_bitwise_equal(torch.autograd.grad(y, x, g)[0], g.to(dtype).float())
    if dtype is torch.float16:
        assert y[1] == torch.inf and y[2] == 0


def test_autocast_does_not_touch_it():
    x = torch.randn(20, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = truncate(x)
    assert_bitwise_equal(y, truncate(x))
    half = (x @ x.new_ones(20, 1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert truncate(half, 5).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"bits": 5}, {"bits": 60, "grad_bits": 4}], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_compiles_in_one_graph_with_the_same_bits(options, dtype, device):
    def step(x):
        return truncate(x * 1, **options) * 3

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    tiny = torch.finfo(dtype).smallest_normal
    x = (torch.randn(64, device=device) * torch.tensor([1, tiny], device=device).repeat(32)).to(
        dtype
    )
    x.requires_grad_()
    g = torch.randn(64, device=device).to(dtype)
    assert_bitwise_equal(compiled(x), step(x))
    eager, graph = (torch.autograd.grad(f(x), x, g)[0] for f in (step, compiled))
    assert_bitwise_equal(graph, eager)


@pytest.mark.cuda
def test_cuda_equals_cpu_and_does_not_wait():
    x = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    x = x.view(torch.float32)
    on_device = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [truncate(on_device, keep) for keep in range(2, 25)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for keep, result in zip(range(2, 25), results, strict=True):
        assert_bitwise_equal(result, truncate(x, keep))


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (([1.0],), TypeError, "truncate: x must be a torch.Tensor, got list"),
        ((torch.ones(1).int(),), TypeError, "truncate: x must be of dtype .*, got torch.int32"),
        ((torch.ones(1), 1), ValueError, "truncate: bits must be at least 2, got 1"),
        ((torch.ones(1), 11.0), TypeError, "truncate: bits must be an int, got float"),
        ((torch.ones(1), True), TypeError, "truncate: bits must be an int, got bool"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        truncate(*arguments)


def test_errors_of_keywords():
    x = torch.ones(1)
    with pytest.raises(ValueError, match="truncate: grad_bits must be at least 2, got 0"):
        truncate(x, grad_bits=0)
    with pytest.raises(
        ValueError, match=r"dtype must be torch.float16 or torch.bfloat16, got torch.f"
    ):
        truncate(x, dtype=torch.float32)
    with pytest.raises(ValueError, match="grad_bits must be None with dtype"):
        truncate(x, dtype=torch.float16, grad_bits=11)


def test_the_exact_model_agrees_with_the_hardware():
    # expected_word is itself checked: at half's width it must be the CPU's own cast.
    values = torch.randn(200).tolist()
    for value in values:
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        (cast,) = struct.unpack("<I", struct.pack("<f", torch.tensor(value).half().item()))
        if abs(value) > 2**-13:
            assert expected_word(word, torch.float32, 11) == cast
