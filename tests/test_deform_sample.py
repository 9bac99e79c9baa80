"""Sampling of deform_conv2d: kernels are the reference, no order matters, errors are bounded."""

from fractions import Fraction

import pytest
import torch
from deform_cases import INF, NAN, SHAPES, SPECIAL, Deform, special_offsets
from exact_arithmetic import fractions_of, half_ulp
from sampling_cases import each_dtype, rand, randn

from truncdet import _deform_sample_reference as reference
from truncdet import fixedpoint
from truncdet._taps import each_tap
from truncdet.testing import assert_bitwise_equal

sample = torch.ops.truncdet._deform_sample
backward = torch.ops.truncdet._deform_sample_backward
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def check(case, grad, geometry):
    """Kernels and reference; what they give."""
    columns = sample(*case, geometry)
    assert_bitwise_equal(columns, reference.forward(*case, geometry))
    got = backward(grad, *case, geometry, True, True)
    assert_bitwise_equal(got, reference.backward(grad, *case, geometry, True, True))
    return columns, *got


@each_dtype
@each_shape
def test_kernels_are_the_reference(device, dtype, shape):
    check(shape.sampled(dtype, device), shape.columns_grad(dtype, device), shape.geometry)


@each_dtype
def test_special_places_are_the_reference(device, dtype):
    case = SPECIAL.sampled(dtype, device)
    case = (case[0], special_offsets(SPECIAL, case[1]), case[2])
    columns, for_input, _, _ = check(case, SPECIAL.columns_grad(dtype, device), SPECIAL.geometry)
    assert for_input.isfinite().all()
    assert columns.isnan().any() and not columns.isinf().any()


def test_gradients_that_are_not_asked_for_are_empty(device):
    shape = SHAPES["groups"]
    case, grad = shape.sampled(torch.float32, device), shape.columns_grad(torch.float32, device)
    everything = backward(grad, *case, shape.geometry, True, True)
    got = backward(grad, *case, shape.geometry, True, False)
    assert_bitwise_equal(got[0], everything[0])
    assert [x.numel() for x in got[1:]] == [0, 0]
    got = backward(grad, *case, shape.geometry, False, True)
    assert got[0].numel() == 0
    assert_bitwise_equal(got[1:], everything[1:])


def test_the_order_of_samples_changes_no_bit_of_inputs_gradient(device):
    """One tap and stride 1: places with their offsets, masks and gradients can trade places."""
    shape = Deform(1, 3, 1, 1, 1, (20, 20), (1, 1), padding=(0, 0))
    input, _, mask = shape.sampled(torch.float32, device)
    regular = torch.stack(torch.meshgrid(*[torch.arange(20.0)] * 2, indexing="ij")).to(device)
    # Multiples of 2^-16, so that taking away and adding the regular places is exact.
    where = (3 * rand((2, 400), torch.float32, device, 8) * 2**16).round() / 2**16
    grad = shape.columns_grad(torch.float32, device)
    grad = grad * 2.0 ** torch.linspace(-40, 40, 400, device=device)
    mask = mask.flatten(2)
    where[:, 200:], mask[..., 200:] = where[:, :200], mask[..., :200]
    grad[..., 200:] = 2.0**-20 - grad[..., :200]  # all but cancels

    def run(order):
        offset = (where[:, order].reshape(2, 20, 20) - regular)[None]
        masks = mask[..., order].reshape(1, 1, 20, 20)
        return backward(grad[..., order], input, offset, masks, shape.geometry, True, True)

    ascending = torch.arange(400, device=device)
    shuffled = torch.randperm(400, generator=torch.Generator().manual_seed(1)).to(device)
    first, second = run(ascending), run(shuffled)
    assert_bitwise_equal(second[0], first[0])
    assert_bitwise_equal(second[1].flatten(2), first[1].flatten(2)[..., shuffled])
    assert_bitwise_equal(second[2].flatten(2), first[2].flatten(2)[..., shuffled])
    assert 0 < first[0].abs().max() < 2**30


@each_shape
def test_an_image_does_not_see_the_rest_of_the_batch(device, shape):
    shape = shape._replace(n=3)
    case, grad = shape.sampled(torch.float32, device), shape.columns_grad(torch.float32, device)
    grad[:, :, 2] *= 2.0**30
    if shape.masked:
        case[2][1] *= 2.0**-9
    together = (sample(*case, shape.geometry), *backward(grad, *case, shape.geometry, True, True))
    for image in range(3):
        one = slice(image, image + 1)
        alone = [None if x is None else x[one] for x in case]
        assert_bitwise_equal(sample(*alone, shape.geometry), together[0][:, :, one])
        got = backward(grad[:, :, one], *alone, shape.geometry, True, True)
        assert_bitwise_equal(got, [x[one] for x in together[1:]])


@each_dtype
@pytest.mark.parametrize("masked", [True, False], ids=["modulated", "plain"])
def test_errors_stay_inside_the_published_bound(device, dtype, masked):
    shape = Deform(1, 1, 1, 1, 1, (3, 3), (2, 2), padding=(2, 2), masked=masked)
    input, offset, mask = case = shape.sampled(dtype, device)
    grad = shape.columns_grad(dtype, device)
    result = backward(grad, *case, shape.geometry, True, False)[0]
    kind = fixedpoint.compute_dtype(dtype)
    s = reference._samples(input, offset, mask, reference.Geometry.of(shape.geometry))
    product = s.mask * grad.to(kind).reshape(1, 1, 1, -1)
    sums, counts = [Fraction(0)] * 9, [0] * 9
    for cell, weight, inside in each_tap(s.axes, s.sizes):
        flat = (x.flatten().tolist() for x in (cell, inside))
        weighted = fractions_of(torch.where(inside, weight, 0) * product)
        for c, ok, contribution in zip(*flat, weighted, strict=True):
            sums[c] += contribution if ok else 0
            counts[c] += ok
    largest = max(abs(v) for v in fractions_of(grad))
    largest *= max(abs(v) for v in fractions_of(s.mask))
    samples = grad.numel()
    rest = fixedpoint.headroom(samples) - 62
    rest = 2 * rest if dtype == torch.float64 else rest
    assert min(counts) > 2
    for got, exact, count in zip(fractions_of(result), sums, counts, strict=True):
        limit = count * 2 * largest * Fraction(2) ** rest
        assert abs(got - exact) <= limit + half_ulp(got, dtype)


def one_cell(count, dtype, device):
    """An input of one cell that `count` places sample exactly."""
    geometry = [1, 1, 1, 1, 0, 0, 1, 1]
    at = -torch.arange(count, dtype=dtype, device=device)
    offset = torch.stack([torch.zeros_like(at), at]).reshape(1, 2, 1, count)
    return torch.zeros(1, 1, 1, 1, dtype=dtype, device=device), offset, geometry


@each_dtype
def test_products_of_large_and_of_small_factors(device, dtype):
    """Scaling comes before the product, which itself would overflow or vanish."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    input, offset, geometry = one_cell(2, dtype, device)

    def gradient(mask, grad):
        mask = torch.tensor(mask, dtype=dtype, device=device).reshape(1, 1, 1, 2)
        g = torch.tensor(grad, dtype=dtype, device=device).reshape(1, 1, 1, 2)
        return check((input, offset, mask), g, geometry)[1].item()

    assert gradient([largest, largest], [2.0, -1.0]) == largest
    assert gradient([largest, largest], [largest, -largest]) == 0
    assert gradient([largest, largest], [largest, largest]) == INF
    assert gradient([-largest, -largest], [largest, 0.0]) == -INF
    assert gradient([smallest, smallest], [1.0, 2.0]) == 3 * smallest
    assert gradient([smallest, smallest], [0.5, 0.5]) == smallest


@each_dtype
def test_nonfinite_factors_reach_the_cells_they_are_added_to(device, dtype):
    # Each cell of a row of 8 is sampled exactly; what lies beside it has weight zero.
    input = randn((1, 1, 1, 8), dtype, device)
    offset = torch.zeros(1, 2, 1, 8, dtype=dtype, device=device)
    mask = torch.tensor([1.0, INF, -INF, 0.0, INF, -INF, 2.0, 1.0], dtype=dtype, device=device)
    grad = torch.tensor([NAN, 2.0, 2.0, INF, 0.0, -1.0, 3.0, -INF], dtype=dtype, device=device)
    case = (input, offset, mask.reshape(1, 1, 1, 8))
    got = check(case, grad.reshape(1, 1, 1, 8), [1, 1, 1, 1, 0, 0, 1, 1])
    expected = torch.tensor([NAN, INF, -INF, NAN, NAN, INF, 6.0, -INF], dtype=dtype, device=device)
    assert_bitwise_equal(got[1].flatten(), expected)
    plain = check((input, offset, None), grad.reshape(1, 1, 1, 8), [1, 1, 1, 1, 0, 0, 1, 1])
    assert_bitwise_equal(plain[1].flatten(), grad)


def test_flushing_denormals_changes_nothing():
    shape = SHAPES["modulated"]
    input, offset, mask = shape.sampled(torch.float32)
    grad = shape.columns_grad(torch.float32)
    cases = [
        (g, input, offset, m, shape.geometry, True, False)
        for g in (grad, grad * 1e-42, grad * 1e-30)
        for m in (mask, mask * 1e-42, mask * 1e-12)
    ]
    before = [backward(*case)[0] for case in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [backward(*case)[0] for case in cases]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert before[1].abs().max() > 0


@pytest.mark.parametrize("what", ["images", "cells"])
def test_empty_inputs(device, what):
    shape = Deform(n=0) if what == "images" else Deform(size=(0, 7), padding=(2, 1))
    case, grad = shape.sampled(torch.float32, device), shape.columns_grad(torch.float32, device)
    columns, for_input, for_offset, for_mask = check(case, grad, shape.geometry)
    assert (columns == 0).all() and for_input.shape == case[0].shape
    assert for_offset.shape == case[1].shape and (for_offset == 0).all()
    assert for_mask.shape == case[2].shape and (for_mask == 0).all()


def test_opcheck(device):
    for name in ("plain", "groups"):
        shape = SHAPES[name]
        case, grad = shape.sampled(torch.float32, device), shape.columns_grad(torch.float32, device)
        torch.library.opcheck(sample.default, (*case, shape.geometry))
        for wanted in ((True, True), (True, False), (False, True)):
            arguments = (grad, *case, shape.geometry, *wanted)
            torch.library.opcheck(backward.default, arguments)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_deform_sample", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    shape = Deform(offset_groups=2)
    (input, offset, mask), grad = shape.sampled(torch.float32), shape.columns_grad(torch.float32)
    geometry = shape.geometry
    for args in [
        (input[0], offset, mask, geometry),
        (input, offset[:, :-1], mask, geometry),
        (input, offset[:, :18], mask, geometry),
        (input, offset[:1], mask, geometry),
        (input[:, :3], offset, mask, geometry),
        (input, offset, mask[:, :9], geometry),
        (input, offset, mask[:, :, 1:], geometry),
        (input, offset.double(), mask, geometry),
        (input, offset, mask.half(), geometry),
        (input, offset, mask, geometry[:7]),
        (input, offset, mask, [0, *geometry[1:]]),
        (input, offset, mask, [*geometry[:2], 0, *geometry[3:]]),
        (input, offset, mask, [*geometry[:4], -1, *geometry[5:]]),
        (input, offset, mask, [*geometry[:7], 1 << 31]),
    ]:
        with pytest.raises(RuntimeError, match="deform_conv2d: "):
            sample(*args)
        with pytest.raises(RuntimeError, match="deform_conv2d: "):
            backward(grad, *args, True, True)
    for bad in (grad[0], grad[:3], grad[..., 1:], grad.double()):
        with pytest.raises(RuntimeError, match="deform_conv2d: grad must have"):
            backward(bad, input, offset, mask, geometry, True, True)
