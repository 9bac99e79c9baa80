"""adaptive_avg_pool1d, 2d and 3d: torch's forward, the transpose of it backward."""

import pytest
import torch
import torch.nn.functional as F
from resample_cases import each_dtype, random_floats

import truncdet
from truncdet.testing import assert_bitwise_equal

# input sizes, windows
SHAPES = [
    ((9,), (4,)),
    ((5,), (11,)),
    ((12, 15), (4, 5)),
    ((12, 16), (7, 7)),
    ((5, 7), (1, 1)),
    ((3, 2), (7, 5)),
    ((1, 9), (3, 2)),
    ((4, 6, 5), (2, 6, 3)),
    ((3, 4, 5), (1, 1, 1)),
    ((2, 3, 4), (5, 2, 7)),
]
each_shape = pytest.mark.parametrize(("size", "windows"), SHAPES, ids=str)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pool_of(library, size):
    return getattr(library, f"adaptive_avg_pool{len(size)}d")


def run(op, x, windows, grad=None):
    out = op(x, windows)
    grad = random_floats(out.shape, x.dtype, x.device, seed=1) if grad is None else grad
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


@each_dtype
@each_shape
@pytest.mark.parametrize("batch", [(2, 3), (3,)], ids=["batch", "alone"])
def test_forward_is_torchs_and_backward_its_transpose(device, dtype, size, windows, batch):
    x = random_floats((*batch, *size), dtype, device).requires_grad_()
    out, got = run(pool_of(truncdet, size), x, windows)
    assert_bitwise_equal(out, pool_of(F, size)(x.detach(), windows))
    count = x[(0,) * len(batch)].numel()
    units = torch.eye(count, dtype=torch.float64, device=device).reshape(count, 1, *size)
    matrix = pool_of(F, size)(units, windows).flatten(1)
    grad = random_floats(out.shape, dtype, device, seed=1).double().flatten(len(batch))
    expected = (grad @ matrix.T).reshape(x.shape)
    magnitude = (grad.abs() @ matrix.T).reshape(x.shape)
    assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * (magnitude + 1e-2)).all()


@each_shape
def test_cpu_float32_windows_that_tile_give_torchs_bits(size, windows):
    """Without overlap a cell is one quotient, rounded as torch rounds it."""
    if (
        len(size) != 2
        or any(n % w for n, w in zip(size, windows, strict=True))
        or windows == (1, 1)
    ):
        pytest.skip("windows overlap, or torch takes the mean")
    x = random_floats((2, 3, *size)).requires_grad_()
    assert_bitwise_equal(
        run(truncdet.adaptive_avg_pool2d, x, windows), run(F.adaptive_avg_pool2d, x, windows)
    )


@each_shape
def test_layouts_and_batches_give_the_same_bits(device, size, windows):
    x = random_floats((2, 3, *size), device=device).requires_grad_()
    op = pool_of(truncdet, size)
    out, expected = run(op, x, windows)
    grad = random_floats(out.shape, device=device, seed=1)
    assert_bitwise_equal(run(op, x, windows, torch.stack([grad, grad], -1)[..., 0])[1], expected)
    alone = x.detach()[1:].requires_grad_()
    assert_bitwise_equal(run(op, alone, windows, grad[1:])[1], expected[1:])
    if len(size) > 1:
        order = torch.channels_last if len(size) == 2 else torch.channels_last_3d
        last = x.detach().contiguous(memory_format=order).requires_grad_()
        there = grad.contiguous(memory_format=order)
        assert_bitwise_equal(run(op, last, windows, there)[1], expected)
        # torch's average of a channels_last image may differ from that of a contiguous one.
        assert_bitwise_equal(op(last, windows).detach(), pool_of(F, size)(last.detach(), windows))


@each_shape
def test_derivatives_of_both_orders(device, size, windows):
    x = random_floats((1, 2, *size), torch.float64, device).requires_grad_()

    def op(x):
        return pool_of(truncdet, size)(x, windows)

    assert torch.autograd.gradcheck(op, x, nondet_tol=0)
    assert torch.autograd.gradgradcheck(lambda x: op(x) ** 2, x, nondet_tol=0)


def test_the_size_of_an_axis_can_be_kept(device):
    x = random_floats((2, 4, 5), device=device)
    for windows in ((None, 3), (2, None), None, 3):
        got = truncdet.adaptive_avg_pool2d(x, windows)
        assert_bitwise_equal(got, F.adaptive_avg_pool2d(x, windows if windows else (None, None)))


def test_empty_batches_and_no_windows(device):
    for shape, windows in (((0, 2, 4, 4), 3), ((2, 3, 4, 4), (0, 2))):
        x = torch.ones(shape, device=device, requires_grad=True)
        out, got = run(truncdet.adaptive_avg_pool2d, x, windows)
        assert out.numel() == 0
        assert_bitwise_equal(got, torch.zeros(shape))


def test_modules_are_the_functions(device):
    for spatial, windows in ((1, 3), (2, (3, 2)), (3, (2, None, 4))):
        x = random_floats((2, 3, *(5,) * spatial), device=device).requires_grad_()
        module = getattr(truncdet, f"AdaptiveAvgPool{spatial}d")(windows)
        assert repr(module) == repr(getattr(torch.nn, f"AdaptiveAvgPool{spatial}d")(windows))
        function = pool_of(truncdet, (0,) * spatial)
        expected = run(function, x, windows)
        assert_bitwise_equal(run(lambda x, _, m=module: m(x), x, None), expected)


@pytest.mark.parametrize("spatial", [2, 3])
def test_opcheck(device, spatial):
    x = random_floats((2, 3, *(5,) * spatial), torch.float64, device).requires_grad_()
    forward = getattr(torch.ops.truncdet, f"adaptive_avg_pool{spatial}d").default
    backward = getattr(torch.ops.truncdet, f"adaptive_avg_pool{spatial}d_backward").default
    windows = [2] * spatial
    torch.library.opcheck(forward, (x, windows))
    grad = forward(x, windows).detach()
    orders = (torch.contiguous_format, (torch.channels_last, torch.channels_last_3d)[spatial - 2])
    for order in orders:
        grad = grad.contiguous(memory_format=order).requires_grad_()
        torch.library.opcheck(backward, (grad, x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("size", "windows"), SHAPES[1::3], ids=str)
def test_compiles_in_one_graph(device, dynamic, size, windows):
    x = random_floats((2, 3, *size), device=device).requires_grad_()
    op = pool_of(truncdet, size)
    torch._dynamo.reset()  # the cases are more than its cache holds
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_bitwise_equal(run(compiled, x, windows), run(op, x, windows))


def test_autocast_computes_in_the_type_that_torch_computes_in(device):
    with torch.autocast(device.type, torch.bfloat16):
        for spatial in (1, 2, 3):
            x = random_floats((2, 3, *(5,) * spatial), torch.bfloat16, device).requires_grad_()
            got = run(pool_of(truncdet, (0,) * spatial), x, 3, None)[0]
            assert_bitwise_equal(got, pool_of(F, (0,) * spatial)(x.detach(), 3))


@pytest.mark.parametrize(
    ("error", "text", "shape", "windows"),
    [
        (ValueError, "input must have 3 or 4 dimensions, got 2", (4, 4), 2),
        (ValueError, r"no empty dimension but the batch, got \[2, 3, 0, 4\]", (2, 3, 0, 4), 2),
        (ValueError, r"no empty dimension but the batch, got \[0, 4, 4\]", (0, 4, 4), 2),
        (ValueError, r"output_size must have 2 elements, got \[2\]", (3, 4, 4), (2,)),
        (ValueError, "output_size must not be negative, got -1", (3, 4, 4), (2, -1)),
        (TypeError, "output_size must be an int, None or .*, got float", (3, 4, 4), 2.0),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("op", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_wrong_arguments_are_named(op, error, text, shape, windows):
    with pytest.raises(error, match=f"^{op}: (input must have )?{text}$"):
        getattr(truncdet, op)(torch.zeros(shape), windows)


def test_wrong_types_are_named():
    for op in ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d"):
        x = torch.zeros(2, 4, 4)
        with pytest.raises(TypeError, match=rf"^{op}: input must be float64, .* got torch.int64$"):
            getattr(truncdet, op)(x.long(), 2)
        with pytest.raises(TypeError, match=f"^{op}: input must be a Tensor, got int$"):
            getattr(truncdet, op)(3, 2)
