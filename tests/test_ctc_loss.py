"""ctc_loss: kernels are the reference, PyTorch's semantics hold, every bit repeats."""

import math

import pytest
import torch
import torch.nn.functional as F
from ctc_cases import each_reduction, each_size, each_zero, make_case, ops, run_both
from scatter_cases import each_dtype
from scatter_group import outputs_and_gradients

from truncdet import TruncdetError, _sticky, ctc_loss
from truncdet import _ctc_loss_reference as reference
from truncdet.testing import assert_bitwise_equal


@each_dtype
@each_size
@each_zero
def test_kernels_are_the_reference(device, dtype, size, zero_infinity):
    for blank in (0, size[2] - 1):  # with the second, blanks are among the labels
        case = make_case(size, dtype, device)
        grad = torch.linspace(-1, 2, size[1], dtype=torch.float64, device=device).to(dtype)
        assert_bitwise_equal(*run_both(case, grad, blank, zero_infinity))
        turned = (case[0].permute(2, 1, 0).contiguous().permute(2, 1, 0), *case[1:])
        assert_bitwise_equal(
            ops._ctc_loss(*turned, blank, zero_infinity)[0],
            ops._ctc_loss(*case, blank, zero_infinity)[0],
        )


@each_size
def test_hostile_values_are_the_reference(device, size):
    case = make_case(size, torch.float32, device)
    grad = torch.ones(size[1], device=device)
    grad[0] = torch.inf
    for value in (torch.nan, torch.inf, -torch.inf, -1e9, 50.0, -3e38):
        probs = case[0].clone()
        probs[size[0] // 2, :, -1] = value
        probs[0, 0] = value
        assert_bitwise_equal(*run_both((probs, *case[1:]), grad))


def test_what_is_out_of_range_is_the_reference(device):
    """Given to the primitive itself: nothing is read beyond the tensors."""
    probs, targets, inputs, wanted = make_case((12, 3, 4, 5), torch.float32, device)
    targets[0, :3] = torch.tensor([4, -1, 2**40], device=device)
    inputs[1], wanted[1], inputs[2], wanted[2] = 99, 2**40, -(2**40), -1
    assert_bitwise_equal(
        *run_both((probs, targets, inputs, wanted), torch.ones_like(probs[0, :, 0]))
    )
    if device.type == "cuda":
        with pytest.raises(TruncdetError, match=r"^ctc_loss: an index was out of range"):
            _sticky.check()


@each_size
@each_reduction
@each_zero
def test_values_and_gradients_are_pytorchs(size, reduction, zero_infinity):
    """In float64, against the CPU: its CUDA kernels read beyond the tensors for lengths of 0."""
    for seed in range(5):
        probs, *rest = make_case(size, seed=seed)

        def through(op, rest=rest):
            return lambda x: op(x, *rest, reduction=reduction, zero_infinity=zero_infinity)

        pair = [outputs_and_gradients(through(op), probs) for op in (ctc_loss, F.ctc_loss)]
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-10, atol=1e-10)


@pytest.mark.cuda
def test_cuda_values_and_gradients_are_pytorchs():
    for size in ((50, 4, 7, 9), (300, 20, 40, 30)):
        probs, targets, inputs, wanted = make_case(size, device="cuda")
        rest = (targets, inputs.clamp(min=1), wanted.clamp(min=1))
        pair = [
            outputs_and_gradients(lambda x, op=op, r=rest: op(x, *r, zero_infinity=True), probs)
            for op in (ctc_loss, F.ctc_loss)
        ]
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_losses_and_gradients_are_the_float64_ones_rounded(device, dtype):
    case = make_case((120, 4, 20, 30), dtype, device)
    loss, *saved = ops._ctc_loss(*case, 0, False)
    wide = (case[0].double(), *case[1:])
    exact, *wide_saved = ops._ctc_loss(*wide, 0, False)
    assert_bitwise_equal(loss, reference.round_double(exact, dtype))
    grad = torch.ones(4, dtype=dtype, device=device)
    got = ops.ctc_loss_backward(grad, *case, *saved, 0, False)
    expected = ops.ctc_loss_backward(grad.double(), *wide, *wide_saved, 0, False)
    assert_bitwise_equal(got, reference.round_double(expected, dtype))


def test_errors_are_inside_the_published_bound_and_below_pytorchs():
    """Against PyTorch in float64, whose own errors are as large as the first term of the bound."""
    times = 200
    probs, *rest = make_case((times, 8, 20, 40), torch.float32)
    results = []
    for op, x in ((ctc_loss, probs), (F.ctc_loss, probs), (F.ctc_loss, probs.double())):
        leaf = x.clone().requires_grad_()
        loss = op(leaf, *rest, reduction="none", zero_infinity=True)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    longest = times * probs.abs().max().double()
    for ours, native, exact in zip(*results, strict=True):
        error, theirs = ((x.double() - exact).abs() for x in (ours, native))
        assert (error <= 2 * times * 2.0**-50 * (longest + 4) + 2.0**-24 * exact.abs()).all()
        assert error.max() <= theirs.max()


def test_exponentials_and_logarithms_are_accurate():
    x = torch.linspace(-700, 700, 20001, dtype=torch.float64)
    got = reference.exp_fixed(x)
    for a, b in zip(x.tolist(), got.tolist(), strict=True):
        assert abs(b - math.exp(a)) <= 2 * math.ulp(b)
    x = torch.cat([torch.linspace(1, 3, 20001, dtype=torch.float64), got[got > 0]])
    for a, b in zip(x.tolist(), reference.log_fixed(x).tolist(), strict=True):
        assert abs(b - math.log(a)) <= 2 * math.ulp(b)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -800, 800, 0], dtype=torch.float64)
    expected = [torch.nan, torch.inf, 0.0, 0.0, torch.inf, 1.0]
    assert_bitwise_equal(reference.exp_fixed(special), torch.tensor(expected, dtype=torch.float64))
    assert reference.log_fixed(torch.ones(1, dtype=torch.float64)).item() == 0.0


@each_dtype
def test_an_item_does_not_see_the_rest_of_the_batch(device, dtype):
    probs, targets, inputs, wanted = make_case((50, 4, 7, 9), dtype, device)

    def call(case):
        def losses(x):
            return ctc_loss(x, *case[1:], reduction="none", zero_infinity=True)

        return outputs_and_gradients(losses, case[0])

    loss = ctc_loss(probs, targets, inputs, wanted, reduction="none", zero_infinity=True)
    for n in range(4):
        one = slice(n, n + 1)
        alone = call((probs[:, one], targets[one], inputs[one], wanted[one]))
        assert_bitwise_equal(alone[0], loss[one])
        less = (probs[:, one], targets[one, : int(wanted[n])], inputs[one], wanted[one])
        assert_bitwise_equal(call(less), alone)  # nor the padding of its target


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_order_of_items_changes_no_bit(device, reduction):
    case = make_case((30, 40, 5, 7), torch.float32, device)
    first = ctc_loss(*case, reduction=reduction, zero_infinity=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = torch.randperm(40, generator=generator).to(device)
        moved = (case[0][:, order], *(x[order] for x in case[1:]))
        again = ctc_loss(*moved, reduction=reduction, zero_infinity=True)
        assert_bitwise_equal(again, first)


def test_every_run_has_the_same_bits(device):
    """Many equal labels: each class of the gradient is the sum of many states."""
    probs, targets, *_ = make_case((200, 16, 4, 60), torch.float32, device)
    lengths = (torch.full((16,), 200, device=device), torch.full((16,), 60, device=device))

    def call(x):
        return ctc_loss(x, targets, *lengths)

    first = outputs_and_gradients(call, probs)
    assert first[1].isfinite().all()
    for _ in range(5):
        assert_bitwise_equal(outputs_and_gradients(call, probs), first)
