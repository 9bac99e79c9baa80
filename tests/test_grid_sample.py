"""grid_sample: kernels are the reference, PyTorch's semantics hold, no order changes a bit."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from sampling_cases import each_dtype, each_way, make_case, randn, special_grid
from torch.nn import functional

import truncdet
from truncdet import _grid_sample_reference as reference
from truncdet import fixedpoint
from truncdet._grid_sample import MODES, PADDINGS
from truncdet._taps import each_tap
from truncdet.testing import assert_bitwise_equal

kernel = torch.ops.truncdet.grid_sample_backward
TINY = 1e-12


def arguments(way):
    _, mode, padding, align = way
    return MODES[mode], PADDINGS[padding], align


def gradients(op, input, grid, grad, way):
    leaves = [x.detach().clone().requires_grad_() for x in (input, grid)]
    out = op(*leaves, way[1], way[2], way[3])
    return torch.autograd.grad(out, leaves, grad)


@each_dtype
@each_way
@pytest.mark.parametrize("channels", [1, 3, 40])
def test_kernel_is_the_reference(device, dtype, way, channels):
    input, grid, grad = make_case(way[0], dtype, device, channels=channels)
    rest = (*arguments(way), True, True)
    expected = reference.backward(grad, input, grid, *rest)
    assert_bitwise_equal(kernel(grad, input, grid, *rest), expected)


@each_way
def test_special_places_are_the_reference(device, way):
    dims, _, _, align = way
    input, _, _ = make_case(dims, torch.float32, device, n=1)
    grid = special_grid(dims, input.shape[2:], align, torch.float32).to(device)
    grid.view(-1)[:6] = torch.tensor([torch.nan, 0.1, torch.inf, 0.2, -torch.inf, 0.3])
    grad = randn((1, 3, *grid.shape[1:-1]), torch.float32, device)
    rest = (*arguments(way), True, True)
    result = kernel(grad, input, grid, *rest)
    assert_bitwise_equal(result, reference.backward(grad, input, grid, *rest))
    assert all(x.isfinite().all() for x in result)


def test_more_locations_than_a_tile_are_the_reference(device):
    input, grid, grad = make_case(
        2, torch.float32, device, n=3, channels=70, cells=(33, 31), places=(37, 41)
    )
    rest = (0, 0, False, True, True)
    assert_bitwise_equal(
        kernel(grad, input, grid, *rest), reference.backward(grad, input, grid, *rest)
    )


@each_way
def test_forward_is_pytorchs(device, way):
    for dtype in (torch.float32, torch.float16):
        input, grid, _ = make_case(way[0], dtype, device)
        expected = functional.grid_sample(input, grid, *way[1:])
        assert_bitwise_equal(truncdet.grid_sample(input, grid, *way[1:]), expected)


@each_way
@pytest.mark.parametrize("special", [False, True], ids=["random", "special"])
def test_gradients_are_pytorchs(way, special):
    """In float64, where what differs is rounding alone; borders and ties decide alike."""
    dims, _, padding, align = way
    input, grid, grad = make_case(dims, torch.float64)
    if special:
        input = input[:1]
        grid = special_grid(dims, input.shape[2:], align)
        if padding == "reflection" and dims == 3:  # PyTorch counts reflections in 32 bits
            grid = grid.clamp(-(2.0**20), 2.0**20)
        grad = randn((1, 3, *grid.shape[1:-1]), torch.float64)
    ours = gradients(truncdet.grid_sample, input, grid, grad, way)
    native = gradients(functional.grid_sample, input, grid, grad, way)
    for a, b in zip(ours, native, strict=True):
        assert (a - b).abs().max() <= TINY * max(1, b.abs().max())


@each_way
@pytest.mark.parametrize("size", [1, 2])
def test_smallest_maps_are_pytorchs(way, size):
    dims, _, _, _ = way
    input, grid, grad = make_case(dims, torch.float64, cells=(size,) * 3)
    ours = gradients(truncdet.grid_sample, input, grid, grad, way)
    native = gradients(functional.grid_sample, input, grid, grad, way)
    for a, b in zip(ours, native, strict=True):
        assert (a - b).abs().max() <= TINY


def test_float32_errors_are_no_larger_than_pytorchs():
    for way in ((2, "bilinear", "zeros", False), (2, "bicubic", "border", True)):
        input, grid, grad = make_case(2, torch.float32, channels=64, cells=(9, 9), places=(40, 40))
        wide = [x.double() for x in (input, grid, grad)]
        exact = gradients(functional.grid_sample, *wide, way)
        ours = gradients(truncdet.grid_sample, input, grid, grad, way)
        native = gradients(functional.grid_sample, input, grid, grad, way)
        for a, b, e in zip(ours, native, exact, strict=True):
            assert (a - e).norm() <= 1.25 * (b - e).norm()


def test_places_that_are_not_finite():
    """Under 'zeros' they are nowhere; elsewhere the first cell is read, and gets the gradient."""
    grid = torch.tensor([[torch.nan, 0.1], [torch.inf, 0.1], [-torch.inf, 0.1]]).reshape(1, 1, 3, 2)
    input, grad = randn((1, 1, 4, 4), torch.float32), torch.ones(1, 1, 1, 3)

    def columns(mode, padding):
        for_input, for_grid = gradients(
            truncdet.grid_sample, input, grid, grad, (2, mode, padding, False)
        )
        assert for_grid.isfinite().all()
        return [round(x, 5) for x in for_input.sum((0, 1, 2)).tolist()]

    for mode in ("bilinear", "nearest"):
        assert columns(mode, "zeros") == [0, 0, 0, 0]
        assert columns(mode, "border") == [2, 0, 0, 1]
        assert columns(mode, "reflection") == [3, 0, 0, 0]
    for padding in PADDINGS:
        assert columns("bicubic", padding) == [0, 0, 0, 0]


@each_way
def test_the_order_of_places_changes_no_bit(device, way):
    """Contributions that cancel to little, in two orders; each place keeps its own gradient."""
    dims = way[0]
    input, grid, grad = make_case(dims, torch.float32, device, n=1, places=(4, 8, 50))
    scale = 2.0 ** torch.linspace(-40, 40, grad[0, 0].numel(), device=device)
    grad = grad * scale.reshape(grad.shape[2:])
    grid, grad = torch.cat([grid, grid], -2), torch.cat([grad, -grad + 2.0**-20], -1)
    flat_grid, flat_grad = grid.reshape(-1, dims), grad.flatten(2)
    order = torch.randperm(len(flat_grid), generator=torch.Generator().manual_seed(0)).to(device)
    first = gradients(truncdet.grid_sample, input, grid, grad, way)
    second = gradients(
        truncdet.grid_sample,
        input,
        flat_grid[order].reshape(grid.shape),
        flat_grad[:, :, order].reshape(grad.shape),
        way,
    )
    assert_bitwise_equal(second[0], first[0])
    assert_bitwise_equal(second[1].reshape(-1, dims), first[1].reshape(-1, dims)[order])


@each_way
def test_an_item_does_not_see_the_rest_of_the_batch(device, way):
    input, grid, grad = make_case(way[0], torch.float32, device, n=3)
    grad[2] *= 2.0**30
    together = gradients(truncdet.grid_sample, input, grid, grad, way)
    for item in range(3):
        one = slice(item, item + 1)
        alone = gradients(truncdet.grid_sample, input[one], grid[one], grad[one], way)
        assert_bitwise_equal(alone, [x[one] for x in together])


@each_dtype
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_errors_stay_inside_the_published_bound(device, dtype, mode):
    input, grid, grad = make_case(2, dtype, device, n=1, channels=1, cells=(3, 3), places=(7, 9))
    way = (2, mode, "border", False)
    result, _ = gradients(truncdet.grid_sample, input, grid, grad, way)
    kind = fixedpoint.compute_dtype(dtype)
    places, sizes = grid.flatten(1, -2).to(kind), (3, 3)
    axes = [reference.sample_axis(places[..., a], 3, *arguments(way))[0] for a in range(2)]
    sums, counts = [Fraction(0)] * 9, [0] * 9
    for cell, weight, inside in each_tap(axes, sizes):
        contributions = fractions_of(weight * grad.flatten(2)[0].to(kind))
        for c, value, ok in zip(cell[0].tolist(), contributions, inside[0].tolist(), strict=True):
            sums[c] += value if ok else 0
            counts[c] += ok
    amax = max(abs(value) for value in fractions_of(grad))
    bits = fixedpoint.headroom(63) + (mode == "bicubic")
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    for got, exact, n in zip(fractions_of(result), sums, counts, strict=True):
        assert abs(got - exact) <= n * amax * Fraction(2) ** rest + half_ulp(got, dtype)


@each_dtype
def test_nonfinite_gradients_reach_the_cells_they_are_added_to(device, dtype):
    input, grid, grad = make_case(2, dtype, device, n=2, channels=2, cells=(1, 8), places=(1, 4))
    at = torch.tensor([0.5, 2.5, 5.0, 6.5], device=device)  # the third lies on a cell's centre
    grid[..., 0] = ((2 * at + 1) / 8 - 1).to(dtype)
    grid[..., 1] = 0
    grad[1] = 1.0
    grad[1, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=device)
    way = (2, "bilinear", "zeros", False)
    result, _ = gradients(truncdet.grid_sample, input, grid, grad, way)
    expected = [torch.nan, torch.nan, torch.inf, torch.inf, 0.0, -torch.inf, 0.5, 0.5]
    assert_bitwise_equal(result[1, 0, 0], torch.tensor(expected, dtype=dtype, device=device))
    assert result[0].isfinite().all() and result[1, 1].isfinite().all()
    rest = (0, 0, False, True, True)
    assert_bitwise_equal(
        kernel(grad, input, grid, *rest), reference.backward(grad, input, grid, *rest)
    )


@each_way
def test_flushing_denormals_changes_nothing(way):
    input, grid, grad = make_case(way[0], torch.float32)
    cases = [(grad * 1e-42, input), (grad * 1e-36, input), (grad, input)]
    rest = (*arguments(way), True, False)
    before = [kernel(g, x, grid, *rest)[0] for g, x in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [kernel(g, x, grid, *rest)[0] for g, x in cases]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert before[0].abs().max() > 0


def test_full_head_room_does_not_overflow(device):
    """Every place gives its whole weight, just below a power of two, to one cell."""
    largest = 2.0 - 2.0**-23
    for mode in MODES:
        for count in (64, 65):
            grid = torch.full((1, 1, count, 2), -30.0, device=device)
            grad = torch.full((1, 1, 1, count), largest, device=device)
            input = torch.zeros(1, 1, 3, 3, device=device)
            result, _ = gradients(
                truncdet.grid_sample, input, grid, grad, (2, mode, "border", True)
            )
            assert result[0, 0, 0, 0].item() == torch.tensor(count * largest).float().item()
