"""roi_align with pool_mode='max': a bin's largest sample, gradient to its corners."""

import math
from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, nearest_word, words_of
from roi_cases import (
    ONE_CELL_BOX,
    SHAPES,
    Case,
    each_aligned,
    each_dtype,
    each_format,
    each_ratio,
    permutations,
    stack_boxes,
    values,
)
from scatter_cases import CANCELLING

from truncdet import _roi_align_max_reference as reference
from truncdet import roi_align
from truncdet.testing import assert_bitwise_equal

OPS = torch.ops.truncdet
CASE = Case((3, 2, 8, 9), 24, (2, 3))
# The reference visits sample by sample.
SMALL = {
    name: case
    for name, case in SHAPES.items()
    if case.rois * math.prod(case.bins) < 300 and max(case.shape[2:]) < 100
}


def forward(case, input, boxes):
    return OPS.roi_align_max(input, boxes, *case.rest)


def backward(case, grad, argmax, boxes, channels_last=False):
    return OPS.roi_align_max_backward(grad, argmax, boxes, *case.shape, *case.rest, channels_last)


def pooled(case, input, boxes):
    """Through the public function."""
    return roi_align(input, boxes, *case.rest_of_call, "max")


def gradient(case, input, grad, boxes):
    x = input.detach().requires_grad_()
    out = pooled(case, x, boxes)
    return torch.autograd.grad(out, x, grad)[0]


@each_dtype
@each_format
@each_aligned
@each_ratio
def test_the_kernel_is_the_reference(device, dtype, memory_format, aligned, ratio):
    case = Case((2, 3, 9, 13), 5, (3, 2), 0.5, ratio, aligned)
    check_against_the_reference(device, case, dtype, memory_format)


@each_dtype
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_any_shape_is_the_reference(device, case, dtype):
    check_against_the_reference(device, case, dtype, torch.contiguous_format)


def check_against_the_reference(device, case, dtype, memory_format):
    input, grad, boxes = case.make_input(dtype), case.make_grad(dtype), case.make_boxes(dtype)
    there = input.to(device).contiguous(memory_format=memory_format)
    out, argmax = forward(case, there, boxes.to(device))
    expected = reference.forward(input, boxes, *case.rest)
    assert_bitwise_equal((out, argmax), expected)
    last = memory_format == torch.channels_last
    got = backward(case, grad.to(device), argmax, boxes.to(device), last)
    assert got.is_contiguous(memory_format=memory_format)
    args = (grad, expected[1], boxes, *case.shape, *case.rest, last)
    assert_bitwise_equal(got, reference.backward(*args))


@pytest.mark.cuda
@each_dtype
def test_cuda_gives_the_bits_of_the_cpu_on_a_real_size(dtype):
    case = Case((2, 40, 50, 68), 300, (7, 7), 0.25, largest=0.4)
    input, grad, boxes = case.make_input(dtype), case.make_grad(dtype), case.make_boxes(dtype)
    here = forward(case, input, boxes)
    there = forward(case, input.cuda(), boxes.cuda())
    assert_bitwise_equal([x.cpu() for x in there], list(here))
    got = backward(case, grad.cuda(), there[1], boxes.cuda())
    assert_bitwise_equal(got.cpu(), backward(case, grad, here[1], boxes))


def samples(start, size, bins, p, ratio):
    """Coordinates of bin p in ascending order."""
    step = size / bins
    grid = ratio if ratio > 0 else math.ceil(step)
    return sorted(start + p * step + (i + 0.5) * step / grid for i in range(grid))


def interpolation(at, cells):
    """{cell: weight} of one coordinate, or None outside the map."""
    if not -1 <= at <= cells:
        return None
    at = max(at, 0.0)
    low = min(int(at), cells - 1)
    if low == cells - 1:
        return {low: 1.0}
    return {low: 1 - (at - low), low + 1: at - low}


def bin_by_bin(case, input, boxes):
    """Output, and for each output the {(y, x): weight} of its sample, in Python's floats."""
    _, channels, height, width = case.shape
    offset = 0.5 if case.aligned else 0.0
    out = torch.zeros(case.rois, channels, *case.bins, dtype=torch.float64)
    chosen = {}
    for k, (image, *corners) in enumerate(boxes.tolist()):
        x1, y1, x2, y2 = (c * case.scale - offset for c in corners)
        least = -math.inf if case.aligned else 1.0
        for p in range(case.bins[0]):
            ys = samples(y1, max(y2 - y1, least), case.bins[0], p, case.ratio)
            for q in range(case.bins[1]):
                xs = samples(x1, max(x2 - x1, least), case.bins[1], q, case.ratio)
                for c in range(channels):
                    best, where = -math.inf, {}
                    for y in ys:
                        for x in xs:
                            wy, wx = interpolation(y, height), interpolation(x, width)
                            corner = {}
                            if wy is not None and wx is not None:
                                corner = {(i, j): wy[i] * wx[j] for i in wy for j in wx}
                            plane = input[int(image), c]
                            value = sum(w * plane[at].item() for at, w in corner.items())
                            if value > best:
                                best, where = value, corner
                    out[k, c, p, q], chosen[k, c, p, q] = best, where
    return out, chosen


@each_aligned
@each_ratio
def test_output_and_gradient_are_those_of_the_largest_sample(device, aligned, ratio):
    case = Case((2, 2, 7, 9), 8, (2, 3), 0.5, ratio, aligned)
    input, grad = case.make_input(torch.float64), case.make_grad(torch.float64)
    boxes = case.make_boxes(torch.float64)
    out, chosen = bin_by_bin(case, input, boxes)
    expected = torch.zeros_like(input)
    for (k, c, p, q), corners in chosen.items():
        for (y, x), weight in corners.items():
            expected[int(boxes[k, 0]), c, y, x] += weight * grad[k, c, p, q]
    assert any(not corners for corners in chosen.values())  # a sample outside is the largest
    there = [x.to(device) for x in (input, grad, boxes)]
    got = pooled(case, there[0], there[2])
    torch.testing.assert_close(got.cpu(), out, rtol=1e-12, atol=1e-14)
    got = gradient(case, *there)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-12, atol=1e-14)


@each_dtype
def test_the_first_of_equal_samples_gets_the_gradient(device, dtype):
    """Row by row: on a constant map the sample at (0.5, 1) of each bin."""
    input = torch.full((1, 1, 6, 6), 3.0, dtype=dtype, device=device)
    boxes = stack_boxes((0, 0.5, 0, 4.5, 2)).to(device)
    case = Case((1, 1, 6, 6), 1, (1, 2), ratio=2, aligned=False)
    grad = torch.tensor([8.0, 16.0], dtype=dtype, device=device).reshape(1, 1, 1, 2)
    expected = torch.zeros_like(input)
    expected[0, 0, :2, 1] = 4.0
    expected[0, 0, :2, 3] = 8.0
    assert_bitwise_equal(gradient(case, input, grad, boxes), expected)


@each_dtype
def test_a_sample_outside_counts_as_zero_without_a_gradient(device, dtype):
    input = torch.full((1, 1, 6, 6), -2.0, dtype=dtype, device=device)
    # Bins left of the map, across its border, inside: at -3.5, -2.5 | -1.5, -0.5 | 0.5, 1.5.
    boxes = stack_boxes((0, -4, 1, 2, 3)).to(device)
    case = Case((1, 1, 6, 6), 1, (1, 3), ratio=2, aligned=False)
    out = pooled(case, input, boxes)
    assert out.flatten().tolist() == [0, 0, -2]
    assert_bitwise_equal(out[..., :2], torch.zeros_like(out[..., :2]))
    got = gradient(case, input, torch.ones_like(out), boxes)
    assert got.sum() == 1 and got[0, 0, :, :2].sum() == 1
    # Where the map is positive the sample inside wins, border strip included.
    got = gradient(case, -input, torch.ones_like(out), boxes)
    assert got.sum() == 2


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_features_that_are_not_finite(device, dtype, value):
    """NaN wins against everything, +Inf against numbers, -Inf against nothing."""
    input = values((1, 2, 5, 5), 1, dtype, device).abs()
    input[0, 0, 2, 2] = value
    boxes = stack_boxes((0, 0, 0, 5, 5), (0, 0, 0, 1, 1)).to(device)
    case = Case((1, 2, 5, 5), 2, (1, 1), ratio=5, aligned=True)
    plain = input.nan_to_num(0, 0, 0)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    out, before = (pooled(case, x, boxes) for x in (input, plain))
    assert_bitwise_equal(out[1:], before[1:])
    assert_bitwise_equal(out[:, 1:], before[:, 1:])
    if value == -torch.inf:
        assert_bitwise_equal(out, before)
        return
    assert_bitwise_equal(out[0, 0, 0, 0], input[0, 0, 2, 2])
    by_reference = reference.forward(input.cpu(), boxes.cpu().to(kind), *case.rest)[0]
    assert_bitwise_equal(out, by_reference)
    grad = torch.ones_like(out)
    got = gradient(case, input, grad, boxes)
    assert got[0, 0, 2, 2] == 1


def test_the_first_nan_gets_the_gradient(device):
    input = torch.zeros(1, 1, 4, 4, device=device)
    input[0, 0, 1, 1:3] = torch.nan
    input[0, 0, 3] = torch.inf
    case = Case((1, 1, 4, 4), 1, (1, 1), ratio=4, aligned=True)
    boxes = stack_boxes((0, 0, 0, 4, 4)).to(device)
    got = gradient(case, input, torch.ones(1, 1, 1, 1, device=device), boxes)
    assert got.nonzero().tolist() == [[0, 0, 1, 1]]


def test_permutations_of_the_rois_keep_the_bits(device):
    case = Case((1, 3, 6, 7), 40, (2, 2))
    input, grad, boxes = (
        f(device=device) for f in (case.make_input, case.make_grad, case.make_boxes)
    )
    out, argmax = forward(case, input, boxes)
    first = backward(case, grad, argmax, boxes)
    assert_bitwise_equal(gradient(case, input, grad, boxes), first)
    for order in permutations(case.rois):
        order = order.to(device)
        got = backward(case, grad[order], argmax[order], boxes[order])
        assert_bitwise_equal(got, first)
    assert_bitwise_equal(forward(case, input, boxes[order])[0], out[order])


def test_permutations_of_a_cancelling_sum_keep_the_bits(device):
    parts = torch.tensor(CANCELLING * 50, device=device)
    boxes = torch.tensor([ONE_CELL_BOX], device=device).repeat(300, 1)
    case = Case((1, 1, 3, 3), 300, (1, 1), ratio=1)
    argmax = torch.zeros(300, 1, 1, 1, dtype=torch.int32, device=device)
    seen = set()
    for order in permutations(300):
        out = backward(case, parts[order.to(device)].reshape(300, 1, 1, 1), argmax, boxes)
        seen.add(words_of(out[0, 0, 1, 1])[0])
    exact = sum(fractions_of(parts))
    slack = 300 * Fraction(2) ** (24 + 9 - 62)
    (word,) = seen
    low, high = (nearest_word(exact + side * slack, torch.float32) for side in (-1, 1))
    assert low <= word <= high


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_nonfinite_gradient_reaches_the_corners_of_its_sample_alone(device, dtype, value):
    input, grad, boxes = CASE.make_input(dtype), CASE.make_grad(dtype), CASE.make_boxes(dtype)
    argmax = forward(CASE, input, boxes)[1]
    k = int(((boxes[:, 0] == 1) & (argmax[:, 1, 0, 0] >= 0)).nonzero()[0, 0])
    grad[k, 1, 0, 0] = 0
    expected = gradient(CASE, input, grad, boxes)
    marked = torch.zeros_like(grad)
    marked[k, 1, 0, 0] = 1
    mask = gradient(CASE, input, marked, boxes) != 0
    assert 1 <= mask.sum() <= 4
    grad[k, 1, 0, 0] = value
    got = gradient(CASE, *(x.to(device) for x in (input, grad, boxes)))
    assert_bitwise_equal(got, torch.where(mask, torch.full_like(expected, value), expected))


@each_dtype
def test_the_gradient_of_an_image_does_not_depend_on_the_batch(device, dtype):
    input, grad, boxes = (
        f(dtype, device) for f in (CASE.make_input, CASE.make_grad, CASE.make_boxes)
    )
    grad[boxes[:, 0] == 0] *= 16
    grad[boxes[:, 0] == 2, 1] = torch.nan
    whole = gradient(CASE, input, grad, boxes)
    rows = (boxes[:, 0] == 1).nonzero()[:, 0]
    own = boxes[rows] * torch.tensor([0, 1, 1, 1, 1], dtype=boxes.dtype, device=device)
    part = CASE._replace(shape=(1, *CASE.shape[1:]), rois=len(rows))
    assert_bitwise_equal(gradient(part, input[1:2], grad[rows], own), whole[1:2])


def test_an_argmax_from_elsewhere_reads_nothing_outside(device):
    """Numbers beyond the samples of a bin pass no gradient."""
    grad, boxes = CASE.make_grad(device=device), CASE.make_boxes(device=device)
    for number in (-1, -(2**31), 2**31 - 1, 10**6):
        argmax = torch.full(grad.shape, number, dtype=torch.int32, device=device)
        assert not backward(CASE, grad, argmax, boxes).any()
    # One beyond the only sample, where the next one would still be inside the map.
    case = Case((1, 1, 3, 3), 1, (1, 1), ratio=1)
    boxes = torch.tensor([ONE_CELL_BOX], device=device)
    argmax = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    grad = torch.ones(1, 1, 1, 1, device=device)
    assert backward(case, grad, argmax, boxes).sum() == 1
    assert not backward(case, grad, argmax + 1, boxes).any()
