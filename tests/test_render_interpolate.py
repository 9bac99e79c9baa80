"""interpolate of truncdet.render: kernels are the reference, values are right, no order matters."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from render_cases import (
    compiled_kernel,
    each_float,
    each_mesh,
    make_case,
    randn,
    shuffle_triangles,
)

from truncdet import _render_interpolate_reference as reference
from truncdet import fixedpoint, render
from truncdet._render_vertices import headroom_bits
from truncdet.testing import assert_bitwise_equal

forward = torch.ops.truncdet.render_interpolate
kernel = torch.ops.truncdet.render_interpolate_backward
DIFF = [3, 0, 2]
each_diff = pytest.mark.parametrize(
    "diff", [[], DIFF, [0, 1, 2, 3, 4]], ids=["no_diff", "some", "all"]
)
each_sharing = pytest.mark.parametrize("shared", [False, True], ids=["instanced", "shared"])


def make_inputs(mesh, dtype, device="cpu", shared=False, attributes=5, diff=DIFF):
    """(grad, grad_da, attr, rast, tri, rast_db, diff): the backward's arguments."""
    rast, db, pos, tri = make_case(mesh, dtype, device, shared)
    attr = randn((*pos.shape[:-1], attributes), dtype, device, 3)
    grad = randn((*rast.shape[:3], attributes), dtype, device, 4)
    grad_da = randn((*rast.shape[:3], 2 * len(diff)), dtype, device, 5)
    return grad, grad_da, attr, rast, tri, db, diff


def backward(grad, grad_da, *rest):
    return kernel(grad, grad_da, *rest, True, True, True)


def attr_gradient(*case):
    return kernel(*case, True, False, False)[0]


@each_mesh
@each_sharing
@each_float
@each_diff
def test_kernel_is_the_reference(device, mesh, shared, dtype, diff):
    case = make_inputs(mesh, dtype, device, shared, diff=diff)
    assert_bitwise_equal(forward(*case[2:]), reference.forward(*case[2:]))
    expected = reference.backward(*case, True, True, True)
    assert_bitwise_equal(backward(*case), expected)
    assert all(x.abs().max() > 0 for x in expected[: 3 if diff else 2])
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        alone = kernel(*case, *wanted)
        assert [x.numel() > 0 for x in alone] == list(wanted)
        kept = [x for x, w in zip(expected, wanted, strict=True) if w]
        assert_bitwise_equal([x for x in alone if x.numel() > 0], kept)


def test_more_attributes_than_lanes_are_the_reference(device):
    many = [i for i in range(150) if i % 3]
    case = make_inputs("hills", torch.float32, device, attributes=150, diff=many)
    assert_bitwise_equal(forward(*case[2:]), reference.forward(*case[2:]))
    assert_bitwise_equal(backward(*case), reference.backward(*case, True, True, True))


@each_mesh
@each_sharing
def test_values_and_gradients_are_those_of_plain_autograd(mesh, shared):
    """The same sums, written as one product of barycentric coordinates, in float64."""
    grad, grad_da, attr, rast, tri, db, diff = make_inputs(mesh, torch.float64, shared=shared)
    leaves = [x.clone().requires_grad_() for x in (attr, rast, db)]
    out, out_da = render.interpolate(leaves[0], leaves[1], tri, leaves[2], diff)
    ours = torch.autograd.grad((out, out_da), leaves, (grad, grad_da))
    attr, rast, db = leaves
    shows = (rast[..., 3:] > 0).to(attr.dtype)
    number = (rast[..., 3].long() - 1).clamp(min=0)
    named = tri.long()[number]
    image = torch.arange(len(rast)).reshape(-1, 1, 1, 1)
    at = attr[named] if attr.dim() == 2 else attr[image, named]  # [N, H, W, 3, A]
    weights = torch.cat([rast[..., :2], 1 - rast[..., :2].sum(-1, keepdim=True)], -1)
    expected = torch.einsum("nhwk,nhwka->nhwa", weights, at) * shows
    slopes = db.unflatten(-1, (2, 2))  # [u or v, X or Y]
    slopes = torch.cat([slopes, -slopes.sum(-2, keepdim=True)], -2)
    expected_da = torch.einsum("nhwkx,nhwka->nhwax", slopes, at)[..., diff, :].flatten(-2) * shows
    assert (out - expected).abs().max() < 1e-12
    assert (out_da - expected_da).abs().max() < 1e-12 * max(1, expected_da.abs().max())
    plain = torch.autograd.grad((expected, expected_da), leaves, (grad, grad_da))
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@each_mesh
@each_sharing
@each_float
def test_the_order_of_triangles_changes_no_bit(device, mesh, shared, dtype):
    case = make_inputs(mesh, dtype, device, shared)
    rast, tri = shuffle_triangles(case[3], case[4])
    assert_bitwise_equal(backward(*case[:3], rast, tri, *case[5:]), backward(*case))
    assert_bitwise_equal(forward(case[2], rast, tri, *case[5:]), forward(*case[2:]))


@each_float
@pytest.mark.parametrize("mesh", ["hills", "one_vertex", "large"])
def test_the_order_of_pixels_and_images_changes_no_bit(device, mesh, dtype):
    """Contributions of very different size, of which most cancel to little, in another order."""
    grad, grad_da, attr, rast, tri, db, diff = make_inputs(mesh, dtype, device, shared=True)
    scale = 2.0 ** torch.linspace(-30, 30, rast[..., 0].numel(), device=device, dtype=dtype)
    scale = scale.reshape(*rast.shape[:3], 1)
    grad, grad_da = (torch.cat([x * scale, -x * scale + 2.0**-20]) for x in (grad, grad_da))
    rast, db = torch.cat([rast, rast]), torch.cat([db, db])
    order = torch.randperm(rast[..., 0].numel(), generator=torch.Generator().manual_seed(1))
    moved = [x.flatten(0, 2)[order.to(device)].reshape(x.shape) for x in (grad, grad_da, rast, db)]
    first = backward(grad, grad_da, attr, rast, tri, db, diff)
    second = backward(*moved[:2], attr, moved[2], tri, moved[3], diff)
    assert_bitwise_equal(second[0], first[0])
    for a, b in zip(second[1:], first[1:], strict=True):
        assert_bitwise_equal(a.flatten(0, 2), b.flatten(0, 2)[order.to(device)])


@each_float
def test_an_image_does_not_see_the_rest_of_the_batch(device, dtype):
    grad, grad_da, attr, rast, tri, db, diff = make_inputs("hills", dtype, device)
    grad[1] *= 2.0**30
    together = backward(grad, grad_da, attr, rast, tri, db, diff)
    for image in range(2):
        one = slice(image, image + 1)
        alone = backward(*(x[one] for x in (grad, grad_da, attr, rast)), tri, db[one], diff)
        assert_bitwise_equal(alone, [x[one] for x in together])


def test_a_huge_contribution_elsewhere_costs_a_vertex_no_bit(device):
    case = make_inputs("hills", torch.float32, device, shared=True)
    grad, rast, tri = case[0], case[3], case[4]
    expected = attr_gradient(*case)
    shown = rast[..., 3].flatten()
    pixel = int((shown == shown.max()).nonzero()[0])
    grad.view(-1, 5)[pixel] *= 1e30
    got = attr_gradient(*case)
    hit = torch.zeros(len(got), dtype=torch.bool, device=device)
    hit[tri[int(shown.max()) - 1].long()] = True
    assert_bitwise_equal(got[~hit], expected[~hit])
    assert (got[hit] != expected[hit]).all() and (~hit).sum() > 10


def contributions_of(case):
    """The float contributions of every pixel to every cell, as lists, from the formulas."""
    grad, grad_da, attr, rast, tri, db, diff = case
    kind = attr.dtype
    cells = {}
    flat = [x.flatten(0, 2) for x in (grad, grad_da, rast, db)]
    for g, h, (u, v, _, number), (ux, uy, vx, vy) in zip(*flat, strict=True):
        if number == 0:
            continue
        parts = [u * g, v * g, ((1 - u) - v) * g]
        for k, i in enumerate(diff):
            by_u = ux * h[2 * k] + uy * h[2 * k + 1]
            by_v = vx * h[2 * k] + vy * h[2 * k + 1]
            for part, extra in zip(parts, (by_u, by_v, -(by_u + by_v)), strict=True):
                part[i] += extra
        for vertex, part in zip(tri[int(number) - 1].tolist(), parts, strict=True):
            assert part.dtype == kind
            for i, value in enumerate(fractions_of(part)):
                cells.setdefault((vertex, i), []).append(value)
    return cells


@each_float
@pytest.mark.parametrize("mesh", ["hills", "one_vertex", "degenerate"])
def test_errors_stay_inside_the_published_bound(device, dtype, mesh):
    case = make_inputs(mesh, dtype, shared=True, attributes=4, diff=[2, 0])
    result = attr_gradient(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in case])
    cells = contributions_of(case)
    bits = headroom_bits(case[3][..., 0].numel())
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    largest = {}
    for (vertex, _), values in cells.items():
        largest[vertex] = max(largest.get(vertex, 0), *(abs(value) for value in values))
    got = iter(fractions_of(result))
    for vertex in range(len(result)):
        for i in range(4):
            values, value = cells.get((vertex, i), []), next(got)
            bound = len(values) * largest.get(vertex, 0) * Fraction(2) ** rest
            assert abs(value - sum(values)) <= bound + half_ulp(value, dtype)


@each_mesh
def test_float32_gradients_are_near_those_in_float64(device, mesh):
    """Against the whole operator: what remains are roundings inside of the contributions."""
    case = make_inputs(mesh, torch.float32, device)
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in case
    ]
    for a, b in zip(backward(*case), backward(*wide), strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_full_head_room_does_not_overflow(device):
    """Every pixel gives all three corners, the same vertex, what is just below a power of two."""
    tri = torch.zeros(1, 3, dtype=torch.int32, device=device)
    attr = torch.zeros(1, 1, device=device)
    for count in (64, 65):
        rast = torch.tensor([1 / 3, 1 / 3, 0.0, 1.0], device=device).repeat(1, 1, count, 1)
        grad = torch.full((1, 1, count, 1), 3 - 2.0**-20, device=device)
        got = attr_gradient(grad, grad[..., :0], attr, rast, tri, None, [])
        u, v = rast[0, 0, 0, :2]
        parts = [(weight * grad[0, 0, 0, 0]).item() for weight in (u, v, (1 - u) - v)]
        assert all(1 - 2.0**-19 < part < 1 for part in parts)
        assert got.item() == torch.tensor(count * sum(parts), dtype=torch.float64).float().item()


@each_float
def test_nonfinite_gradients_reach_the_cells_they_are_added_to(device, dtype):
    """Four pixels in a triangle each, on the vertices (0 1 2), (2 3 4), (4 5 6), (6 7 0)."""
    tri = torch.tensor([[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 0]], dtype=torch.int32).to(device)
    rast = torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=dtype, device=device).repeat(1, 1, 4, 1)
    rast[..., 3] = torch.arange(1, 5)
    grad = torch.ones(1, 1, 4, 2, dtype=dtype, device=device)
    inf, nan = torch.inf, torch.nan
    grad[0, 0, :, 0] = torch.tensor([nan, inf, -inf, 1.0])
    attr = torch.zeros(9, 2, dtype=dtype, device=device)
    case = (grad, grad[..., :0], attr, rast, tri, None, [])
    got = attr_gradient(*case)
    # The second corner's weight is zero, so nothing reaches it.
    expected = torch.tensor([nan, 0, nan, 0, nan, 0, -inf, 0, 0], dtype=dtype)
    expected[2], expected[4] = nan, nan
    assert_bitwise_equal(got[:, 0], expected)
    assert_bitwise_equal(got[:, 1].cpu(), torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 0], dtype=dtype))
    assert_bitwise_equal(backward(*case), reference.backward(*case, True, True, True))
    grad[0, 0, 0, 0] = 1.0
    assert_bitwise_equal(attr_gradient(*case)[2, 0].cpu(), torch.tensor(inf, dtype=dtype))


@each_float
def test_hostile_values_are_the_reference(device, dtype):
    """NaN, infinities, subnormal and huge numbers in every argument that has floats."""
    case = list(make_inputs("hills", dtype, device))
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = [torch.nan, torch.inf, -torch.inf, huge, -huge, tiny / 8, -tiny, -0.0, 0.0, 1e-30]
    special = torch.tensor(special, dtype=dtype, device=device)
    for argument in (0, 1, 2, 5, 3):
        x = case[argument]
        flat = x[..., :3].reshape(-1) if argument == 3 else x.reshape(-1)
        flat[:: 7 + argument] = special.repeat(len(flat))[: len(flat[:: 7 + argument])]
        if argument == 3:
            x[..., :3] = flat.reshape(*x.shape[:3], 3)
        assert_bitwise_equal(forward(*case[2:]), reference.forward(*case[2:]))
        assert_bitwise_equal(backward(*case), reference.backward(*case, True, True, True))


@compiled_kernel
def test_flushing_denormals_changes_nothing():
    """Products of small factors in the gradient that is summed; and the mode stays the caller's."""
    case = make_inputs("hills", torch.float32)
    cases = [(case[0] * scale, case[1] * scale, *case[2:]) for scale in (1e-41, 1e-37, 1e-20, 1)]
    cases.append((case[0] * 1e-20, case[1] * 1e-20, *case[2:5], case[5] * 1e-21, case[6]))
    before = [attr_gradient(*c) for c in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [attr_gradient(*c) for c in cases]
        flushed = bool(torch.tensor(1e-40) * 1 == 0)
    finally:
        torch.set_flush_denormal(False)
    assert flushed and all(x.abs().max() > 0 for x in before)
    assert_bitwise_equal(after, before)


def test_a_thousand_triangles_on_one_vertex(device):
    """A pixel in each; the sum at their common vertex is exact, since it cancels exactly."""
    number = torch.arange(1000, dtype=torch.int32, device=device)
    tri = torch.stack([torch.zeros_like(number), number + 1, (number + 1) % 1000 + 1], -1)
    rast = torch.zeros(1, 20, 50, 4, device=device)
    rast[..., :2] = 0.25
    rast[..., 3] = (number + 1).reshape(1, 20, 50)
    grad = randn((500, 1), torch.float32, device).repeat(2, 1)
    grad[500:] *= -1
    grad[0] += 2.0**-18
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).to(device)
    expected = (grad[0] + grad[500]) / 4
    grad = grad[order].reshape(1, 20, 50, 1)
    got = attr_gradient(grad, grad[..., :0], grad.new_zeros(1001, 1), rast, tri, None, [])
    assert_bitwise_equal(got[0], expected)
    assert fixedpoint.headroom(3000) == headroom_bits(1000)
