"""grid_sample as it is called: autograd, layouts, autocast, compilers, wrong arguments."""

import warnings

import pytest
import torch
from sampling_cases import each_dtype, each_way, make_case
from torch.nn import functional

import truncdet
from truncdet import TruncdetError, grid_sample
from truncdet.testing import assert_bitwise_equal

compiled_kernel = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::grid_sample_backward", "CPU"),
    reason="checks of the compiled kernels",
)


def results(op, input, grid, grad, *rest):
    """Output and both gradients."""
    leaves = [x.detach().requires_grad_() for x in (input, grid)]
    out = op(*leaves, *rest)
    return out, *torch.autograd.grad(out, leaves, grad)


@each_way
def test_gradcheck(device, way):
    input, grid, _ = make_case(way[0], torch.float64, device, n=1, places=(1, 2, 3))
    leaves = [x.requires_grad_() for x in (input, grid)]
    assert torch.autograd.gradcheck(lambda x, g: grid_sample(x, g, *way[1:]), leaves, nondet_tol=0)


@pytest.mark.parametrize("dims", [2, 3])
def test_each_gradient_alone(device, dims):
    input, grid, grad = make_case(dims, torch.float32, device)
    _, for_input, for_grid = results(grid_sample, input, grid, grad, "bilinear", "zeros", False)
    leaf = input.clone().requires_grad_()
    out = grid_sample(leaf, grid, align_corners=False)
    assert_bitwise_equal(torch.autograd.grad(out, leaf, grad)[0], for_input)
    leaf = grid.clone().requires_grad_()
    out = grid_sample(input, leaf, align_corners=False)
    assert_bitwise_equal(torch.autograd.grad(out, leaf, grad)[0], for_grid)
    assert not grid_sample(input, grid, align_corners=False).requires_grad


@each_dtype
@pytest.mark.parametrize("dims", [2, 3])
def test_memory_layouts_change_nothing(device, dtype, dims):
    input, grid, grad = make_case(dims, dtype, device, channels=5)
    expected = results(grid_sample, input, grid, grad, "bilinear", "border", True)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    strided = torch.stack([input, input * 0], -1)[..., 0]
    swapped = input.transpose(0, 1).contiguous().transpose(0, 1)
    grid = torch.stack(grid.unbind(-1)).movedim(0, -1)
    grad = grad.contiguous(memory_format=last)
    for other in (input.contiguous(memory_format=last), strided, swapped):
        assert not any(x.is_contiguous() for x in (other, grid, grad))
        got = results(grid_sample, other, grid, grad, "bilinear", "border", True)
        assert_bitwise_equal(got, expected)
        assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("empty", ["batch", "channels", "places"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_empty_inputs(device, dims, empty, mode):
    n, channels = (0 if empty == "batch" else 2), (0 if empty == "channels" else 3)
    places = (2, 3, 0) if empty == "places" else (2, 3, 5)
    case = make_case(dims, torch.float32, device, n=n, channels=channels, places=places)
    got = results(grid_sample, *case, mode, "zeros", False)
    assert [x.shape for x in got] == [case[2].shape, case[0].shape, case[1].shape]
    assert all((x == 0).all() for x in got)


def test_none_is_false_with_a_warning():
    input, grid, _ = make_case(2, torch.float32)
    with pytest.warns(UserWarning, match=r"^grid_sample: align_corners was not given and is False"):
        out = grid_sample(input, grid)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_bitwise_equal(out, grid_sample(input, grid, align_corners=False))


@pytest.mark.parametrize("first", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("second", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_autocast_casts_as_pytorch_does(device, first, second):
    input, grid, _ = make_case(2, torch.float32, device)
    input, grid = input.to(first), grid.to(second)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        try:
            expected = functional.grid_sample(input, grid, align_corners=False)
        except RuntimeError:
            # On CUDA PyTorch also refuses float16 under an autocast of bfloat16, needlessly.
            if device.type == "cpu":
                with pytest.raises(TypeError, match="grid must have input's dtype"):
                    grid_sample(input, grid, align_corners=False)
            return
        out = grid_sample(input.requires_grad_(), grid.requires_grad_(), align_corners=False)
    assert_bitwise_equal(out, expected)
    out.sum().backward()
    assert (input.grad.dtype, grid.grad.dtype) == (first, second)


def test_second_derivatives_are_refused(device):
    input, grid, grad = make_case(2, torch.float32, device)
    leaf = input.requires_grad_()
    out = grid_sample(leaf, grid, align_corners=False)
    (first,) = torch.autograd.grad(out, leaf, grad.requires_grad_(), create_graph=True)
    with pytest.raises(TruncdetError, match=r"^grid_sample: a second derivative is not implem"):
        first.sum().backward()


@pytest.mark.parametrize("dims", [2, 3])
def test_opcheck(device, dims):
    input, grid, grad = make_case(dims, torch.float32, device)
    ops = torch.ops.truncdet
    for dtype in (torch.float32, torch.float16):
        pair = [x.to(dtype) for x in (input, grid)]
        leaves = [x.clone().requires_grad_() for x in pair]
        torch.library.opcheck(ops.grid_sample.default, (*leaves, 0, 1, True))
        for wanted in ((True, True), (False, True), (True, False)):
            rest = (0, 2, False, *wanted)
            torch.library.opcheck(ops.grid_sample_backward.default, (grad.to(dtype), *pair, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    compiled = torch.compile(grid_sample, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for way in ((2, "bicubic", "reflection", True), (3, "bilinear", "zeros", False)):
        case = make_case(way[0], torch.float32, device)
        expected = results(grid_sample, *case, *way[1:])
        assert_bitwise_equal(results(compiled, *case, *way[1:]), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    input, grid, grad = make_case(2, torch.float32, "cuda", channels=40)
    rest = (0, 0, False, True, True)
    backward = torch.ops.truncdet.grid_sample_backward
    expected = backward(grad, input, grid, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(grad, input, grid, *rest)
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


def test_wrong_arguments_are_named():
    x, g = torch.zeros(2, 3, 4, 5), torch.zeros(2, 6, 7, 2)
    y, h = torch.zeros(2, 3, 4, 5, 6), torch.zeros(2, 6, 7, 8, 3)
    z = torch.zeros(2, 6, 7, 3)
    for text, error, args in [
        (r"input must be a Tensor, got list$", TypeError, ([1], g)),
        (r"grid must be float64, .* or bfloat16, got torch.int64$", TypeError, (x, g.long())),
        (r"grid must have input's dtype, torch.float32, got torch.f", TypeError, (x, g.double())),
        (
            r"mode must be one of bilinear, nearest, bicubic, got 'cubic'$",
            ValueError,
            (x, g, "cubic"),
        ),
        (r"padding_mode must be one of .*, got 'same'$", ValueError, (x, g, "nearest", "same")),
        (r"mode must be 'bilinear' or 'nearest' in three dimens", ValueError, (y, h, "bicubic")),
        (r"input must have shape .*, got \[3, 4, 5\]$", ValueError, (x[0], g)),
        (r"grid must have shape \[2, H', W', 2\], got \[2, 6, 7, 3\]$", ValueError, (x, z)),
        (r"grid must have shape \[2, H', W', 2\], got \[2, 6, 7, 8, 3\]$", ValueError, (x, h)),
        (
            r"grid must have shape \[2, D', H', W', 3\], got \[1, 6, 7, 8, 3\]$",
            ValueError,
            (y, h[:1]),
        ),
        (r"input must have cells, got shape \[2, 3, 0, 5\]$", ValueError, (x[:, :, :0], g)),
        (r"grid must be on input's device, cpu, got meta$", ValueError, (x, g.to("meta"))),
    ]:
        with pytest.raises(error, match="^grid_sample: " + text):
            grid_sample(*args, align_corners=False)


@compiled_kernel
def test_kernels_check_what_python_has_checked():
    input, grid, grad = make_case(2, torch.float32)
    backward = torch.ops.truncdet.grid_sample_backward
    flags = (False, True, True)
    for args in [
        (grad, input[0], grid, 0, 0),
        (grad, input, grid[..., :1], 0, 0),
        (grad[:, :2], input, grid, 0, 0),
        (grad[..., :2], input, grid, 0, 0),
        (grad, input[:, :, :0], grid, 0, 0),
        (grad, input.double(), grid, 0, 0),
        (grad, input, grid[:1], 0, 0),
        (grad, input, grid, 3, 0),
        (grad, input, grid, 0, -1),
    ]:
        with pytest.raises(RuntimeError, match="grid_sample: "):
            backward(*args, *flags)


def test_is_public():
    assert truncdet.grid_sample is grid_sample
