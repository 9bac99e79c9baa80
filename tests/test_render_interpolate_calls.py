"""interpolate of truncdet.render as it is called: autograd, layouts, compilers, bad arguments."""

import pytest
import torch
from render_cases import compiled_kernel, each_float, make_case, randn, shifted, turned

import truncdet
from truncdet import TruncdetError, render
from truncdet import _render_interpolate_reference as reference
from truncdet.testing import assert_bitwise_equal

DIFF = [2, 0]


def make_call(mesh="hills", dtype=torch.float32, device="cpu", shared=False, attributes=3):
    """(attr, rast, tri, rast_db)"""
    rast, db, pos, tri = make_case(mesh, dtype, device, shared)
    return randn((*pos.shape[:-1], attributes), dtype, device, 3), rast, tri, db


def results(function, attr, rast, tri, db, diff=DIFF):
    """Both outputs and all three gradients."""
    leaves = [x.detach().requires_grad_() for x in (attr, rast, db)]
    out = function(leaves[0], leaves[1], tri, leaves[2], diff)
    grads = [randn(x.shape, x.dtype, x.device, 8 + i) for i, x in enumerate(out)]
    return [*out, *torch.autograd.grad(out, leaves, grads)]


class ThroughReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attr, rast, tri, db, diff):
        ctx.save_for_backward(attr, rast, tri, db)
        ctx.diff = diff
        return reference.forward(attr, rast, tri, db, diff)

    @staticmethod
    def backward(ctx, grad, grad_da):
        found = reference.backward(grad, grad_da, *ctx.saved_tensors, ctx.diff, True, True, True)
        return found[0], found[1], None, found[2], None


@pytest.mark.parametrize("through", [render.interpolate, ThroughReference.apply])
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck(device, through, shared):
    attr, rast, tri, db = make_call("one_pixel", torch.float64, device, shared)
    # The number of a triangle and the depth are no variables.
    leaves = [attr, rast[..., :2].clone(), db]

    def function(attr, uv, db):
        return through(attr, torch.cat([uv, rast[..., 2:]], -1), tri, db, DIFF)

    for leaf in leaves:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(function, leaves, nondet_tol=0)


def test_what_is_not_used_is_zero_or_not_asked_for(device):
    attr, rast, tri, db = make_call(device=device)
    whole = results(render.interpolate, attr, rast, tri, db)
    leaf = attr.clone().requires_grad_()
    out, out_da = render.interpolate(leaf, rast, tri, db, DIFF)
    zeros = [torch.zeros_like(x) for x in (out, out_da)]
    grad = randn(out.shape, out.dtype, device, 8)
    both = torch.autograd.grad((out, out_da), leaf, (grad, zeros[1]), retain_graph=True)
    assert_bitwise_equal(torch.autograd.grad(out, leaf, grad, retain_graph=True), both)
    other = randn(out_da.shape, out.dtype, device, 9)
    both = torch.autograd.grad((out, out_da), leaf, (zeros[0], other), retain_graph=True)
    assert_bitwise_equal(torch.autograd.grad(out_da, leaf, other), both)
    assert_bitwise_equal([out.detach(), out_da.detach()], [x.detach() for x in whole[:2]])
    assert not render.interpolate(attr, rast, tri)[0].requires_grad


def test_differentials_are_only_there_where_asked_for(device):
    attr, rast, tri, db = make_call(device=device)
    out, out_da = render.interpolate(attr, rast, tri, db, "all")
    assert out_da.shape == (*rast.shape[:3], 6)
    some = render.interpolate(attr, rast, tri, db, DIFF)[1]
    assert_bitwise_equal(some, out_da.unflatten(-1, (3, 2))[..., DIFF, :].flatten(-2))
    for none in (None, db[..., :0]):
        plain, empty = render.interpolate(attr, rast, tri, none)
        assert empty.shape == (*rast.shape[:3], 0)
        assert_bitwise_equal(plain, out)
    assert render.interpolate(attr, rast, tri, db)[1].size(-1) == 0


def test_one_set_of_vertices_may_have_a_batch_dimension(device):
    attr, rast, tri, db = make_call(device=device, shared=True)
    flat = results(render.interpolate, attr, rast, tri, db)
    batched = results(render.interpolate, attr[None], rast, tri, db)
    assert batched[2].shape == (1, *attr.shape)
    assert_bitwise_equal([*batched[:2], batched[2][0], *batched[3:]], flat)


@each_float
def test_memory_layouts_change_nothing(device, dtype):
    attr, rast, tri, db = make_call(dtype=dtype, device=device)
    expected = results(render.interpolate, attr, rast, tri, db)

    for change in (turned, shifted):
        other = [change(x) for x in (attr, rast, db)]
        got = results(render.interpolate, other[0], other[1], turned(tri), other[2])
        assert_bitwise_equal(got, expected)
        assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("empty", ["images", "rows", "columns", "triangles", "vertices", "values"])
def test_empty_inputs(device, empty):
    rast = torch.zeros(2, 3, 4, 4, device=device)
    rast = {"images": rast[:0], "rows": rast[:, :0], "columns": rast[:, :, :0]}.get(empty, rast)
    tri = torch.zeros(0 if empty in ("triangles", "vertices") else 2, 3, dtype=torch.int32)
    vertices = 0 if empty == "vertices" else 5
    for lead in ((), (1,), rast.shape[:1]):
        attr = torch.ones(*lead, vertices, 0 if empty == "values" else 3, device=device)
        diff = [] if empty == "values" else DIFF
        got = results(render.interpolate, attr, rast, tri.to(device), rast, diff)
        assert got[2].shape == attr.shape and got[3].shape == got[4].shape == rast.shape
        assert all((x == 0).all() for x in got)


BAD = {"negative": -1.0, "beyond": 33.0, "half": 1.5, "nan": torch.nan, "inf": torch.inf}


@pytest.mark.parametrize("bad", BAD)
def test_triangles_that_do_not_exist_raise_on_the_cpu(bad):
    attr, rast, tri, _db = make_call()
    rast[1, 2, 3, 3] = BAD[bad]
    text = rf"^interpolate: rast must have whole numbers in \[0, 32\] as triangles, got {BAD[bad]}$"
    with pytest.raises(ValueError, match=text):
        render.interpolate(attr, rast, tri)


@pytest.mark.parametrize("vertex", [-1, 25])
def test_vertices_that_do_not_exist_raise_on_the_cpu(vertex):
    attr, rast, tri, _db = make_call()
    tri[int(rast[..., 3].max()) - 1, 1] = vertex
    text = rf"^interpolate: tri must name vertices in \[0, 25\), got {vertex}$"
    with pytest.raises(ValueError, match=text):
        render.interpolate(attr, rast, tri)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [*BAD, "vertex"])
def test_on_cuda_such_pixels_are_background_and_the_next_call_raises(bad):
    attr, rast, tri, db = make_call(device="cuda")
    truncdet.check()
    if bad == "vertex":
        number = int(rast[..., 3].max())
        tri[number - 1, 1] = 25
        wrong = rast[..., 3] == number
    else:
        wrong = torch.zeros_like(rast[..., 0], dtype=torch.bool)
        wrong[1, 2, 3] = True
        rast[wrong] = torch.tensor([0.3, 0.4, 0.0, BAD[bad]], device="cuda")
    cleared = rast.masked_fill(wrong.unsqueeze(-1), 0)
    got = results(torch.ops.truncdet.render_interpolate, attr, rast, tri, db)
    with pytest.raises(TruncdetError, match=r"^render.interpolate: an index was out of range"):
        truncdet.check()
    expected = results(torch.ops.truncdet.render_interpolate, attr, cleared, tri, db)
    truncdet.check()
    assert_bitwise_equal(got, expected)


def test_second_derivatives_are_refused(device):
    attr, rast, tri, _ = make_call(device=device)
    leaf = attr.requires_grad_()
    out, _ = render.interpolate(leaf, rast, tri)
    grad = torch.ones_like(out).requires_grad_()
    (first,) = torch.autograd.grad(out, leaf, grad, create_graph=True)
    with pytest.raises(TruncdetError, match=r"^interpolate: a second derivative is not implem"):
        first.sum().backward()


def test_opcheck(device):
    attr, rast, tri, db = make_call("one_pixel", device=device)
    ops = torch.ops.truncdet
    for rest in ((None, []), (db, []), (db, DIFF)):
        leaves = [x.clone().requires_grad_() for x in (attr, rast)]
        torch.library.opcheck(ops.render_interpolate.default, (*leaves, tri, *rest))
        out, out_da = ops.render_interpolate(attr, rast, tri, *rest)
        for wanted in ((True, True, True), (True, False, False), (False, True, False)):
            call = (out, out_da, attr, rast, tri, *rest, *wanted)
            torch.library.opcheck(ops.render_interpolate_backward.default, call)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    compiled = torch.compile(
        render.interpolate, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for shared in (False, True):
        call = make_call(device=device, shared=shared)
        assert_bitwise_equal(results(compiled, *call), results(render.interpolate, *call))


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    attr, rast, tri, db = make_call(device="cuda")
    out, out_da = torch.ops.truncdet.render_interpolate(attr, rast, tri, db, DIFF)
    call = (out, out_da, attr, rast, tri, db, DIFF, True, True, True)
    expected = torch.ops.truncdet.render_interpolate_backward(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.truncdet.render_interpolate_backward(*call)
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


def test_wrong_arguments_are_named():
    attr, rast, tri, db = make_call()
    for text, error, args in [
        ("rast must be a Tensor, got list$", TypeError, (attr, [1], tri)),
        (
            "rast must be float32 or float64, got torch.float16$",
            TypeError,
            (attr, rast.half(), tri),
        ),
        (r"rast must have shape \[N, H, W, 4\], got", ValueError, (attr, rast[0], tri)),
        (r"rast must have shape \[N, H, W, 4\], got", ValueError, (attr, rast[..., :3], tri)),
        ("attr must be a Tensor, got NoneType$", TypeError, (None, rast, tri)),
        ("attr must have rast's dtype, torch.float32, got", TypeError, (attr.double(), rast, tri)),
        (
            r"attr must have shape \[V, A\], .* got \[75\]$",
            ValueError,
            (attr[0].view(-1), rast, tri),
        ),
        (r"attr must have shape .* \[2, V, A\], got", ValueError, (attr[[0, 1, 1]], rast, tri)),
        ("attr must be on rast's device, cpu, got meta$", ValueError, (attr.to("meta"), rast, tri)),
        ("tri must be a Tensor, got int$", TypeError, (attr, rast, 3)),
        ("tri must be int32, got torch.int64$", TypeError, (attr, rast, tri.long())),
        (r"tri must have shape \[T, 3\], got \[32, 2\]$", ValueError, (attr, rast, tri[:, :2])),
        ("tri must be on rast's device, cpu, got meta$", ValueError, (attr, rast, tri.to("meta"))),
        (
            "tri must have fewer than 16777216 tri",
            ValueError,
            (attr, rast, tri[:1].expand(1 << 24, 3)),
        ),
        ("rast_db must have rast's shape, .* got", ValueError, (attr, rast, tri, db[:1])),
        ("rast_db must have rast's dtype, .* got", TypeError, (attr, rast, tri, db.double())),
        ("rast_db must be given where diff_attrs is$", ValueError, (attr, rast, tri, None, "all")),
        (
            "diff_attrs must be a list or 'all', got 'some'$",
            ValueError,
            (attr, rast, tri, db, "some"),
        ),
        (
            r"diff_attrs must be a list of int or 'all', got \[0.5\]",
            TypeError,
            (attr, rast, tri, db, [0.5]),
        ),
        (r"diff_attrs must be in \[0, 3\), got 3$", ValueError, (attr, rast, tri, db, [0, 3])),
        (r"diff_attrs must be in \[0, 3\), got -1$", ValueError, (attr, rast, tri, db, [-1])),
        (
            r"diff_attrs must name an attribute once, got \[1, 1\]",
            ValueError,
            (attr, rast, tri, db, [1, 1]),
        ),
    ]:
        with pytest.raises(error, match="^interpolate: " + text):
            render.interpolate(*args)


@compiled_kernel
def test_kernels_check_what_python_has_checked():
    attr, rast, tri, db = make_call()
    ops = torch.ops.truncdet
    for args in [
        (attr, rast[0], tri, None, []),
        (attr, rast, tri.long(), None, []),
        (attr, rast, tri[:, :2], None, []),
        (attr.double(), rast, tri, None, []),
        (attr[:, :, :, None], rast, tri, None, []),
        (attr, rast, tri, db[:1], []),
        (attr, rast, tri, None, [0]),
        (attr, rast, tri, db, [3]),
        (attr, rast, tri, db, [1, 1]),
        (attr, rast.half(), tri, None, []),
    ]:
        with pytest.raises(RuntimeError, match="interpolate: "):
            ops.render_interpolate(*args)
    out, out_da = ops.render_interpolate(attr, rast, tri, db, DIFF)
    for grads in [(out[:1], out_da), (out[..., :2], out_da), (out, out_da[..., :2]), (out_da, out)]:
        with pytest.raises(RuntimeError, match="interpolate: grad"):
            ops.render_interpolate_backward(*grads, attr, rast, tri, db, DIFF, True, True, True)
