"""roi_align_rotated: kernels are the reference bit for bit; the original's semantics hold."""

import importlib
import math

import pytest
import torch
from _frameworks import framework, requires
from exact_arithmetic import FLOATS
from roi_cases import each_dtype, each_format, needs_cuda_kernels
from rotated_cases import (
    ATOMIC,
    AUTO,
    COMPUTED,
    PAIRS,
    SHAPES,
    WIDE,
    Case,
    backward,
    each_case,
    forward,
    reference_backward,
    reference_forward,
    scheduled,
    stack_rois,
)
from torchvision.ops import roi_align as torchvision_roi_align

from truncdet import roi_align_rotated
from truncdet.testing import assert_bitwise_equal

each_aligned = pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
each_turn = pytest.mark.parametrize("clockwise", [False, True], ids=["", "clockwise"])
each_ratio = pytest.mark.parametrize("ratio", [0, 1, 2, 3], ids=lambda r: f"ratio{r}")


@each_case
@each_dtype
def test_any_shape_is_the_reference(device, case, dtype):
    input, grad, rois = case.make_input(dtype), case.make_grad(dtype), case.make_rois(dtype)
    there = [x.to(device) for x in (input, grad, rois)]
    got = forward(case, there[0], there[2])
    assert got.is_contiguous()
    assert_bitwise_equal(got.cpu(), reference_forward(case, input, rois))
    expected = reference_backward(case, grad, rois)
    for channels_last in (False, True):
        assert_bitwise_equal(backward(case, *there[1:], channels_last).cpu(), expected)


@each_dtype
@each_format
@each_aligned
@each_ratio
@each_turn
def test_every_setting_is_the_reference(device, dtype, memory_format, aligned, ratio, clockwise):
    case = Case((2, 5, 9, 13), 6, (3, 2), 0.5, ratio, aligned, clockwise)
    input, grad, rois = case.make_input(dtype), case.make_grad(dtype), case.make_rois(dtype)
    there = [x.to(device) for x in (input, grad, rois)]
    got = forward(case, there[0].contiguous(memory_format=memory_format), there[2])
    assert_bitwise_equal(got.cpu(), reference_forward(case, input, rois))
    got = backward(case, *there[1:], memory_format == torch.channels_last)
    assert got.is_contiguous(memory_format=memory_format)
    assert_bitwise_equal(got.cpu(), reference_backward(case, grad, rois))


@pytest.mark.cuda
@needs_cuda_kernels
@each_case
@each_dtype
@each_format
def test_every_schedule_gives_the_bits_of_the_cpu(case, dtype, memory_format):
    grad, rois = case.make_grad(dtype), case.make_rois(dtype)
    last = memory_format == torch.channels_last
    expected = backward(case, grad, rois, last)
    for schedule in (AUTO, WIDE, PAIRS, ATOMIC, COMPUTED):
        got = scheduled(case, grad.cuda(), rois.cuda(), schedule, last)
        if got is None:
            assert schedule in (WIDE, PAIRS, COMPUTED)
            continue
        assert_bitwise_equal(got.cpu(), expected, f"schedule {schedule}")


@pytest.mark.cuda
@needs_cuda_kernels
def test_common_shapes_fit_every_schedule():
    for name in ("odd_sizes", "65_channels", "300_rois_on_a_tile"):
        case = SHAPES[name]
        grad, rois = case.make_grad(device="cuda"), case.make_rois(device="cuda")
        for schedule in (AUTO, WIDE, PAIRS, ATOMIC, COMPUTED):
            assert scheduled(case, grad, rois, schedule) is not None


@pytest.mark.cuda
@each_case
@each_dtype
def test_the_reference_gives_the_same_bits_on_a_gpu(case, dtype):
    if case.rois > 300:
        pytest.skip("a loop over RoIs: minutes of kernel launches")
    input, grad, rois = case.make_input(dtype), case.make_grad(dtype), case.make_rois(dtype)
    there = [x.cuda() for x in (input, grad, rois)]
    got = reference_forward(case, there[0], there[2])
    assert_bitwise_equal(got.cpu(), reference_forward(case, input, rois))
    got = reference_backward(case, *there[1:])
    assert_bitwise_equal(got.cpu(), reference_backward(case, grad, rois))


@pytest.mark.cuda
@each_dtype
@each_ratio
def test_cuda_gives_the_bits_of_the_cpu_on_a_real_size(dtype, ratio):
    """More RoIs than are listed at once, two images, matrices of some thousand cells."""
    case = Case((2, 70, 50, 68), 700, (7, 7), 0.25, ratio, largest=0.4)
    input, grad, rois = case.make_input(dtype), case.make_grad(dtype), case.make_rois(dtype)
    there = [x.cuda() for x in (input, grad, rois)]
    assert_bitwise_equal(forward(case, there[0], there[2]).cpu(), forward(case, input, rois))
    assert_bitwise_equal(backward(case, *there[1:]).cpu(), backward(case, grad, rois))


@pytest.mark.cuda
@needs_cuda_kernels
def test_a_box_too_large_for_a_matrix_slows_its_image_alone():
    case = Case((2, 40, 150, 160), 30, (3, 3), ratio=2, largest=0.2)
    rois = case.make_rois()
    rois[0] = torch.tensor([1, 80, 75, 150, 140, 0.5])
    grad = case.make_grad()
    for schedule in (WIDE, PAIRS):
        got = scheduled(case, grad.cuda(), rois.cuda(), schedule)
        assert_bitwise_equal(got.cpu(), backward(case, grad, rois))


def naive(input, rois, bins, scale, ratio, aligned, clockwise):
    """The operator sample by sample in Python's floats, with no sine of ours."""
    out = torch.zeros(len(rois), input.shape[1], *bins, dtype=torch.float64)
    offset = 0.5 if aligned else 0.0
    for k, (image, cx, cy, w, h, angle) in enumerate(rois.double().tolist()):
        cx, cy, w, h = cx * scale - offset, cy * scale - offset, w * scale, h * scale
        if not aligned:
            w, h = max(w, 1.0), max(h, 1.0)
        angle = -angle if clockwise else angle
        grid_y = ratio if ratio > 0 else math.ceil(h / bins[0])
        grid_x = ratio if ratio > 0 else math.ceil(w / bins[1])
        for p in range(bins[0]):
            for q in range(bins[1]):
                for i in range(grid_y):
                    for j in range(grid_x):
                        yy = -h / 2 + (p + (i + 0.5) / grid_y) * h / bins[0]
                        xx = -w / 2 + (q + (j + 0.5) / grid_x) * w / bins[1]
                        y = yy * math.cos(angle) - xx * math.sin(angle) + cy
                        x = yy * math.sin(angle) + xx * math.cos(angle) + cx
                        out[k, :, p, q] += interpolated(input[int(image)], y, x)
        out[k] /= max(grid_y * grid_x, 1)
    return out


def interpolated(plane, y, x):
    height, width = plane.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = min(int(y), max(height - 2, 0)), min(int(x), max(width - 2, 0))
    down, right = min(top + 1, height - 1), min(left + 1, width - 1)
    ly, lx = y - top, x - left
    upper = (1 - lx) * plane[:, top, left] + lx * plane[:, top, right]
    lower = (1 - lx) * plane[:, down, left] + lx * plane[:, down, right]
    return (1 - ly) * upper + ly * lower


@each_aligned
@each_ratio
@each_turn
def test_values_and_gradients_are_those_of_a_naive_loop(device, aligned, ratio, clockwise):
    case = Case((2, 2, 9, 7), 12, (2, 3), 0.5, ratio, aligned, clockwise, largest=0.9)
    rois = case.make_rois(torch.float64)
    if aligned:  # otherwise sides are at least one
        rois[0, 3:5] = torch.tensor([0.0, 3.0])
        rois[1, 4] *= -1
    input, grad = case.make_input(torch.float64), case.make_grad(torch.float64)
    there, leaf = input.to(device).requires_grad_(), input.clone().requires_grad_()
    out = roi_align_rotated(there, rois.to(device), *case.rest_of_call)
    expected = naive(leaf, rois, *case.rest_of_call)
    assert (out.cpu() - expected).abs().max() <= 1e-13
    assert (expected.abs().amax((1, 2, 3)) > 0).sum() > 6
    (got,) = torch.autograd.grad(out, there, grad.to(device))
    (want,) = torch.autograd.grad(expected, leaf, grad)
    assert (got.cpu() - want).abs().max() <= 1e-12 * want.abs().max()


@each_aligned
@each_ratio
def test_an_angle_of_zero_is_roi_align(aligned, ratio):
    """Centre and sides instead of corners, whose difference a shift does not change."""
    case = Case((2, 3, 21, 34), 60, (7, 5), 0.25, ratio, aligned)
    rois = case.make_rois(torch.float64)
    rois[:, 5] = 0
    half = rois[:, 3:5] / 2
    boxes = torch.cat([rois[:, :1], rois[:, 1:3] - half, rois[:, 1:3] + half], 1)
    if not aligned:  # both make small boxes one pixel wide, but this one at its corner
        keep = (rois[:, 3:5] * case.scale >= 1).all(1)
        rois, boxes = rois[keep], boxes[keep]
    input = case.make_input(torch.float64)
    expected = torchvision_roi_align(input, boxes, case.bins, case.scale, ratio, aligned)
    got = roi_align_rotated(input, rois, *case.rest_of_call)
    assert (got - expected).abs().max() <= 1e-12
    assert got.abs().max() > 0.1


@each_turn
def test_a_quarter_turn_of_the_box_is_one_of_the_map(clockwise):
    """Angles turn the box counter-clockwise as seen in the image, whose y axis points down."""
    case = Case((1, 2, 12, 12), 1, (4, 3), ratio=2, clockwise=clockwise)
    input = case.make_input(torch.float64)
    turned, upright = stack_rois((0, 6, 6, 7, 5, math.pi / 2), (0, 6, 6, 7, 5, 0))[:, None].double()
    got = roi_align_rotated(input, turned, *case.rest_of_call)
    map_turned = torch.rot90(input, 1 if clockwise else -1, (2, 3))
    expected = roi_align_rotated(map_turned, upright, *case.rest_of_call)
    assert (got - expected).abs().max() <= 1e-6  # the angle is a float32
    assert not torch.allclose(got, roi_align_rotated(input, upright, *case.rest_of_call))


@requires("mmcv")
@each_aligned
@each_ratio
@each_turn
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_values_are_mmcvs(device, dtype, aligned, ratio, clockwise):
    """1e-5 of the largest feature, and as close a gradient."""
    framework("mmcv")
    operator = importlib.import_module("mmcv.ops").roi_align_rotated
    case = Case((2, 3, 41, 64), 100, (7, 5), 0.25, ratio, aligned, clockwise)
    rois, grad = case.make_rois(dtype, device), case.make_grad(dtype, device)
    input = case.make_input(dtype, device)
    ours, theirs = (input.clone().requires_grad_() for _ in range(2))
    got = roi_align_rotated(ours, rois, *case.rest_of_call)
    expected = operator(theirs, rois, *case.rest_of_call)
    assert (got - expected).abs().max() <= 1e-5 * input.abs().max()
    inside = (expected.abs().amax((1, 2, 3)) > 0).sum()
    assert 50 < inside < 100
    (a,), (b,) = (torch.autograd.grad(o, x, grad) for o, x in ((got, ours), (expected, theirs)))
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_float32_errors_are_no_larger_than_a_float_kernels():
    """Against the naive loop in float64, by the error of a float32 sum in the loop's order."""
    case = Case((1, 3, 12, 14), 40, (3, 3), ratio=2)
    rois, grad, input = case.make_rois(), case.make_grad(), case.make_input()
    leaf = input.double().requires_grad_()
    (exact,) = torch.autograd.grad(naive(leaf, rois, *case.rest_of_call), leaf, grad.double())
    got = backward(case, grad, rois)
    assert (got - exact).norm() <= 1e-6 * exact.norm()
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_features_of_every_type_take_float32_rois(device):
    case = Case((2, 3, 9, 9), 7, (2, 2))
    for dtype in FLOATS:
        rois = case.make_rois(dtype, device)
        out = roi_align_rotated(case.make_input(dtype, device), rois.float(), *case.rest_of_call)
        assert out.dtype == dtype
