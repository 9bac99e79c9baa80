"""adaptive_max_pool2d: torch's forward and indices, gradients added in a fixed order."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from exact_arithmetic import fractions_of, half_ulp
from resample_cases import each_dtype, random_floats

import truncdet
from truncdet._adaptive_max_pool import backward_reference
from truncdet.testing import assert_bitwise_equal

# input size, windows: tiling, overlapping, more windows than cells, one of each, wider than a band,
# more windows than a block keeps
SHAPES = [
    ((6, 8), (3, 4)),
    ((5, 7), (3, 4)),
    ((9, 16), (7, 7)),
    ((3, 4), (8, 11)),
    ((1, 1), (5, 6)),
    ((6, 5), (1, 1)),
    ((2, 20000), (3, 30)),
    ((300, 301), (7, 13)),
    ((33, 35), (40, 50)),
]
each_shape = pytest.mark.parametrize(("size", "windows"), SHAPES, ids=str)


def levels(shape, dtype, device, seed=0):
    """Few different values, so that windows meet in the same cells, and ties are common."""
    return (random_floats(shape, seed=seed) * 2).round().to(dtype).to(device)


def run(op, x, windows, grad=None):
    out = op(x, windows)
    grad = random_floats(out.shape, x.dtype, x.device, seed=1) if grad is None else grad
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


@each_dtype
@each_shape
@pytest.mark.parametrize("batch", [(2, 3), (3,)], ids=["batch", "alone"])
def test_forward_is_torchs_and_backward_sends_to_its_indices(device, dtype, size, windows, batch):
    x = levels((*batch, *size), dtype, device).requires_grad_()
    got = truncdet.adaptive_max_pool2d(x, windows, return_indices=True)
    theirs = F.adaptive_max_pool2d(x.detach(), windows, return_indices=True)
    assert_bitwise_equal([got[0].detach(), got[1]], list(theirs))
    grad = random_floats(got[0].shape, dtype, device, seed=1)
    (gradient,) = torch.autograd.grad(got[0], x, grad)
    planes = x.shape[:-2].numel()
    flat = grad.double().reshape(planes, -1)
    sums = torch.zeros(planes, size[0] * size[1], dtype=torch.float64, device=device)
    expected = sums.scatter_add(1, got[1].reshape(planes, -1), flat).reshape(x.shape)
    magnitude = sums.scatter_add(1, got[1].reshape(planes, -1), flat.abs()).reshape(x.shape)
    unit = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    assert ((gradient.double() - expected).abs() <= unit[dtype] * magnitude).all()


@each_dtype
@each_shape
def test_kernel_equals_reference(device, dtype, size, windows):
    x = levels((3, *size), dtype, "cpu")
    _, indices = F.adaptive_max_pool2d(x, windows, return_indices=True)
    grad = random_floats(indices.shape, dtype)
    grad[0, 0, 0], grad[1, -1, -1], grad[2, 0, -1] = torch.nan, torch.inf, -torch.inf
    got = torch.ops.truncdet._max_pool_backward(grad.to(device), indices.to(device), *size)
    assert_bitwise_equal(got, backward_reference(grad, indices, *size))


def test_gradients_are_added_row_by_row(device):
    """One cell in all four windows; another order of these four gives another sum."""
    grad = torch.tensor([[[1.0, 2.0**25], [-(2.0**25), 2.0**-3]]], device=device)
    indices = torch.full((1, 2, 2), 4, device=device)
    got = torch.ops.truncdet._max_pool_backward(grad, indices, 3, 3)
    values = grad.flatten().tolist()
    total = torch.tensor(0.0)
    for value in values:
        total = total + torch.tensor(value)
    assert got[0, 1, 1].item() == total.item() == 0.125
    assert sum(reversed(values), 0.0) != total
    assert int((got != 0).sum()) == 1


def test_an_index_that_the_forward_cannot_give_receives_nothing(device):
    grad = torch.ones(1, 2, 2, device=device)
    for wrong in (-1, 16, 1 << 40, 15):
        indices = torch.tensor([[[wrong, 3], [12, 15]]], device=device)
        got = torch.ops.truncdet._max_pool_backward(grad, indices, 4, 4)
        assert got.flatten().nonzero().flatten().tolist() == [3, 12, 15]
        assert got.sum() == 3


@each_dtype
@pytest.mark.parametrize("spread", [0, 20])
def test_the_published_bound_holds(device, dtype, spread):
    """All windows of a 1 x 1 image choose its cell."""
    power = 2.0 ** -(torch.arange(40) * 17 % (spread + 1)).double()
    grad = (random_floats((40,), torch.float64) * power).to(dtype).reshape(1, 5, 8)
    indices = torch.zeros(1, 5, 8, dtype=torch.int64)
    got = torch.ops.truncdet._max_pool_backward(grad.to(device), indices.to(device), 1, 1)
    values = fractions_of(grad)
    unit = Fraction(2) ** (-53 if dtype == torch.float64 else -24)
    bound = Fraction(101, 100) * 39 * unit * sum(map(abs, values))
    total = sum(values)
    if dtype not in (torch.float32, torch.float64):
        bound += half_ulp(abs(total) + bound, dtype)
    assert abs(fractions_of(got.cpu())[0] - total) <= bound


@each_shape
def test_layouts_and_batches_give_the_same_bits(device, size, windows):
    x = levels((2, 3, *size), torch.float32, device).requires_grad_()
    op = truncdet.adaptive_max_pool2d
    out, expected = run(op, x, windows)
    grad = random_floats(out.shape, device=device, seed=1)
    for layout in (
        grad.contiguous(memory_format=torch.channels_last),
        torch.stack([grad, grad], -1)[..., 0],
    ):
        assert_bitwise_equal(run(op, x, windows, layout)[1], expected)
    last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert_bitwise_equal(run(op, last, windows, grad)[1], expected)
    alone = x.detach()[1:].requires_grad_()
    assert_bitwise_equal(run(op, alone, windows, grad[1:])[1], expected[1:])


@pytest.mark.parametrize(("size", "windows"), SHAPES[:5], ids=str)
def test_derivatives_of_both_orders(device, size, windows):
    x = random_floats((1, 2, *size), torch.float64, device).requires_grad_()

    def op(x):
        return truncdet.adaptive_max_pool2d(x, windows)

    assert torch.autograd.gradcheck(op, x, nondet_tol=0)
    assert torch.autograd.gradgradcheck(lambda x: op(x) ** 2, x, nondet_tol=0)


def test_empty_batches_and_no_windows(device):
    for shape, windows in (((0, 2, 4, 4), 3), ((2, 3, 4, 4), (0, 2))):
        x = torch.ones(shape, device=device, requires_grad=True)
        out, got = run(truncdet.adaptive_max_pool2d, x, windows)
        assert out.numel() == 0
        assert_bitwise_equal(got, torch.zeros(shape))


def test_the_module_is_the_function(device):
    x = levels((2, 3, 5, 6), torch.float32, device).requires_grad_()
    module = truncdet.AdaptiveMaxPool2d((3, None))
    assert_bitwise_equal(
        run(lambda x, _: module(x), x, None), run(truncdet.adaptive_max_pool2d, x, (3, None))
    )
    out, indices = truncdet.AdaptiveMaxPool2d(2, return_indices=True)(x)
    expected = truncdet.adaptive_max_pool2d(x, 2, return_indices=True)
    assert_bitwise_equal([out.detach(), indices], [expected[0].detach(), expected[1]])


def test_opcheck(device):
    x = random_floats((2, 3, 5, 6), torch.float64, device).requires_grad_()
    torch.library.opcheck(torch.ops.truncdet.adaptive_max_pool2d.default, (x, [3, 4]))
    out, indices = torch.ops.truncdet.adaptive_max_pool2d(x, [3, 4])
    grad = out.detach().requires_grad_()
    operator = torch.ops.truncdet.adaptive_max_pool2d_backward.default
    torch.library.opcheck(operator, (grad, indices, x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    x = levels((2, 3, 5, 7), torch.float32, device).requires_grad_()
    torch._dynamo.reset()  # the cases are more than its cache holds
    compiled = torch.compile(
        truncdet.adaptive_max_pool2d, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    assert_bitwise_equal(run(compiled, x, (3, 4)), run(truncdet.adaptive_max_pool2d, x, (3, 4)))


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    grad = random_floats((6, 7, 7), device="cuda")
    indices = torch.zeros(6, 7, 7, dtype=torch.int64, device="cuda")
    expected = torch.ops.truncdet._max_pool_backward(grad, indices, 20, 30)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.truncdet._max_pool_backward(grad, indices, 20, 30)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, expected)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_max_pool_backward", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    grad, indices = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.int64)
    for arguments in [
        (grad[0], indices, 4, 4),
        (grad, indices[:, :1], 4, 4),
        (grad, indices.int(), 4, 4),
        (grad.transpose(1, 2), indices.transpose(1, 2), 4, 4),
        (grad, indices, -1, 4),
        (grad, indices, 4, 1 << 30),
    ]:
        with pytest.raises(RuntimeError, match="_max_pool_backward: "):
            torch.ops.truncdet._max_pool_backward(*arguments)
