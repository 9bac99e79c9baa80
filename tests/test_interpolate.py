"""interpolate: torch's forward, the transpose of it backward, and what surrounds them."""

import pytest
import torch
import torch.nn.functional as F
from resample_cases import CALLS, each_call, each_dtype, interpolation_matrix, random_floats

import truncdet
from truncdet import _resample
from truncdet.testing import assert_bitwise_equal

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# What a gradient rounds to, relative to the sum of magnitudes; positions in float32 come on top.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def make_input(size, dtype, device, channels_last=False, seed=0):
    x = random_floats((2, 3, *size), dtype, device, seed)
    if channels_last and x.dim() in LAST:
        x = x.contiguous(memory_format=LAST[x.dim()])
    return x.requires_grad_()


def gradient_of(op, x, grad=None, **keywords):
    out = op(x, **keywords)
    grad = random_floats(out.shape, x.dtype, x.device, seed=1) if grad is None else grad
    return out.detach(), grad, torch.autograd.grad(out, x, grad)[0]


@each_dtype
@each_call
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
def test_forward_is_torchs_and_backward_its_transpose(
    device, dtype, mode, size, keywords, channels_last
):
    x = make_input(size, dtype, device, channels_last)
    out, grad, got = gradient_of(truncdet.interpolate, x, mode=mode, **keywords)
    theirs = F.interpolate(x.detach(), mode=mode, **keywords)
    assert_bitwise_equal(out, theirs)
    assert out.stride() == theirs.stride()
    matrix = interpolation_matrix(mode, size, keywords, device)
    flat = grad.double().flatten(2)
    expected = (flat @ matrix.T).reshape(x.shape)
    magnitude = (flat.abs() @ matrix.abs().T).reshape(x.shape)
    assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * (magnitude + 1)).all()


@each_call
def test_layouts_give_the_same_bits(device, mode, size, keywords):
    x = make_input(size, torch.float32, device)
    _, grad, expected = gradient_of(truncdet.interpolate, x, mode=mode, **keywords)
    strided = torch.stack([grad, grad], -1)[..., 0]
    assert_bitwise_equal(
        gradient_of(truncdet.interpolate, x, strided, mode=mode, **keywords)[2], expected
    )
    if x.dim() in LAST:
        last = x.detach().contiguous(memory_format=LAST[x.dim()]).requires_grad_()
        there = grad.contiguous(memory_format=LAST[x.dim()])
        got = gradient_of(truncdet.interpolate, last, there, mode=mode, **keywords)[2]
        assert_bitwise_equal(got, expected)
        assert got.is_contiguous(memory_format=LAST[x.dim()])
    ones = gradient_of(
        truncdet.interpolate,
        x,
        torch.ones((), device=device).expand(grad.shape),
        mode=mode,
        **keywords,
    )[2]
    assert_bitwise_equal(
        ones, gradient_of(truncdet.interpolate, x, torch.ones_like(grad), mode=mode, **keywords)[2]
    )


@each_call
def test_an_image_does_not_see_the_batch(device, mode, size, keywords):
    x = make_input(size, torch.float32, device)
    _, grad, both = gradient_of(truncdet.interpolate, x, mode=mode, **keywords)
    alone = x.detach()[1:].requires_grad_()
    _, _, one = gradient_of(truncdet.interpolate, alone, grad[1:], mode=mode, **keywords)
    assert_bitwise_equal(one, both[1:])


@each_call
def test_derivatives_of_both_orders(device, mode, size, keywords):
    x = make_input(size, torch.float64, device)[:1, :1].detach().requires_grad_()

    def op(x):
        return truncdet.interpolate(x, mode=mode, **keywords)

    assert torch.autograd.gradcheck(op, x, nondet_tol=0)
    assert torch.autograd.gradgradcheck(lambda x: op(x) ** 2, x, nondet_tol=0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(5, 5), (5, 20)])
def test_a_scale_that_keeps_a_size_follows_the_forward(device, mode, size):
    """torch's forwards copy or interpolate then, by device and mode; its CPU backward errs."""
    keywords = {"scale_factor": 1.1}
    x = make_input(size, torch.float64, device)
    _, grad, got = gradient_of(truncdet.interpolate, x, mode=mode, **keywords)
    matrix = interpolation_matrix(mode, size, keywords, device)
    expected = (grad.flatten(2) @ matrix.T).reshape(x.shape)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_what_is_copied():
    linear, cubic = _resample.LINEAR, _resample.CUBIC
    for kind, cells, outputs, on_cpu, on_cuda in [
        (linear, (5, 5), (5, 5), 3, 3),
        (linear, (5, 20), (5, 22), 1, 0),
        (linear, (5, 20, 3), (6, 20, 3), 6, 0),
        (cubic, (5, 5), (5, 5), 0, 3),
        (cubic, (5, 20), (5, 22), 0, 0),
        (_resample.AVERAGE, (5, 5), (5, 5), 0, 0),
    ]:
        assert _resample.copied_axes(kind, cells, outputs, False) == on_cpu
        assert _resample.copied_axes(kind, cells, outputs, True) == on_cuda


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 0.3333, 0.7, 1.0, 1.1, 7.3, 2.6, 2.9999999])
@pytest.mark.parametrize("cells", [1, 3, 10, 33, 1000])
def test_output_sizes_are_torchs(factor, cells):
    if int(cells * factor) == 0:
        pytest.skip("no output")
    x = torch.zeros(1, 1, cells)
    for recompute in (None, False, True):
        keywords = {"scale_factor": factor, "mode": "linear", "recompute_scale_factor": recompute}
        got = truncdet.interpolate(x, **keywords)
        assert got.shape == F.interpolate(x, **keywords).shape


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_is_torchs_own(device, mode):
    x = make_input((5, 7), torch.float32, device)
    got = gradient_of(truncdet.interpolate, x, size=(8, 3), mode=mode)
    assert_bitwise_equal(got, gradient_of(F.interpolate, x, size=(8, 3), mode=mode))
    assert truncdet.interpolate(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), 4).dtype == torch.uint8


def test_area_is_adaptive_average_pooling(device):
    x = make_input((5, 7), torch.float32, device)
    got = gradient_of(truncdet.interpolate, x, scale_factor=0.6, mode="area")
    pooled = gradient_of(lambda x: truncdet.adaptive_avg_pool2d(x, (3, 4)), x)
    assert_bitwise_equal(got, pooled)


def test_an_empty_batch(device):
    x = torch.zeros(0, 2, 4, 4, device=device, requires_grad=True)
    _, _, got = gradient_of(truncdet.interpolate, x, size=7, mode="bicubic")
    assert got.shape == x.shape


def test_the_module_is_the_function(device):
    x = make_input((4, 6), torch.float32, device)
    for keywords in ({"size": 9, "mode": "bilinear", "align_corners": True}, {"scale_factor": 1.5}):
        module = truncdet.Upsample(**keywords)
        assert repr(module) == repr(torch.nn.Upsample(**keywords))
        keywords = {"mode": "nearest", **keywords}
        assert_bitwise_equal(
            gradient_of(module, x), gradient_of(truncdet.interpolate, x, **keywords)
        )


# One of each mode, of those with a scale_factor where there is one.
FEW = {CALLS[i][0]: CALLS[i] for i in (1, 3, 8, 11, 13)}


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
def test_opcheck(device, mode):
    _, size, keywords = FEW[mode]
    x = make_input(size, torch.float64, device)
    out = truncdet.interpolate(x, mode=mode, **keywords).detach()
    outputs, scales = out.shape[2:], [0.0] * len(size)
    ops = torch.ops.truncdet
    torch.library.opcheck(ops.interpolate.default, (x, outputs, mode, True, scales))
    for memory in {torch.contiguous_format, LAST.get(x.dim(), torch.contiguous_format)}:
        grad = out.contiguous(memory_format=memory).requires_grad_()
        torch.library.opcheck(ops.interpolate_backward.default, (grad, x.shape, mode, True, scales))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", FEW)
def test_compiles_in_one_graph(device, dynamic, mode):
    _, size, keywords = FEW[mode]
    x = make_input(size, torch.float32, device)

    def op(x):
        return truncdet.interpolate(x, mode=mode, **keywords)

    torch._dynamo.reset()  # the cases are more than its cache holds
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_bitwise_equal(gradient_of(compiled, x), gradient_of(op, x))


def test_autocast_computes_in_the_type_that_torch_computes_in(device):
    x = make_input((4, 6), torch.bfloat16, device)
    with torch.autocast(device.type, torch.bfloat16):
        for mode in ("bilinear", "bicubic"):
            out = truncdet.interpolate(x, scale_factor=2, mode=mode)
            theirs = F.interpolate(x, scale_factor=2, mode=mode)
            assert_bitwise_equal(out.detach(), theirs.detach())
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.bfloat16


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    grad = random_floats((2, 8, 40, 60), device="cuda")
    call = (grad, (2, 8, 20, 30), "bicubic", False, [2.0, 2.0])
    expected = torch.ops.truncdet.interpolate_backward(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.truncdet.interpolate_backward(*call)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, expected)


IMAGE = torch.zeros(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "mode must be one of nearest, .*, area, got 'cubic'", {"mode": "cubic"}),
        (ValueError, "antialias must be False, .*, got True", {"antialias": True}),
        (ValueError, "input must have 3 dimensions for mode 'linear', got 4", {"mode": "linear"}),
        (ValueError, "one of size and scale_factor must be given, got neither", {"size": None}),
        (ValueError, "one of .* must be given, got both", {"scale_factor": 2}),
        (ValueError, r"size must have 2 elements, got \[3\]", {"size": [3]}),
        (TypeError, "size must be an int or one an axis, got float", {"size": 3.0}),
        (ValueError, r"sizes must be positive, got \[0, 0\]", {"size": 0}),
        (
            ValueError,
            "recompute_scale_factor must be False with a size, got True",
            {"recompute_scale_factor": True},
        ),
        (
            ValueError,
            "scale_factor must be a positive number, got nan",
            {"size": None, "scale_factor": float("nan")},
        ),
        (
            ValueError,
            r"sizes must be positive, got \[0, 8\]",
            {"size": None, "scale_factor": (0.2, 2)},
        ),
        (
            ValueError,
            "align_corners must be None for mode 'area', got True",
            {"mode": "area", "align_corners": True},
        ),
        (TypeError, "input must be float64, .*, got torch.uint8", {"input": IMAGE.byte()}),
        (TypeError, "input must be a Tensor, got list", {"input": [1.0]}),
        (
            ValueError,
            r"no empty dimension but the first, got \[1, 0, 4, 4\]",
            {"input": IMAGE[:, :0]},
        ),
    ],
    ids=lambda x: str(x)[:24] if isinstance(x, str) else "",
)
def test_wrong_arguments_are_named(error, text, arguments):
    call = {"input": IMAGE, "size": 3, "mode": "bilinear", **arguments}
    with pytest.raises(error, match=f"^interpolate: {text}$|^interpolate: .*{text}$"):
        truncdet.interpolate(**call)
