"""ms_deform_attn: kernels are the reference, the composition's semantics hold, no order matters."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from sampling_cases import attention_grad, each_dtype, make_attention, randn
from torch.nn import functional

from truncdet import _ms_deform_attn_reference as reference
from truncdet import fixedpoint, ms_deform_attn
from truncdet._taps import each_tap
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.truncdet
each_width = pytest.mark.parametrize("channels", [1, 3, 8, 13, 16, 24, 32, 70])


def composition(value, shapes, starts, locations, weights):
    """The same in grid_sample and sums, as mmcv does it without its kernels."""
    n, _, heads, channels = value.shape
    total = 0
    for level, (height, width) in enumerate(shapes.tolist()):
        cells = value[:, starts[level] :][:, : height * width]
        image = cells.permute(0, 2, 3, 1).reshape(n * heads, channels, height, width)
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        sampled = functional.grid_sample(image, grid, align_corners=False)
        weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (sampled * weight).sum(-1)
    return total.reshape(n, heads * channels, -1).transpose(1, 2)


def results(op, case, grad):
    """Output and the three gradients."""
    value, shapes, starts, locations, weights = case
    leaves = [x.detach().clone().requires_grad_() for x in (value, locations, weights)]
    out = op(leaves[0], shapes, starts, *leaves[1:])
    return out, *torch.autograd.grad(out, leaves, grad)


@each_dtype
@each_width
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
def test_kernels_are_the_reference(device, dtype, channels, wide):
    if wide and dtype.itemsize != 2:
        pytest.skip("locations wider than values exist for half types alone")
    case = make_attention(dtype, device, channels=channels, wide=wide)
    grad = attention_grad(case[0], case[3])
    assert_bitwise_equal(ops.ms_deform_attn(*case), reference.forward(*case))
    assert_bitwise_equal(ops.ms_deform_attn_backward(grad, *case), reference.backward(grad, *case))


def test_more_rows_than_a_block_are_the_reference(device):
    case = make_attention(torch.float32, device, n=3, heads=5, channels=9, queries=83)
    grad = attention_grad(case[0], case[3])
    assert_bitwise_equal(ops.ms_deform_attn(*case), reference.forward(*case))
    assert_bitwise_equal(ops.ms_deform_attn_backward(grad, *case), reference.backward(grad, *case))


def special_locations(case):
    """Edges and centres of the first level, far and not finite places, in all pairs."""
    at = [0.0, 1.0, 0.5, 1 / 6, 5 / 6, -1 / 6, 1 / 8, -1 / 8, 7 / 6, 9 / 8, -0.5, 2.0, 1e30, -1e30]
    at += [torch.nan, torch.inf, -torch.inf]
    x, y = torch.meshgrid(torch.tensor(at), torch.tensor(at), indexing="ij")
    pairs = torch.stack([x.flatten(), y.flatten()], -1).to(case[3])
    locations = pairs[None, :, None, None, None].repeat(2, 1, 2, 3, 2, 1)
    return (*case[:3], locations, randn(locations.shape[:-1], case[4].dtype, case[4].device, 9))


def test_special_places_are_the_reference_and_finite(device):
    case = special_locations(make_attention(torch.float32, device))
    grad = attention_grad(case[0], case[3])
    got = (ops.ms_deform_attn(*case), *ops.ms_deform_attn_backward(grad, *case))
    assert_bitwise_equal(got, (reference.forward(*case), *reference.backward(grad, *case)))
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("special", [False, True], ids=["random", "special"])
def test_values_are_those_of_the_composition(special):
    """In float64, where what differs is rounding alone."""
    case = make_attention(torch.float64, channels=5)
    if special:
        case = special_locations(case)
        case = (*case[:3], case[3].nan_to_num(7.0).clamp(-1e6, 1e6), case[4])
    grad = attention_grad(case[0], case[3])
    for a, b in zip(
        results(ms_deform_attn, case, grad), results(composition, case, grad), strict=True
    ):
        assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())


def test_float32_errors_are_no_larger_than_the_compositions():
    case = make_attention(torch.float32, channels=32, queries=50)
    grad = attention_grad(case[0], case[3])
    wide = [x.double() if x.is_floating_point() else x for x in case]
    exact = results(composition, wide, grad.double())
    ours, native = results(ms_deform_attn, case, grad), results(composition, case, grad)
    for a, b, e in zip(ours, native, exact, strict=True):
        assert (a - e).norm() <= 1.25 * (b - e).norm()


def test_the_order_of_queries_and_points_changes_no_bit_of_values_gradient(device):
    value, shapes, starts, locations, weights = make_attention(
        torch.float32, device, n=1, queries=200
    )
    grad = attention_grad(value, locations)
    grad = grad * 2.0 ** torch.linspace(-40, 40, 200, device=device)[:, None]
    locations, weights = (torch.cat([x, x], 1) for x in (locations, weights))
    grad = torch.cat([grad, -grad + 2.0**-20], 1)  # all but cancels
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).to(device)
    first = results(ms_deform_attn, (value, shapes, starts, locations, weights), grad)
    case = (value, shapes, starts, locations[:, order].flip(4), weights[:, order].flip(4))
    second = results(ms_deform_attn, case, grad[:, order])
    assert_bitwise_equal(second[1], first[1])
    assert_bitwise_equal(second[2].flip(4), first[2][:, order])
    assert_bitwise_equal(second[3].flip(4), first[3][:, order])


def test_an_image_does_not_see_the_rest_of_the_batch(device):
    value, shapes, starts, locations, weights = make_attention(torch.float32, device, n=3)
    grad = attention_grad(value, locations)
    grad[2], weights[1] = grad[2] * 2.0**30, weights[1] * 2.0**-9
    together = results(ms_deform_attn, (value, shapes, starts, locations, weights), grad)
    for image in range(3):
        one = slice(image, image + 1)
        case = (value[one], shapes, starts, locations[one], weights[one])
        alone = results(ms_deform_attn, case, grad[one])
        assert_bitwise_equal(alone, [x[one] for x in together])


@each_dtype
def test_errors_stay_inside_the_published_bound(device, dtype):
    value, _, _, locations, weights = make_attention(dtype, device, n=1, heads=1, channels=1)
    shapes, starts = torch.tensor([[3, 3]], device=device), torch.tensor([0], device=device)
    value, locations, weights = value[:, :9], locations[..., :1, :, :], weights[..., :1, :]
    grad = attention_grad(value, locations)
    case = (value, shapes, starts, locations, weights)
    result = ops.ms_deform_attn_backward(grad, *case)[0]
    kind = fixedpoint.compute_dtype(dtype)
    sums, counts = [Fraction(0)] * 9, [0] * 9
    for s in reference._samples(value, shapes, starts, locations):
        product = weights[:, :, :, 0, s.point].to(kind) * grad.to(kind)
        for cell, tap, inside in each_tap(s.axes, s.sizes):
            flat = (x.flatten().tolist() for x in (cell, inside & s.inside))
            values = fractions_of(tap * product)
            for c, ok, contribution in zip(*flat, values, strict=True):
                sums[c] += contribution if ok else 0
                counts[c] += ok
    largest = [max(abs(v) for v in fractions_of(x)) for x in (weights, grad)]
    bits = fixedpoint.headroom(locations.size(1) * 2)
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    for got, exact, n in zip(fractions_of(result), sums, counts, strict=True):
        limit = n * 2 * largest[0] * largest[1] * Fraction(2) ** rest
        assert abs(got - exact) <= limit + half_ulp(got, dtype)


@each_dtype
def test_products_of_large_and_of_small_factors(device, dtype):
    """Scaling comes before the product, which itself would overflow or vanish."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    value = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    levels = (
        torch.ones(1, 2, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    locations = torch.full((1, 2, 1, 1, 1, 2), 0.5, dtype=dtype, device=device)

    def value_gradient(weight, grad):
        weights = torch.tensor(weight, dtype=dtype, device=device).reshape(1, 2, 1, 1, 1)
        g = torch.tensor(grad, dtype=dtype, device=device).reshape(1, 2, 1)
        got = ops.ms_deform_attn_backward(g, value, *levels, locations, weights)
        assert_bitwise_equal(got, reference.backward(g, value, *levels, locations, weights))
        return got[0].item()

    assert value_gradient([largest, largest], [2.0, -1.0]) == largest
    assert value_gradient([largest, largest], [largest, -largest]) == 0
    assert value_gradient([largest, largest], [largest, largest]) == torch.inf
    assert value_gradient([-largest, -largest], [largest, 0.0]) == -torch.inf
    assert value_gradient([smallest, smallest], [1.0, 2.0]) == 3 * smallest
    assert value_gradient([smallest, smallest], [0.5, 0.5]) == smallest


@each_dtype
def test_nonfinite_factors_reach_the_cells_they_are_added_to(device, dtype):
    value = randn((1, 8, 1, 1), dtype, device)
    shapes, starts = torch.tensor([[1, 8]], device=device), torch.tensor([0], device=device)
    # On the centres of cells 0 to 6: what lies beside them has weight zero.
    x = (torch.arange(7, dtype=torch.float64) + 0.5) / 8
    locations = torch.stack([x, torch.full_like(x, 0.5)], -1).reshape(1, 7, 1, 1, 1, 2)
    locations = locations.to(dtype).to(device)
    nan, inf = torch.nan, torch.inf
    weights = torch.tensor([1.0, inf, -inf, 0.0, inf, -inf, 2.0], dtype=dtype, device=device)
    grad = torch.tensor([nan, 2.0, 2.0, inf, 0.0, -1.0, 3.0], dtype=dtype, device=device)
    case = (value, shapes, starts, locations, weights.reshape(1, 7, 1, 1, 1))
    got = ops.ms_deform_attn_backward(grad.reshape(1, 7, 1), *case)
    assert_bitwise_equal(got, reference.backward(grad.reshape(1, 7, 1), *case))
    expected = [nan, inf, -inf, nan, nan, inf, 6.0, 0.0]
    assert_bitwise_equal(got[0].flatten(), torch.tensor(expected, dtype=dtype, device=device))


def test_flushing_denormals_changes_nothing():
    value, shapes, starts, locations, weights = make_attention(torch.float32)
    grad = attention_grad(value, locations)
    cases = [
        (g, value, shapes, starts, locations, w)
        for g in (grad, grad * 1e-42, grad * 1e-30)
        for w in (weights, weights * 1e-42, weights * 1e-12)
    ]
    before = [ops.ms_deform_attn_backward(*case)[0] for case in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [ops.ms_deform_attn_backward(*case)[0] for case in cases]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert before[1].abs().max() > 0


def test_levels_may_overlap_and_leave_gaps(device):
    value, _, _, locations, weights = make_attention(torch.float32, device)
    shapes = torch.tensor([[3, 4], [2, 2], [0, 5]], device=device)
    starts = torch.tensor([5, 7, 21], device=device)
    case = (value, shapes, starts, locations, weights)
    grad = attention_grad(value, locations)
    got = (ops.ms_deform_attn(*case), *ops.ms_deform_attn_backward(grad, *case))
    assert_bitwise_equal(got, (reference.forward(*case), *reference.backward(grad, *case)))
    assert (got[1][:, :5] == 0).all() and (got[1][:, 17:] == 0).all() and got[1].any()
