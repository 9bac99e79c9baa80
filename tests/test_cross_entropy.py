"""cross_entropy: PyTorch's values and gradients, and sums over places that have no order."""

import pytest
import torch
import torch.nn.functional as F
from scatter_cases import each_dtype, random_floats, random_index
from scatter_group import assert_compiles, assert_gradients, assert_same_as, outputs_and_gradients

import truncdet
from truncdet import TruncdetError, _sticky, cross_entropy, nll_loss
from truncdet.testing import assert_bitwise_equal

SHAPES = [(5,), (7, 5), (3, 5, 4), (2, 5, 4, 6), (2, 5, 2, 3, 4), (0, 5)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
each_weight = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
each_smoothing = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])


def make_target(shape, device, ignored=-100):
    places = () if len(shape) == 1 else (shape[0], *shape[2:])
    target = random_index(places, 5, device)
    if target.numel() > 3:
        target.view(-1)[::3] = ignored
    return target


def make_weight(dtype, device, weighted):
    return torch.rand(5, dtype=dtype, device=device) + 0.1 if weighted else None


@each_shape
@each_reduction
@each_weight
@each_smoothing
def test_values_and_gradients_are_pytorchs(device, shape, reduction, weighted, smoothing):
    input = random_floats(shape, torch.float64, device, 1)
    weight = make_weight(torch.float64, device, weighted)
    for ignore_index in (-100, 1):
        target = make_target(shape, device, ignore_index)

        def through(op, target=target, ignore_index=ignore_index):
            return lambda x: op(
                x,
                target,
                weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=smoothing,
            )

        assert_same_as(through(cross_entropy), through(F.cross_entropy), input)


@each_shape
@each_reduction
@each_weight
@each_smoothing
def test_probabilities_are_pytorchs(device, shape, reduction, weighted, smoothing):
    input = random_floats(shape, torch.float64, device, 1)
    target = random_floats(shape, torch.float64, device, 0, seed=1).abs()
    weight = make_weight(torch.float64, device, weighted)

    def through(op):
        return lambda x, t: op(x, t, weight, reduction=reduction, label_smoothing=smoothing)

    assert_same_as(through(cross_entropy), through(F.cross_entropy), input, target)


@each_dtype
@each_weight
@each_smoothing
def test_float_types_are_close_to_pytorchs(device, dtype, weighted, smoothing):
    """One rounding of ours against PyTorch's sums in the type itself."""
    shape = (2, 5, 8, 9)
    input = random_floats(shape, dtype, device, 1)
    target, weight = make_target(shape, device), make_weight(dtype, device, weighted)

    def through(op):
        return lambda x: op(x, target, weight, label_smoothing=smoothing)

    ours = outputs_and_gradients(through(cross_entropy), input)
    native = outputs_and_gradients(through(F.cross_entropy), input)
    epsilon = torch.finfo(dtype).eps
    for a, b in zip(ours, native, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= 20 * epsilon * b.abs().max()


def test_the_loss_is_nll_loss_of_log_softmax(device):
    input = random_floats((2, 5, 8, 9), torch.float32, device, 1)
    target = make_target(input.shape, device)
    for reduction in ("none", "mean", "sum"):
        expected = nll_loss(input.log_softmax(1), target, reduction=reduction)
        assert_bitwise_equal(cross_entropy(input, target, reduction=reduction), expected)


@each_smoothing
def test_every_run_has_the_same_bits(device, smoothing):
    input = random_floats((2, 19, 128, 128), torch.float32, device, 1)
    target = random_index((2, 128, 128), 19, device)

    def call(x):
        return cross_entropy(x, target, label_smoothing=smoothing)

    first = outputs_and_gradients(call, input)
    for _ in range(5):
        assert_bitwise_equal(outputs_and_gradients(call, input), first)


def test_gradients(device):
    input = random_floats((2, 5, 2, 2), torch.float64, device, 0)
    target, weight = make_target(input.shape, device), make_weight(torch.float64, device, True)
    for smoothing in (0.0, 0.2):
        call = lambda x, s=smoothing: cross_entropy(x, target, weight, label_smoothing=s)  # noqa: E731
        assert_gradients(call, input)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_autocast_computes_where_pytorch_does(device, kind):
    input = torch.randn(4, 5, 2, 2, device=device, dtype=kind)
    target = make_target(input.shape, device)
    for smoothing in (0.0, 0.1):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            expected = F.cross_entropy(input, target, label_smoothing=smoothing)
            got = cross_entropy(input, target, label_smoothing=smoothing)
        assert got.dtype == expected.dtype
        assert abs(got - expected) <= 1e-5 * abs(expected)


def test_compiles_in_one_graph(device):
    input = random_floats((2, 5, 4, 4), torch.float32, device, 1)
    target, weight = make_target(input.shape, device), make_weight(torch.float32, device, True)
    for smoothing in (0.0, 0.1):
        call = lambda x, s=smoothing: cross_entropy(x, target, weight, label_smoothing=s)  # noqa: E731
        assert_compiles(call, input)


@each_smoothing
def test_a_target_out_of_range(device, smoothing):
    input = random_floats((4, 3), torch.float32, device, 1).requires_grad_()
    target = torch.tensor([0, 3, -1, 2], device=device)
    if device.type == "cpu":
        text = r"^cross_entropy: target must be in \[0, 3\) or ignore_index, -100, got 3$"
        with pytest.raises(ValueError, match=text):
            cross_entropy(input, target, label_smoothing=smoothing)
        return
    _sticky.check()
    loss = cross_entropy(input, target, label_smoothing=smoothing)
    with pytest.raises(TruncdetError, match=r"^cross_entropy: an index was out of range"):
        _sticky.check()
    (grad,) = torch.autograd.grad(loss, input)
    assert_bitwise_equal(grad[1:3], torch.zeros_like(grad[1:3]))
    used = torch.tensor([0, 3], device=device)
    assert_bitwise_equal(loss, cross_entropy(input[used], target[used], label_smoothing=smoothing))


def test_wrong_arguments_are_named():
    x, t = torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)
    for text, error, args, options in [
        ("input must be a Tensor, got list", TypeError, ([1], t), {}),
        ("target must be int64, int32 or uint8, got torch.bool", TypeError, (x, t.bool()), {}),
        (r"target must have input's shape without the c", ValueError, (x, t[:, 0]), {}),
        (
            "target must be of a floating dtype where it has input's shape, got torch.int64",
            TypeError,
            (x, x.long()),
            {},
        ),
        (
            "reduction must be 'none', 'mean' or 'sum', got 'avg'",
            ValueError,
            (x, t),
            {"reduction": "avg"},
        ),
        (
            r"label_smoothing must be in \[0, 1\], got 1.5",
            ValueError,
            (x, t),
            {"label_smoothing": 1.5},
        ),
        (
            r"label_smoothing must be in \[0, 1\], got nan",
            ValueError,
            (x, t),
            {"label_smoothing": float("nan")},
        ),
        (r"weight must have shape \[3\], got \[2\]", ValueError, (x, t, torch.ones(2)), {}),
    ]:
        with pytest.raises(error, match="^cross_entropy: " + text):
            cross_entropy(*args, **options)


def test_module(device):
    input = random_floats((2, 5, 4, 6), torch.float32, device, 1)
    target, weight = make_target(input.shape, device, 1), torch.rand(5, device=device)
    layer = truncdet.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=0.1)
    assert isinstance(layer, torch.nn.CrossEntropyLoss)
    expected = cross_entropy(input, target, weight, ignore_index=1, label_smoothing=0.1)
    assert_bitwise_equal(layer(input, target), expected)
