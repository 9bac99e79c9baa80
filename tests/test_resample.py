"""The primitive behind interpolate and adaptive average pooling: kernels, reference, definition."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import FLOATS, fractions_of, half_ulp
from resample_cases import (
    HOSTILE,
    axis_of,
    dense_weights,
    each_dtype,
    each_kind,
    random_floats,
    reference,
    run_axis,
)

from truncdet._resample_reference import AVERAGE, CUBIC, LINEAR, Axis, axis_weights
from truncdet.testing import assert_bitwise_equal

primitive = torch.ops.truncdet._resample_backward
COMPUTE = [torch.float32, torch.float64]
each_hostile = pytest.mark.parametrize("hostile", HOSTILE, ids=str)


@each_hostile
@each_kind
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_no_range_misses_an_output_that_uses_the_cell(hostile, kind, dtype):
    axis, align_corners = axis_of(hostile, kind)
    weights = axis_weights(axis, kind, align_corners, torch.empty(0, dtype=dtype))
    dense = dense_weights(axis, kind, align_corners, torch.empty(0, dtype=dtype))
    output = torch.arange(axis.outputs)[:, None]
    inside = (weights.begin <= output) & (output < weights.end)
    assert not ((dense != 0) & ~inside).any()
    assert (weights.first[1:] >= weights.first[:-1]).all()


@each_hostile
@each_kind
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_a_unit_gradient_gives_the_weights_bit_for_bit(device, hostile, kind, dtype):
    axis, align_corners = axis_of(hostile, kind)
    units = torch.eye(axis.outputs, dtype=dtype, device=device)
    expected = dense_weights(axis, kind, align_corners, torch.empty(0, dtype=dtype))
    if kind == AVERAGE:
        expected = torch.where(expected != 0, 1 / expected, 0)
    assert_bitwise_equal(run_axis(primitive, units, axis, kind, align_corners), expected)


@each_hostile
@pytest.mark.parametrize("kind", [LINEAR, CUBIC], ids=["linear", "cubic"])
def test_weights_are_torchs(hostile, kind):
    """A float32 position is off by its rounding and the scale's; a cubic weight by twice that."""
    axis, align_corners = axis_of(hostile, kind)
    cells, outputs, scale, _ = hostile
    if scale and outputs != int(cells * scale):
        pytest.skip("torch's forward takes no scale that contradicts the sizes")
    units = torch.eye(cells, dtype=torch.float64).reshape(cells, 1, 1, cells)
    scales = (None, scale or None)
    operator = torch.ops.aten.upsample_bilinear2d if kind == LINEAR else None
    if operator is None:
        operator = torch.ops.aten.upsample_bicubic2d
    theirs = operator(units, (1, outputs), align_corners, *scales).reshape(cells, outputs).T
    exact = dense_weights(axis, kind, align_corners, torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(exact, theirs, rtol=0, atol=1e-12 * cells)
    ours = dense_weights(axis, kind, align_corners, torch.empty(0))
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2.0**-22 * (cells + 4))


@each_dtype
@each_kind
@pytest.mark.parametrize("inner", [1, 3, 70])
def test_kernel_equals_reference(device, dtype, kind, inner):
    shape = (3, 3, 9, 14, inner)
    sizes = {LINEAR: (2, 5, 31), CUBIC: (7, 4, 6), AVERAGE: (4, 6, 40)}[kind]
    arguments = (*sizes, kind, False, 0.0, 1.9, 0.0, 0)
    grad = random_floats(shape, dtype)
    grad[0, 1, 2, 3, 0], grad[1, 0, 0, 0, 0], grad[2, 2, 8, 13, 0] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    got = primitive(grad.to(device), *arguments)
    assert_bitwise_equal(got, reference(grad, *arguments))
    assert got.is_contiguous()


@each_dtype
@pytest.mark.parametrize("kind", [LINEAR, CUBIC], ids=["linear", "cubic"])
@pytest.mark.parametrize("outputs", [3, 8, 15, 30, 61, 130])
def test_columns_of_any_length(device, dtype, kind, outputs):
    """Short sums along x are kept in registers, longer ones are read from tables."""
    grad = random_floats((5, 1, 9, outputs, 1), dtype)
    arguments = (1, 4, 3, kind, True, 0.0, 0.0, 0.0, 1)
    assert_bitwise_equal(primitive(grad.to(device), *arguments), reference(grad, *arguments))


@each_dtype
@each_kind
@pytest.mark.parametrize("lines", [9, 32, 33, 70])
def test_few_cells_with_many_lines(device, dtype, kind, lines):
    """On CUDA such cells belong to a warp, whose lanes share the lines."""
    grad = random_floats((2, 3, lines, 21, 3), dtype)
    grad[1, 1, 2, 3, 1], grad[0, 2, lines - 1, 0, 2] = torch.nan, torch.inf
    for sizes in ((2, 1, 2), (1, 2, 30)):
        arguments = (*sizes, kind, kind == CUBIC, 0.0, 0.0, 0.0, 0)
        assert_bitwise_equal(primitive(grad.to(device), *arguments), reference(grad, *arguments))


def test_many_planes(device):
    """So many cells that a CUDA thread serves several planes, the last group being incomplete."""
    grad = random_floats((203, 1, 180, 202, 1))
    arguments = (1, 144, 144, LINEAR, False, 0.0, 0.0, 0.0, 1)
    few = primitive(grad.to(device), *arguments)
    assert few.numel() >= 1 << 22
    one = torch.cat([primitive(part.to(device), *arguments) for part in grad.split(7)])
    assert_bitwise_equal(few, one)
    assert_bitwise_equal(few[-1:], reference(grad[-1:], *arguments))


# So many cells that a CUDA thread walks over a column of them (2^17 and more): gradient, sizes, the
# scale along x. Up and down, to many outputs a cell, with a thread's last cells missing, elements
# that share a cell, a border on which most outputs lie, and volumes.
LARGE = [
    ((4, 1, 74, 1800, 1), (1, 37, 900), 0.0),
    ((4, 1, 70, 1711, 1), (1, 37, 900), 0.0),
    ((4, 1, 18, 451, 1), (1, 37, 900), 0.0),
    ((4, 1, 37, 900, 1), (1, 38, 901), 0.0),
    ((4, 1, 90, 3600, 1), (1, 37, 900), 0.0),
    ((2, 1, 70, 111, 37), (1, 37, 55), 0.0),
    ((2, 1, 20, 30, 37), (1, 37, 55), 0.0),
    ((4, 1, 70, 2700, 1), (1, 37, 900), 1.0),
    ((1, 1, 700, 40, 1), (1, 6000, 23), 0.0),
    ((10, 16, 48, 140, 1), (8, 24, 70), 0.0),
    ((10, 5, 13, 41, 1), (8, 24, 70), 0.0),
    ((2, 13, 29, 80, 7), (9, 24, 60), 0.0),
]


@pytest.mark.cuda
@each_dtype
@pytest.mark.parametrize("kind", [LINEAR, CUBIC], ids=["linear", "cubic"])
@pytest.mark.parametrize(("shape", "sizes", "scale"), LARGE, ids=str)
def test_large_maps_get_the_bits_of_the_cpu(dtype, kind, shape, sizes, scale):
    grad = random_floats(shape, dtype)
    places = torch.arange(grad.numel()) % 9973
    for place, value in ((7, torch.nan), (11, torch.inf), (13, -torch.inf)):
        grad.view(-1)[places == place] = value
    copied = 1 if sizes[0] == 1 else 0
    for align_corners in (False, True):
        arguments = (*sizes, kind, align_corners, 0.0, 0.0, scale, copied)
        got = primitive(grad.cuda(), *arguments)
        assert_bitwise_equal(got.cpu(), primitive(grad, *arguments))


def test_a_copied_axis_is_copied(device):
    grad = random_floats((2, 3, 4, 5, 1))
    grad[grad == 0] = 1
    arguments = (3, 4, 5, CUBIC, False, 1.1, 1.1, 1.1)
    assert_bitwise_equal(primitive(grad.to(device), *arguments, 7), grad)
    assert not torch.equal(primitive(grad.to(device), *arguments, 3), grad.to(device))


@each_dtype
def test_nonfinite_gradients_reach_the_cells_that_were_used_and_no_other(device, dtype):
    """At x2 with aligned corners of 3 -> 5, outputs 0, 2 and 4 use one cell each."""
    grad = torch.tensor([[1.0, 2.0, torch.nan, 4.0, -torch.inf]], dtype=dtype, device=device)
    axis = Axis(3, 5, 0.0, False)
    got = run_axis(primitive, grad, axis, LINEAR, True)
    assert got[0, 0].item() == 2
    assert got[0, 1].isnan()
    assert got[0, 2].item() == -torch.inf
    both = torch.tensor([[torch.inf, 0.0, 0.0, 0.0, -torch.inf]], dtype=dtype, device=device)
    pooled = run_axis(primitive, both, Axis(2, 5, 0.0, False), AVERAGE, False)
    assert pooled.tolist() == [[torch.inf, -torch.inf]]
    assert run_axis(primitive, both, Axis(1, 5, 0.0, False), AVERAGE, False).isnan().all()


def exact_sums(grad, axis, kind, align_corners):
    """The sums of the exact contributions of every cell, and of their magnitudes, and counts."""
    like = torch.empty(0, dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32)
    dense = dense_weights(axis, kind, align_corners, like)
    values = fractions_of(grad)
    for cell in range(axis.cells):
        weights = fractions_of(dense[:, cell].contiguous())
        pairs = [(w, v) for w, v in zip(weights, values, strict=True) if w]
        terms = [v / w if kind == AVERAGE else v * w for w, v in pairs]
        yield sum(terms, Fraction(0)), sum(map(abs, terms), Fraction(0)), len(terms)


@each_dtype
@each_kind
@pytest.mark.parametrize("hostile", [HOSTILE[i] for i in (2, 7, 9, 15, 17, 20)], ids=str)
@pytest.mark.parametrize("spread", [0, 40])
def test_the_published_bound_holds(device, dtype, kind, hostile, spread):
    axis, align_corners = axis_of(hostile, kind)
    power = torch.arange(axis.outputs) * 7919 % (spread + 1)
    grad = random_floats((axis.outputs,), torch.float64) * 2.0**-power
    grad = (grad * 2.0**-100 if dtype == torch.float32 and spread else grad).to(dtype)
    got = fractions_of(run_axis(primitive, grad[None].to(device), axis, kind, align_corners).cpu())
    unit = Fraction(2) ** (-53 if dtype == torch.float64 else -24)
    smallest = Fraction(2) ** (-1074 if dtype == torch.float64 else -149)
    for result, (total, magnitude, n) in zip(
        got, exact_sums(grad, axis, kind, align_corners), strict=True
    ):
        # Of the two trivial axes each counts one output.
        bound = Fraction(101, 100) * (n + 2) * unit * magnitude + n * smallest / 2
        if dtype not in COMPUTE:
            bound += half_ulp(abs(total) + bound, dtype)
        assert abs(result - total) <= bound


def test_the_bound_of_a_wrong_sum_fails():
    """Dropping the smallest of two contributions is noticed."""
    grad = torch.tensor([1.0, 2.0**-20])
    (total, magnitude, n), *_ = exact_sums(grad, Axis(1, 2, 0.0, False), LINEAR, False)
    assert abs(1 - total) > Fraction(101, 100) * (n + 2) * Fraction(2) ** -24 * magnitude


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_comes_from_nothing(device, dtype):
    grad = torch.zeros(2, 1, 0, 4, 1, dtype=dtype, device=device)
    for kind in (LINEAR, CUBIC, AVERAGE):
        got = primitive(grad, 1, 3, 4, kind, False, 0.0, 0.0, 0.0, 1)
        assert_bitwise_equal(got, torch.zeros(2, 1, 3, 4, 1, dtype=dtype))
    empty = torch.zeros(0, 1, 3, 4, 1, dtype=dtype, device=device)
    assert primitive(empty, 1, 2, 2, LINEAR, False, 0.0, 0.0, 0.0, 1).shape == (0, 1, 2, 2, 1)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_resample_backward", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    grad = torch.zeros(1, 1, 3, 4, 1)
    right = (1, 2, 2, LINEAR, False, 0.0, 0.0, 0.0, 1)
    for tensor, arguments in [
        (grad[0], right),
        (grad.transpose(2, 3), right),
        (grad, (1, 2, 2, 3, *right[4:])),
        (grad, (1, 2, 1 << 30, *right[3:])),
        (grad, (1, -1, 2, *right[3:])),
        (grad, (*right[:-1], 4)),
        (grad.int(), right),
    ]:
        with pytest.raises(RuntimeError, match="_resample_backward: "):
            primitive(tensor, *arguments)
