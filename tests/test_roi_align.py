"""roi_align: kernels are the reference bit for bit, near torchvision, inside the error bound."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from roi_cases import (
    ATOMIC,
    AUTO,
    PAIRS,
    SHAPES,
    WIDE,
    Case,
    backward,
    each_aligned,
    each_case,
    each_dtype,
    each_format,
    each_ratio,
    forward,
    needs_cuda_kernels,
    reference_backward,
    reference_forward,
    scheduled,
    weights,
)
from torchvision.ops import roi_align as torchvision_roi_align

from truncdet import fixedpoint, roi_align
from truncdet.testing import assert_bitwise_equal


@each_dtype
@each_format
@each_aligned
@each_ratio
def test_forward_is_the_reference(device, dtype, memory_format, aligned, ratio):
    case = Case((2, 5, 9, 13), 6, (3, 2), 0.5, ratio, aligned)
    input, boxes = case.make_input(dtype), case.make_boxes(dtype)
    there = input.to(device).contiguous(memory_format=memory_format)
    got = forward(case, there, boxes.to(device))
    assert got.is_contiguous()
    assert_bitwise_equal(got, reference_forward(case, input, boxes))


@each_dtype
@each_format
@each_aligned
@each_ratio
def test_backward_is_the_reference(device, dtype, memory_format, aligned, ratio):
    case = Case((2, 5, 9, 13), 6, (3, 2), 0.5, ratio, aligned)
    grad, boxes = case.make_grad(dtype), case.make_boxes(dtype)
    last = memory_format == torch.channels_last
    got = backward(case, grad.to(device), boxes.to(device), last)
    assert got.is_contiguous(memory_format=memory_format)
    assert_bitwise_equal(got, reference_backward(case, grad, boxes))


@each_case
@each_dtype
def test_any_shape_is_the_reference(device, case, dtype):
    input, grad, boxes = case.make_input(dtype), case.make_grad(dtype), case.make_boxes(dtype)
    there = [x.to(device) for x in (input, grad, boxes)]
    assert_bitwise_equal(forward(case, there[0], there[2]), reference_forward(case, input, boxes))
    expected = reference_backward(case, grad, boxes)
    assert_bitwise_equal(backward(case, *there[1:]), expected)
    assert_bitwise_equal(backward(case, *there[1:], channels_last=True), expected)


@pytest.mark.cuda
@needs_cuda_kernels
@each_case
@each_dtype
@each_format
def test_every_schedule_gives_the_bits_of_the_cpu(case, dtype, memory_format):
    grad, boxes = case.make_grad(dtype), case.make_boxes(dtype)
    last = memory_format == torch.channels_last
    expected = backward(case, grad, boxes, last)
    for schedule in (AUTO, WIDE, PAIRS, ATOMIC):
        got = scheduled(case, grad.cuda(), boxes.cuda(), schedule, last)
        if got is None:
            assert schedule in (WIDE, PAIRS)
            continue
        assert_bitwise_equal(got.cpu(), expected, f"schedule {schedule}")


@pytest.mark.cuda
@needs_cuda_kernels
def test_common_shapes_fit_every_schedule():
    for name in ("odd_sizes", "65_channels", "300_rois_on_a_tile"):
        case = SHAPES[name]
        for schedule in (AUTO, WIDE, PAIRS, ATOMIC):
            grad, boxes = case.make_grad(device="cuda"), case.make_boxes(device="cuda")
            assert scheduled(case, grad, boxes, schedule) is not None


@pytest.mark.cuda
@each_case
@each_dtype
def test_the_reference_gives_the_same_bits_on_a_gpu(case, dtype):
    if case.rois > 300 or case.shape[3] > 300:
        pytest.skip("a loop over rows and RoIs: minutes of kernel launches")
    input, grad, boxes = case.make_input(dtype), case.make_grad(dtype), case.make_boxes(dtype)
    there = [x.cuda() for x in (input, grad, boxes)]
    got = reference_forward(case, there[0], there[2])
    assert_bitwise_equal(got.cpu(), reference_forward(case, input, boxes))
    got = reference_backward(case, *there[1:])
    assert_bitwise_equal(got.cpu(), reference_backward(case, grad, boxes))


@pytest.mark.cuda
@each_dtype
def test_cuda_gives_the_bits_of_the_cpu_on_a_real_size(dtype):
    case = Case((2, 40, 50, 68), 300, (7, 7), 0.25, largest=0.4)
    input, grad, boxes = case.make_input(dtype), case.make_grad(dtype), case.make_boxes(dtype)
    there = [x.cuda() for x in (input, grad, boxes)]
    assert_bitwise_equal(forward(case, there[0], there[2]).cpu(), forward(case, input, boxes))
    assert_bitwise_equal(backward(case, *there[1:]).cpu(), backward(case, grad, boxes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@each_aligned
@each_ratio
def test_forward_is_near_torchvision(device, dtype, aligned, ratio):
    """1e-5 of the largest feature: coordinates are rounded float32 numbers in both."""
    case = Case((2, 3, 21, 34), 200, (7, 5), 0.25, ratio, aligned)
    input, boxes = case.make_input(dtype, device), case.make_boxes(dtype, device)
    expected = torchvision_roi_align(input, boxes, case.bins, case.scale, ratio, aligned)
    # Boxes wholly and partly outside, and wholly inside, or the comparison proves little.
    _, wy, wx = weights(case, boxes)
    inside = (wy.sum((1, 2)) * wx.sum((1, 2)) > 0).sum().item()
    assert 0 < inside < case.rois
    got = roi_align(input, boxes, case.bins, case.scale, ratio, aligned)
    assert (got - expected).abs().max() <= 1e-5 * input.abs().max()


@pytest.mark.parametrize("count", [(0, 0), (3, 0), (2, 4)], ids=str)
def test_boxes_may_be_a_list(device, count):
    case = Case((2, 3, 9, 9), sum(count), (2, 2))
    boxes = case.make_boxes(device=device)
    boxes[:, 0] = torch.tensor([0.0] * count[0] + [1.0] * count[1])
    parts = list(boxes[:, 1:].split(count))
    input = case.make_input(device=device)
    expected = roi_align(input, boxes, case.bins, aligned=True)
    assert_bitwise_equal(roi_align(input, parts, case.bins, aligned=True), expected)
    assert_bitwise_equal(roi_align(input, tuple(parts), case.bins, aligned=True), expected)


@each_dtype
def test_error_stays_inside_the_published_bound(device, dtype):
    """Against the exact sum of the contributions, each a number of the type it is computed in."""
    case = Case((2, 2, 5, 6), 30, (2, 3))
    grad, boxes = case.make_grad(dtype), case.make_boxes(dtype)
    got = backward(case, grad.to(device), boxes.to(device)).cpu()
    contribution = contributions(case, grad, boxes)
    image = weights(case, boxes)[0]
    limbs = 2 if dtype == torch.float64 else 1
    for i in range(2):
        own = (image == i).nonzero()[:, 0]
        g = fixedpoint.headroom(len(own) * 6)
        amax = max(map(abs, fractions_of(grad[own])))
        parts = [fractions_of(contribution[k]) for k in own]
        exact = [sum(cell) for cell in zip(*parts, strict=True)]
        assert len(exact) == got[i].numel()
        for result, total in zip(fractions_of(got[i]), exact, strict=True):
            quantised = len(own) * amax * Fraction(2) ** (limbs * (g - 62))
            assert abs(result - total) <= quantised + half_ulp(result, dtype)


def contributions(case, grad, boxes):
    """[K, C, H, W]: what each RoI sends to each cell, in the written order of operations."""
    _, wy, wx = weights(case, boxes)
    g = grad.to(wy.dtype)
    out = g.new_zeros(case.rois, *case.shape[1:])
    for p in range(case.bins[0]):
        for q in range(case.bins[1]):
            weight = wy[:, p, :, None] * wx[:, q, None, :]
            out = out + weight[:, None] * g[:, :, p, q, None, None]
    return out


@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("rois", [40, 400])
def test_errors_are_near_those_of_float32_accumulation(device, ratio, rois):
    """Both round the same coordinates to float32, which is most of the error."""
    # Enough channels that the largest error is no single draw.
    case = Case((2, 32, 25, 34), rois, (7, 7), 0.25, ratio, largest=0.5)
    input, grad, boxes = (
        f(device=device) for f in (case.make_input, case.make_grad, case.make_boxes)
    )

    def run(op, dtype):
        x = input.to(dtype).requires_grad_()
        out = op(x, boxes.to(dtype), case.bins, case.scale, ratio, True)
        return out.detach().double(), torch.autograd.grad(out, x, grad.to(dtype))[0].double()

    truth, native = (
        run(torchvision_roi_align, torch.float64),
        run(torchvision_roi_align, torch.float32),
    )
    ours = run(roi_align, torch.float32)
    for name, expected, theirs, got in zip(
        ("output", "gradient"), truth, native, ours, strict=True
    ):
        for norm in (torch.inf, 2):
            limit = 1.25 * torch.linalg.vector_norm(theirs - expected, norm)
            error = torch.linalg.vector_norm(got - expected, norm)
            assert 0 < error <= limit, f"{name}, norm {norm}: {error} against {limit / 1.25}"


@each_dtype
def test_gradients_sum_to_the_weights_handed_out(device, dtype):
    """A map of ones pools to ones, and a bin inside the map hands out exactly what it receives."""
    boxes = torch.tensor([[0, 1.0, 1.0, 5.0, 5.0], [0, 2.0, 2.0, 4.0, 6.0]], device=device)
    input = torch.ones(1, 2, 8, 8, dtype=dtype, device=device, requires_grad=True)
    out = roi_align(input, boxes, 2, sampling_ratio=2)
    assert_bitwise_equal(out, torch.ones_like(out))
    (grad,) = torch.autograd.grad(out.sum(), input)
    assert grad.sum() == 2 * 2 * 2 * 2
