"""rasterize_gradient: kernels are the reference, the maths is autograd's, no order matters."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from render_cases import (
    buffers,
    compiled_kernel,
    each_float,
    each_mesh,
    make_case,
    places,
    randn,
    shuffle_triangles,
)

from truncdet import _render_rasterize_reference as reference
from truncdet._render_vertices import headroom_bits
from truncdet.testing import assert_bitwise_equal

kernel = torch.ops.truncdet.render_rasterize_backward
each_sharing = pytest.mark.parametrize("shared", [False, True], ids=["instanced", "shared"])
each_source = pytest.mark.parametrize("source", ["uv", "db", "both"])


def make_inputs(mesh, dtype=torch.float32, device="cpu", shared=False, source="both"):
    """(grad, grad_db, rast, pos, tri): the backward's arguments."""
    rast, _, pos, tri = make_case(mesh, dtype, device, shared)
    grad = randn(rast.shape, dtype, device, 6) if source != "db" else None
    grad_db = randn(rast.shape, dtype, device, 7) if source != "uv" else None
    return grad, grad_db, rast, pos, tri


def corners_of(rast, pos, tri):
    """Positions of the triangles that pixels show, [K, 3, 4], and the places of these pixels."""
    n, height, width, _ = rast.shape
    shows = rast[..., 3] > 0
    named = tri[rast[..., 3][shows].long() - 1].long()
    image = torch.arange(n).reshape(-1, 1, 1).expand(shows.shape)[shows]
    corner = pos[named] if pos.dim() == 2 else pos[image[:, None], named]
    return shows, corner, places(height, width, pos.dtype).expand(n, height, width, 2)[shows]


@each_mesh
@each_sharing
@each_float
@each_source
def test_kernel_is_the_reference(device, mesh, shared, dtype, source):
    case = make_inputs(mesh, dtype, device, shared, source)
    expected = reference.backward(*case)
    assert_bitwise_equal(kernel(*case), expected)
    assert expected.abs().max() > 0 and (expected[..., 2] == 0).all()


@each_mesh
@each_sharing
@each_source
def test_gradients_are_those_of_autograd(device, mesh, shared, source):
    """Of barycentric coordinates as the solution of a linear system, in float64."""
    case = make_inputs(mesh, torch.float64, "cpu", shared, source)
    grad, grad_db, rast, pos, tri = case
    pos = pos.clone().requires_grad_()
    shows, corner, at = corners_of(rast, pos, tri)
    uv, db = buffers(corner, at, *rast.shape[1:3])
    total = 0 if grad is None else (uv * grad[..., :2][shows]).sum()
    total = total if grad_db is None else total + (db * grad_db[shows]).sum()
    (expected,) = torch.autograd.grad(total, pos)
    result = kernel(*(None if x is None else x.to(device) for x in case)).cpu()
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


@each_mesh
@each_sharing
@each_float
def test_the_order_of_triangles_changes_no_bit(device, mesh, shared, dtype):
    grad, grad_db, rast, pos, tri = make_inputs(mesh, dtype, device, shared)
    expected = kernel(grad, grad_db, rast, pos, tri)
    assert_bitwise_equal(kernel(grad, grad_db, *moved(rast, pos, tri)), expected)


def moved(rast, pos, tri):
    rast, tri = shuffle_triangles(rast, tri)
    return rast, pos, tri


@each_float
@pytest.mark.parametrize("mesh", ["hills", "one_vertex", "large"])
def test_the_order_of_images_changes_no_bit(device, mesh, dtype):
    """Contributions of very different size that cancel to little, in another order of images."""
    grad, grad_db, rast, pos, tri = make_inputs(mesh, dtype, device, shared=True)
    scale = 2.0 ** torch.linspace(-30, 30, rast[..., 0].numel(), device=device, dtype=dtype)
    scale = scale.reshape(*rast.shape[:3], 1)
    grad, grad_db = (torch.cat([x * scale, -x * scale + 2.0**-20]) for x in (grad, grad_db))
    rast = torch.cat([rast, rast])
    for order in ([3, 1, 0, 2], [1, 0, 3, 2]):
        got = kernel(grad[order], grad_db[order], rast[order], pos, tri)
        assert_bitwise_equal(got, kernel(grad, grad_db, rast, pos, tri))


def test_the_order_of_pixels_changes_no_bit(device):
    """A square picture is mirrored along its diagonal, and the positions with it."""
    grad, grad_db, rast, pos, tri = make_inputs("one_vertex", device=device)
    assert rast.size(1) == rast.size(2)
    expected = kernel(grad, grad_db, rast, pos, tri)

    def turn(x):
        return x.transpose(1, 2).contiguous()

    # Every product only changes its sign, as does the area, so contributions keep their bits.
    swapped = pos[..., [1, 0, 2, 3]].contiguous()
    got = kernel(turn(grad), turn(grad_db[..., [1, 0, 3, 2]]), turn(rast), swapped, tri)
    assert_bitwise_equal(got[..., [1, 0, 2]], expected[..., :3])


@each_float
def test_an_image_does_not_see_the_rest_of_the_batch(device, dtype):
    grad, grad_db, rast, pos, tri = make_inputs("hills", dtype, device)
    grad[1] *= 2.0**30
    together = kernel(grad, grad_db, rast, pos, tri)
    for image in range(2):
        one = slice(image, image + 1)
        alone = kernel(grad[one], grad_db[one], rast[one], pos[one], tri)
        assert_bitwise_equal(alone, together[one])


@each_float
@each_source
@pytest.mark.parametrize("mesh", ["hills", "one_vertex", "degenerate"])
def test_errors_stay_inside_the_published_bound(device, dtype, mesh, source):
    """The contributions are the reference's floats, their exact sums are fractions."""
    case = make_inputs(mesh, dtype, shared=True, source=source)
    grad, grad_db, rast, pos, tri = case
    result = kernel(*(None if x is None else x.to(device) for x in case))
    shows, corner, at = corners_of(rast, pos, tri)
    steps = torch.tensor([2.0, 2.0], dtype=dtype) / torch.tensor(rast.shape[2:0:-1])
    db = None if grad_db is None else grad_db[shows] * steps.repeat(2)
    grad = torch.zeros_like(rast) if grad is None else grad
    parts, adds = reference.contributions(corner, at[:, 0], at[:, 1], grad[shows], db)
    assert adds.all()
    named = tri[rast[..., 3][shows].long() - 1].flatten().tolist()
    cells, largest = {}, {}
    for vertex, values in zip(named, parts.flatten(0, 1), strict=True):
        for component, value in zip((0, 1, 3), fractions_of(values), strict=True):
            cells.setdefault((vertex, component), []).append(value)
            largest[vertex] = max(largest.get(vertex, 0), abs(value))
    bits = headroom_bits(rast[..., 0].numel())
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    got = iter(fractions_of(result))
    for vertex in range(len(pos)):
        for component in range(4):
            values, value = cells.get((vertex, component), []), next(got)
            bound = len(values) * largest.get(vertex, 0) * Fraction(2) ** rest
            assert abs(value - sum(values)) <= bound + half_ulp(value, dtype)


@pytest.mark.parametrize("mesh", ["hills", "large", "overlapping", "one_pixel"])
@each_source
def test_float32_gradients_are_near_those_in_float64(device, mesh, source):
    case = make_inputs(mesh, torch.float32, device, source=source)
    wide = [x if x is None or x.dtype == torch.int32 else x.double() for x in case]
    a, b = kernel(*case), kernel(*wide)
    assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def test_a_pixel_without_gradient_adds_nothing(device):
    """Whatever its triangle is like; and a gradient of depth or of the number is none."""
    grad, grad_db, rast, pos, tri = make_inputs("hills", device=device)
    clean = kernel(grad, grad_db, rast, pos, tri)
    grad[..., 2:] = torch.nan
    assert_bitwise_equal(kernel(grad, grad_db, rast, pos, tri), clean)
    number = int(rast[..., 3].max())
    there = rast[..., 3] == number
    grad[there], grad_db[there] = 0.0, -0.0
    expected = kernel(grad, grad_db, rast.masked_fill(there.unsqueeze(-1), 0), pos, tri)
    assert (expected != clean).any()
    tri[number - 1, 0] = pos.size(1)  # a vertex of its own, which is nowhere
    pos = torch.cat([pos, torch.full_like(pos[:, :1], torch.nan)], 1)
    got = kernel(grad, grad_db, rast, pos, tri)
    assert_bitwise_equal(got[:, :-1], expected)
    assert (got[:, -1] == 0).all()


def test_triangles_without_area_add_nothing(device):
    """Corners in one place, on a line, or seen edge on; w = 0 throughout; and others still add."""
    flat = [
        [[0.1, 0.2, 0, 1]] * 3,
        [[0.0, 0, 0, 1], [0.5, 0.5, 0, 1], [1, 1, 0, 1]],
        [[0.25, -1, 0, 1], [0.25, 0, 0, 1], [0.25, 1, 0, 2]],
        [[0.0, 0, 0, 0]] * 3,
        [[1.0, 2, 0, 0], [2, 4, 0, 0], [3, 1, 0, 0]],
        [[1e-30, 0, 0, 1e-30], [0, 1e-30, 0, 1e-30], [0, 0, 0, 1e-30]],
    ]
    good = [[-1.0, -1, 0, 1], [3, -1, 0, 1], [-1, 3, 0, 1]]
    pos = torch.tensor([*flat, good]).reshape(-1, 4).to(device)
    tri = torch.arange(21, dtype=torch.int32, device=device).reshape(7, 3)
    rast = torch.zeros(1, 1, 8, 4, device=device)
    rast[..., 3] = torch.arange(8)
    grad = randn(rast.shape, torch.float32, device)
    got = kernel(grad, grad, rast, pos, tri)
    assert_bitwise_equal(got, reference.backward(grad, grad, rast, pos, tri))
    assert got.isfinite().all()
    for empty in (0, 3, 5):
        assert (got[3 * empty : 3 * empty + 3] == 0).all()
    assert (got[18:, [0, 1, 3]] != 0).all()


@each_float
def test_hostile_values_are_the_reference(device, dtype):
    """NaN, infinities, subnormal and huge numbers in the gradients, and in the positions."""
    case = list(make_inputs("hills", dtype, device))
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = [torch.nan, torch.inf, -torch.inf, huge, -huge, tiny / 8, -tiny, -0.0, 0.0, 1e-30]
    special = torch.tensor(special, dtype=dtype, device=device)
    for argument in (0, 1, 3):
        changed = [x.clone() for x in case]
        flat = changed[argument].view(-1)
        flat[:: 7 + argument] = special.repeat(len(flat))[: len(flat[:: 7 + argument])]
        got = kernel(*changed)
        assert_bitwise_equal(got, reference.backward(*changed))
        assert not got.isfinite().all() and got.isfinite().any()


@compiled_kernel
def test_flushing_denormals_changes_nothing_for_gradients_near_zero():
    cases = []
    for scale in (1e-41, 1e-37, 1e-20, 1):
        case = make_inputs("hills")
        cases.append((case[0] * scale, case[1] * scale, *case[2:]))
    before = [kernel(*c) for c in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [kernel(*c) for c in cases]
    finally:
        torch.set_flush_denormal(False)
    assert all(x.abs().max() > 0 for x in before)
    assert_bitwise_equal(after, before)


def test_a_thousand_triangles_on_one_vertex(device):
    """Every pixel twice, with gradients of opposite signs: nothing is left, exactly."""
    grad, grad_db, rast, pos, tri = make_inputs("one_vertex", device=device, shared=True)
    assert (rast[..., 3] > 0).sum() > 250 and len(tri) == 1000
    grad, grad_db = torch.cat([grad, -grad]), torch.cat([grad_db, -grad_db])
    order = [2, 0, 1, 3]
    rast = torch.cat([rast, rast])[order]
    got = kernel(grad[order], grad_db[order], rast, pos, tri)
    assert (got == 0).all()
    grad[0] *= 2
    assert (kernel(grad[order], grad_db[order], rast, pos, tri)[0, [0, 1, 3]] != 0).all()
