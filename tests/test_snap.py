"""snap: a grid on which every float sum is exact, proved, and here tried and recomputed."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from truncdet import snap
from truncdet.testing import assert_bitwise_equal, bits

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# dtype: significant bits, exponent of the smallest grid, exponent of the largest power of two
FORMAT = {
    torch.float64: (53, -1022, 1023),
    torch.float32: (24, -126, 127),
    torch.float16: (11, -24, 15),
    torch.bfloat16: (8, -126, 127),
}


def sums_in_order(values, orders):
    """One sum per row of `orders`, added one by one in the dtype of `values`."""
    total = torch.zeros(len(orders), dtype=values.dtype, device=values.device)
    for column in orders.unbind(1):
        total = total + values[column]
    return total


def permutations(count, size, device):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randperm(size, generator=generator) for _ in range(count)]
    return torch.stack(rows).to(device)


def cancelling(size):
    parts = torch.tensor([1, -1, 2**-20, 1024.0, -1024.0, 3e-5], dtype=torch.float64)
    return parts.repeat(size // len(parts))


def spread(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    return x * 2.0 ** torch.randint(-12, 3, (size,), generator=generator)


@pytest.mark.parametrize("make", [cancelling, spread])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_thousand_orders_give_the_same_bits(make, dtype, device):
    size = 60 if dtype == torch.bfloat16 else 300
    # A third fills all bits; float16 must not come near its top.
    x = (make(size) / (3 if dtype != torch.float16 else 768)).to(dtype).to(device)
    orders = permutations(1000, size, device)
    plain = sums_in_order(x, orders)
    assert len(plain.unique()) > 1  # negative control
    y = snap(x, size)
    sums = sums_in_order(y, orders)
    assert len(bits(sums).unique()) == 1
    pairs = y.new_zeros(512 - size)
    tree = torch.cat([y, pairs])
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    assert_bitwise_equal(tree[0], sums[0])
    error = abs(sum(map(Fraction, y.tolist())) - sum(map(Fraction, x.tolist())))
    assert error <= size * unit(x, size, dtype) / 2
    assert y.abs().max() > 0


def exponent(amax):
    """The least e with amax < 2^e."""
    return math.frexp(amax)[1]


def unit(x, count, adder):
    p, smallest, _ = FORMAT[adder]
    amax = max((abs(Fraction(v)) for v in x.tolist() if abs(v) < float("inf")), default=0)
    log_count = 0
    while 2**log_count < count:
        log_count += 1
    if amax == 0:
        return Fraction(2) ** smallest
    return Fraction(2) ** max(exponent(amax) + log_count - p, smallest)


def check_against_fractions(x, count, adder):
    p, _, top = FORMAT[adder]
    y = snap(x, count, adder)
    u = unit(x, count, adder)
    amax = max(abs(Fraction(v)) for v in x.tolist())
    log_count = (count - 1).bit_length()
    if amax and exponent(amax) + log_count > top:
        assert y.isnan().all()
        return
    for before, after in zip(x.tolist(), y.tolist(), strict=True):
        expected = round(Fraction(before) / u) * u  # round(): half to even
        if abs(expected) > torch.finfo(x.dtype).max:
            assert adder != x.dtype and after == math.copysign(math.inf, before)
            continue
        assert Fraction(after) == expected
        assert count * abs(Fraction(after)) <= 2**p * u
    assert (y.signbit() <= (y != 0)).all()


@pytest.mark.parametrize("adder", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_follow_the_definition(dtype, adder):
    info = torch.finfo(dtype)
    values = st.one_of(
        st.floats(-8, 8),
        st.floats(-info.max, info.max),
        st.floats(-info.tiny * 4, info.tiny * 4),
        st.integers(-40, 40).map(lambda n: n * 2.0**-6),
    )
    most = 2 ** (FORMAT[adder][0] - 2)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(values, min_size=1, max_size=12), st.integers(1, most), st.integers(0, 30))
    @example([1.0, 0.3], 1, 0)
    @example([info.tiny, info.smallest_normal / 8], 3, 0)
    @example([0.0, -0.0], 5, 0)
    @example([info.max / 2**9, 1.0], most, 0)
    def check(numbers, count, scale):
        x = torch.tensor(numbers, dtype=torch.float64)
        x = (x * 2.0 ** (-scale if scale < 20 else 0)).clamp(info.min, info.max).to(dtype)
        if x.isfinite().all():
            check_against_fractions(x, min(count, 2 ** max(0, 2 + scale % 9)), adder)
            check_against_fractions(x, count, adder)

    check()


def test_named_values(device):
    x = torch.tensor([1.0, 0.75, -0.75, 0.125, -0.0, 2**-24], device=device)
    # amax = 1 < 2^1; count 2^22: u = 2^(1 + 22 - 24) = 1/2; 0.75 is a tie and goes to 1
    expected = torch.tensor([1.0, 1.0, -1.0, 0.0, 0.0, 0.0])
    assert_bitwise_equal(snap(x, 2**22), expected)
    assert_bitwise_equal(snap(x, 2**21 + 1), expected)
    # amax just below 2 rounds up to 2^e itself
    top = torch.tensor([2 - 2**-23, 1.0], device=device)
    assert snap(top, 2**22).tolist() == [2.0, 1.0]
    assert_bitwise_equal(snap(top, 1), top)


def test_all_values_at_the_top_of_the_grid_still_add_exactly(device):
    x = torch.full((2**22,), 2 - 2**-23, device=device)
    y = snap(x, 2**22)
    assert y.double().sum().item() == 2.0**23
    assert y.view(2, -1).double().sum(1).float().sum().item() == 2.0**23


def test_float64_adder_leaves_more_than_float32(device):
    x = torch.randn(1000, device=device)
    assert not torch.equal(snap(x, 1000), x)
    assert_bitwise_equal(snap(x.clamp(min=1e-3), 1000, torch.float64), x.clamp(min=1e-3))
    y = snap(x.double(), 1000, torch.float32)
    assert_bitwise_equal(y.float().double(), y)  # float32 can hold what it will add
    assert_bitwise_equal(y.float(), snap(x, 1000))


def test_infinities_and_nans_pass_and_do_not_set_the_grid(device):
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([nan, inf, -inf, 1.0, 0.3], device=device)
    y = snap(x, 4)
    assert_bitwise_equal(y[:3], x[:3])
    assert_bitwise_equal(y[3:], snap(x[3:], 4))
    assert_bitwise_equal(snap(x[:3], 4), x[:3])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_that_could_overflow_become_nan(dtype, device):
    top = FORMAT[dtype][2]
    x = torch.tensor([2.0 ** (top - 4), 0.5], dtype=dtype, device=device)  # e = top - 3
    assert snap(x, 8).isfinite().all()
    assert snap(x, 9).isnan().all()


def test_grid_stays_above_flushed_numbers(device):
    # A float32 atomicAdd flushes subnormals: sums must never have any.
    x = torch.tensor([1e-38, 1.3e-38, 5e-39, 3e-39], device=device)
    assert_bitwise_equal(snap(x, 4), torch.tensor([2.0**-126, 2.0**-126, 0.0, 0.0]))
    half = torch.tensor([2.0**-24, 2.0**-23], dtype=torch.float16, device=device)
    assert_bitwise_equal(snap(half, 4), half)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_denormals_are_zero_has_no_say(dtype, device):
    tiny = torch.finfo(dtype).smallest_normal
    cases = [
        torch.tensor([1.0, 0.3, tiny / 4], dtype=torch.float64).to(dtype).to(device),
        torch.tensor([tiny / 2, tiny / 4, tiny * 3 / 4], dtype=torch.float64).to(dtype).to(device),
    ]
    expected = [snap(x, count) for x in cases for count in (1, 3, 30)]
    torch.set_flush_denormal(True)
    try:
        again = [snap(x, count) for x in cases for count in (1, 3, 30)]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(again, expected)


def test_gradient_passes_straight_through(device):
    x = torch.randn(20, device=device, requires_grad=True)
    g = torch.randn(20, device=device)
    assert_bitwise_equal(torch.autograd.grad(snap(x, 1000), x, g)[0], g)
    (grad,) = torch.autograd.grad((snap(x, 1) ** 2).sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [2.0] * 20


def test_shapes_and_strides(device):
    x = torch.randn(3, 4, 5, device=device)
    assert_bitwise_equal(snap(x.permute(2, 0, 1), 60), snap(x, 60).permute(2, 0, 1).contiguous())
    assert snap(torch.zeros(0, 3, device=device), 4).shape == (0, 3)
    assert snap(torch.tensor(0.3, device=device), 1).item() == pytest.approx(0.3)
    copy = x.clone()
    snap(x, 2**20)
    assert_bitwise_equal(x, copy)


def test_compiles_in_one_graph_with_the_same_bits(device):
    compiled = torch.compile(lambda x: snap(x * 1, 100) * 2, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, device=device, requires_grad=True)
    assert_bitwise_equal(compiled(x), snap(x, 100) * 2)
    assert torch.autograd.grad(compiled(x).sum(), x)[0].tolist() == [2.0] * 64


@pytest.mark.cuda
def test_cuda_does_not_wait_and_equals_cpu():
    x = torch.randn(100_000)
    on_device = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = snap(on_device, 5000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise_equal(result, snap(x, 5000))


@pytest.mark.cuda
def test_atomic_sums_of_snapped_values_repeat():
    x = torch.randn(1 << 20, device="cuda")
    index = torch.randint(0, 64, (1 << 20,), device="cuda")
    y = snap(x, 1 << 20)
    sums = [torch.zeros(64, device="cuda").index_add_(0, index, y) for _ in range(20)]
    assert_bitwise_equal(sums[1:], sums[:1] * 19)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (([1.0], 2), TypeError, r"snap: x must be a torch\.Tensor, got list"),
        ((torch.ones(1).int(), 2), TypeError, r"snap: x must be of dtype .*, got torch\.int32"),
        ((torch.ones(1), 2, torch.int64), TypeError, r"snap: dtype must be of dtype float16, "),
        ((torch.ones(1), 2.0), TypeError, r"snap: count must be an int, got float"),
        ((torch.ones(1), True), TypeError, r"snap: count must be an int, got bool"),
        ((torch.ones(1), 0), ValueError, r"snap: count must be from 1 to 4194304 .*, got 0"),
        ((torch.ones(1), 2**22 + 1), ValueError, r"2 bits remain in torch\.float32, got 4194305"),
        ((torch.ones(1), 513, torch.float16), ValueError, r"count must be from 1 to 512 "),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        snap(*arguments)
