"""rasterize_gradient as it is called: autograd, layouts, compilers, wrong arguments."""

import pytest
import torch
from render_cases import (
    buffers,
    compiled_kernel,
    each_float,
    make_case,
    places,
    randn,
    shifted,
    turned,
)

import truncdet
from truncdet import TruncdetError, render
from truncdet import _render_rasterize_reference as reference
from truncdet.testing import assert_bitwise_equal

kernel = torch.ops.truncdet.render_rasterize_backward


def gradient(function, rast, pos, tri, db):
    leaf = pos.detach().requires_grad_()
    out = function(rast, leaf, tri, db)
    grads = [randn(x.shape, x.dtype, x.device, 8 + i) for i, x in enumerate(out)]
    return torch.autograd.grad(out, leaf, grads)[0]


@pytest.mark.parametrize("backward", [kernel, reference.backward], ids=["kernel", "reference"])
@pytest.mark.parametrize("shared", [False, True], ids=["instanced", "shared"])
def test_gradcheck(device, backward, shared):
    """The buffers come from the positions, by other formulas, so that there is a derivative."""
    rast, _, pos, tri = make_case("one_pixel", torch.float64, "cpu", shared)
    at = places(1, 1).expand(*rast.shape[:3], 2)

    class Rasterize(torch.autograd.Function):
        @staticmethod
        def forward(ctx, pos):
            ctx.save_for_backward(pos)
            named = tri[rast[..., 3].long() - 1].long()
            image = torch.arange(len(rast)).reshape(-1, 1, 1, 1)
            corner = pos[named] if shared else pos[image, named]
            uv, db = buffers(corner, at, 1, 1)
            return torch.cat([uv, rast[..., 2:]], -1), db

        @staticmethod
        def backward(ctx, grad, grad_db):
            args = (grad, grad_db, rast, *ctx.saved_tensors, tri)
            return backward(*(x.to(device) for x in args)).cpu()

    assert (rast[..., 3] > 0).all()
    assert torch.autograd.gradcheck(Rasterize.apply, (pos.requires_grad_(),), nondet_tol=0)


def test_buffers_come_back_as_they_are(device):
    rast, db, pos, tri = make_case("hills", device=device)
    pos.requires_grad_()
    for given in (db, None, db[..., :0]):
        out, out_db = render.rasterize_gradient(rast, pos, tri, given)
        assert out.requires_grad and out.data_ptr() == rast.data_ptr()
        assert_bitwise_equal(out, rast)
        if given is db:
            assert out_db.requires_grad and out_db.data_ptr() == db.data_ptr()
            assert_bitwise_equal(out_db, db)
        else:
            assert out_db.shape == (*rast.shape[:3], 0)
    assert not rast.requires_grad
    assert not render.rasterize_gradient(rast, pos.detach(), tri)[0].requires_grad


def test_buffers_are_data(device):
    """A buffer that has a gradient of its own does not get it twice."""
    rast, _db, pos, tri = make_case("hills", device=device)
    rast.requires_grad_()
    out, _ = render.rasterize_gradient(rast, pos.requires_grad_(), tri)
    assert torch.autograd.grad(out.sum(), (rast, pos), allow_unused=True)[0] is None


def test_each_output_alone(device):
    rast, db, pos, tri = make_case("hills", device=device)
    pos.requires_grad_()
    out, out_db = render.rasterize_gradient(rast, pos, tri, db)
    one, two = (randn(x.shape, x.dtype, device, 8 + i) for i, x in enumerate((out, out_db)))
    zero = torch.zeros_like(rast)
    for got, both in [((one, None), (one, zero)), ((None, two), (zero, two))]:
        kept = [(x, g) for x, g in zip((out, out_db), got, strict=True) if g is not None]
        (alone,) = torch.autograd.grad(kept[0][0], pos, kept[0][1], retain_graph=True)
        assert_bitwise_equal(alone, kernel(*got, rast, pos.detach(), tri))

        full = torch.autograd.grad((out, out_db), pos, both, retain_graph=True)[0]
        assert_bitwise_equal(alone, full)


def test_a_step_down_the_gradient_lowers_the_loss(device):
    """Through rasterize, interpolate and back to positions: the picture follows the target."""
    rast, _db, pos, tri = make_case("large", device=device)
    colours = randn((4, 3), device=device, dtype=torch.float32)
    height, width = rast.shape[1:3]
    at = places(height, width, torch.float32)[None].to(device)

    def picture(pos):
        shows = rast[..., 3] > 0
        named = tri[(rast[..., 3].long() - 1).clamp(min=0)].long()
        uv, _ = buffers(pos[0][named].cpu(), at.cpu(), height, width)
        seen = torch.where(shows.unsqueeze(-1), uv.to(device).detach(), 0)
        buffer = torch.cat([seen, rast[..., 2:]], -1)
        attached, _ = render.rasterize_gradient(buffer, pos, tri)
        return render.interpolate(colours, attached, tri)[0]

    with torch.no_grad():
        target = picture(pos + 0.05 * randn(pos.shape, pos.dtype, device, 9))
    pos.requires_grad_()
    losses = []
    for _ in range(5):
        loss = (picture(pos) - target).square().sum()
        (step,) = torch.autograd.grad(loss, pos)
        losses.append(loss.item())
        with torch.no_grad():
            pos -= 1e-3 * step
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]


@each_float
def test_memory_layouts_change_nothing(device, dtype):
    rast, db, pos, tri = make_case("hills", dtype, device)
    expected = gradient(render.rasterize_gradient, rast, pos, tri, db)

    for change in (turned, shifted):
        other = [change(x) for x in (rast, pos, db)]
        got = gradient(render.rasterize_gradient, other[0], other[1], turned(tri), other[2])
        assert_bitwise_equal(got, expected)
        grads = [change(randn(x.shape, dtype, device, 8 + i)) for i, x in enumerate((rast, db))]
        assert_bitwise_equal(kernel(*grads, *other[:2], tri), expected)


def test_one_set_of_vertices_may_have_a_batch_dimension(device):
    rast, db, pos, tri = make_case("hills", device=device, shared=True)
    flat = gradient(render.rasterize_gradient, rast, pos, tri, db)
    assert flat.shape == pos.shape
    assert_bitwise_equal(gradient(render.rasterize_gradient, rast, pos[None], tri, db)[0], flat)


@pytest.mark.parametrize("empty", ["images", "rows", "columns", "triangles", "vertices"])
def test_empty_inputs(device, empty):
    rast = torch.zeros(2, 3, 4, 4, device=device)
    rast = {"images": rast[:0], "rows": rast[:, :0], "columns": rast[:, :, :0]}.get(empty, rast)
    tri = torch.zeros(0 if empty in ("triangles", "vertices") else 2, 3, dtype=torch.int32)
    for lead in ((), (1,), rast.shape[:1]):
        pos = torch.ones(*lead, 0 if empty == "vertices" else 5, 4, device=device)
        got = gradient(render.rasterize_gradient, rast, pos, tri.to(device), rast)
        assert got.shape == pos.shape and (got == 0).all()


BAD = {"negative": -1.0, "beyond": 33.0, "half": 1.5, "nan": torch.nan, "inf": torch.inf}


@pytest.mark.parametrize("bad", [*BAD, "vertex"])
def test_what_does_not_exist_raises_on_the_cpu(bad):
    rast, _, pos, tri = make_case("hills")
    if bad == "vertex":
        tri[int(rast[..., 3].max()) - 1, 1] = 25
        text = r"tri must name vertices in \[0, 25\), got 25$"
    else:
        rast[1, 2, 3, 3] = BAD[bad]
        text = rf"rast must have whole numbers in \[0, 32\] as triangles, got {BAD[bad]}$"
    with pytest.raises(ValueError, match="^rasterize_gradient: " + text):
        render.rasterize_gradient(rast, pos, tri)
    with pytest.raises((ValueError, RuntimeError), match="rasterize_gradient: " + text[:20]):
        kernel(rast, None, rast, pos, tri)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [*BAD, "vertex"])
def test_on_cuda_such_pixels_are_background_and_the_next_call_raises(bad):
    rast, _, pos, tri = make_case("hills", device="cuda")
    truncdet.check()
    if bad == "vertex":
        number = int(rast[..., 3].max())
        tri[number - 1, 1] = 25
        wrong = rast[..., 3] == number
    else:
        wrong = torch.zeros_like(rast[..., 0], dtype=torch.bool)
        wrong[1, 2, 3] = True
        rast[wrong] = torch.tensor([0.3, 0.4, 0.0, BAD[bad]], device="cuda")
    grad = randn(rast.shape, rast.dtype, "cuda")
    got = kernel(grad, grad, rast, pos, tri)
    with pytest.raises(TruncdetError, match=r"^render.rasterize_gradient: an index was out of"):
        truncdet.check()
    cleared = rast.masked_fill(wrong.unsqueeze(-1), 0)
    assert_bitwise_equal(got, kernel(grad, grad, cleared, pos, tri))
    truncdet.check()


def test_second_derivatives_are_refused(device):
    rast, _, pos, tri = make_case("hills", device=device)
    out, _ = render.rasterize_gradient(rast, pos.requires_grad_(), tri)
    grad = torch.ones_like(out).requires_grad_()
    (first,) = torch.autograd.grad(out, pos, grad, create_graph=True)
    with pytest.raises(TruncdetError, match=r"^rasterize_gradient: a second derivative is not im"):
        first.sum().backward()


def test_opcheck(device):
    rast, db, pos, tri = make_case("one_pixel", device=device)
    for grads in ((rast, None), (None, db), (rast, db)):
        torch.library.opcheck(kernel.default, (*grads, rast, pos, tri))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("differentials", [False, True])
def test_compiles_in_one_graph(device, dynamic, differentials):
    function = render.rasterize_gradient
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    rast, db, pos, tri = make_case("hills", device=device)
    call = (rast, pos, tri, db if differentials else None)
    assert_bitwise_equal(gradient(compiled, *call), gradient(function, *call))


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    rast, db, pos, tri = make_case("hills", device="cuda")
    expected = kernel(rast, db, rast, pos, tri)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(rast, db, rast, pos, tri)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


def test_wrong_arguments_are_named():
    rast, db, pos, tri = make_case("hills")
    for text, error, args in [
        ("rast must be a Tensor, got list$", TypeError, ([1], pos, tri)),
        ("rast must be float32 or float64, got torch.bf", TypeError, (rast.bfloat16(), pos, tri)),
        (r"rast must have shape \[N, H, W, 4\], got", ValueError, (rast[0], pos, tri)),
        ("pos must be a Tensor, got NoneType$", TypeError, (rast, None, tri)),
        ("pos must have rast's dtype, torch.float32, got", TypeError, (rast, pos.double(), tri)),
        (
            r"pos must have shape \[V, 4\], \[1, V, 4\] or \[2, V, 4\], got \[2, 25, 3\]$",
            ValueError,
            (rast, pos[..., :3], tri),
        ),
        (r"pos must have shape .* got \[3, 25, 4\]$", ValueError, (rast, pos[[0, 1, 1]], tri)),
        ("pos must be on rast's device, cpu, got meta$", ValueError, (rast, pos.to("meta"), tri)),
        ("tri must be int32, got torch.int64$", TypeError, (rast, pos, tri.long())),
        (r"tri must have shape \[T, 3\], got \[96\]$", ValueError, (rast, pos, tri.view(-1))),
        ("rast_db must be a Tensor, got str$", TypeError, (rast, pos, tri, "all")),
        ("rast_db must have rast's shape, .* got", ValueError, (rast, pos, tri, db[..., :2])),
    ]:
        with pytest.raises(error, match="^rasterize_gradient: " + text):
            render.rasterize_gradient(*args)


@compiled_kernel
def test_kernels_check_what_python_has_checked():
    rast, db, pos, tri = make_case("hills")
    for args in [
        (rast[:1], None, rast, pos, tri),
        (None, db[..., :2], rast, pos, tri),
        (rast.double(), None, rast, pos, tri),
        (rast, None, rast, pos[..., :3], tri),
        (rast, None, rast, pos[0, 0], tri),
        (rast, None, rast, pos, tri.long()),
        (rast, None, rast, pos.double(), tri),
    ]:
        with pytest.raises(RuntimeError, match="rasterize_gradient: "):
            kernel(*args)
