"""roi_pool and the position-sensitive ops: reference = kernel, torchvision's values, the bound."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of, half_ulp
from pool_cases import (
    EXACT_ROI_POOL,
    OPS,
    PS_ROI_ALIGN,
    PS_ROI_POOL,
    ROI_POOL,
    each_name,
    each_op,
    each_small,
    few_channels,
    hostile_boxes,
)
from roi_cases import SHAPES, Case, each_case, each_dtype, each_format, needs_cuda_kernels

from truncdet import _roi_align_reference as align
from truncdet import fixedpoint
from truncdet.testing import assert_bitwise_equal

FEW = Case((2, 3, 9, 13), 7, (3, 2), 0.5)


def check_against_the_reference(device, op, case, dtype, memory_format):
    input, boxes, grad = op.make(case, dtype)
    there = input.to(device).contiguous(memory_format=memory_format)
    out, *chosen = op.forward(case, there, boxes.to(device))
    expected = op.reference_forward(case, input, boxes)
    assert out.is_contiguous()
    assert_bitwise_equal((out, *chosen), expected)
    last = memory_format == torch.channels_last
    got = op.backward(case, grad.to(device), chosen, boxes.to(device), last)
    assert got.is_contiguous(memory_format=memory_format)
    assert_bitwise_equal(got, op.reference_backward(case, grad, expected[1:], boxes, last))


@each_op
@each_dtype
@each_format
@pytest.mark.parametrize("ratio", [-1, 2])
def test_the_kernel_is_the_reference(device, op, dtype, memory_format, ratio):
    check_against_the_reference(device, op, FEW._replace(ratio=ratio), dtype, memory_format)


@each_op
@each_dtype
@each_small
def test_any_shape_is_the_reference(device, op, case, dtype):
    case = few_channels(op, case)
    check_against_the_reference(device, op, case, dtype, torch.contiguous_format)


@pytest.mark.cuda
@each_op
@each_dtype
@each_format
@each_case
def test_cuda_gives_the_bits_of_the_cpu(op, case, dtype, memory_format):
    case = few_channels(op, case)
    input, boxes, grad = op.make(case, dtype)
    there = input.cuda().contiguous(memory_format=memory_format)
    here = op.forward(case, input, boxes)
    got = op.forward(case, there, boxes.cuda())
    assert_bitwise_equal([x.cpu() for x in got], list(here))
    last = memory_format == torch.channels_last
    poisoned = grad.clone()
    poisoned.view(-1)[: 3 * grad.shape[1] : 5] = torch.nan
    for g in (grad, poisoned):
        expected = op.backward(case, g, here[1:], boxes, last)
        got_gradient = op.backward(case, g.cuda(), got[1:], boxes.cuda(), last)
        assert_bitwise_equal(got_gradient.cpu(), expected)


@pytest.mark.cuda
@needs_cuda_kernels
@each_dtype
@each_format
@pytest.mark.parametrize("name", ["odd_sizes", "33_channels", "mask_head", "600_rois_on_a_tile"])
def test_every_schedule_of_roi_pool_gives_the_bits_of_the_cpu(dtype, memory_format, name):
    case = SHAPES[name]
    input, boxes, grad = ROI_POOL.make(case, dtype)
    last = memory_format == torch.channels_last
    chosen = ROI_POOL.forward(case, input, boxes)[1]
    expected = ROI_POOL.backward(case, grad, (chosen,), boxes, last)
    args = (grad.cuda(), chosen.cuda(), boxes.cuda(), *case.shape, *ROI_POOL.rest(case), last)
    for channels, tile_bytes in ((1, 0), (1, 4096), (2, 8192), (3, 4096), (4, 0), (8, 0), (32, 0)):
        got = OPS._roi_pool_backward_scheduled(*args, channels, tile_bytes)
        assert_bitwise_equal(got.cpu(), expected, f"{channels} channels, {tile_bytes} bytes")


@pytest.mark.cuda
@needs_cuda_kernels
@each_dtype
@each_format
@pytest.mark.parametrize("op", (PS_ROI_ALIGN, PS_ROI_POOL), ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["odd_sizes", "600_rois_on_a_tile"])
def test_every_schedule_of_the_sensitive_pools_gives_the_bits_of_the_cpu(
    dtype, memory_format, op, name
):
    case = few_channels(op, SHAPES[name])
    _, boxes, grad = op.make(case, dtype)
    last = memory_format == torch.channels_last
    expected = op.backward(case, grad, (), boxes, last)
    scheduled = getattr(OPS, f"_{op.name}_backward_scheduled")
    args = (grad.cuda(), boxes.cuda(), *op.shape(case), *op.rest(case), last)
    for schedule in ((0, 0, 1), (0, 0, 2), (0, 4096, 4), (1, 0, 8), (3, 8192, 32)):
        assert_bitwise_equal(scheduled(*args, *schedule).cpu(), expected, str(schedule))


@pytest.mark.cuda
@each_op
@each_dtype
def test_cuda_gives_the_bits_of_the_cpu_on_a_real_size(op, dtype):
    case = Case((2, 2 if op.sensitive else 40, 50, 68), 600, (7, 7), 0.25, largest=0.4)
    input, boxes, grad = op.make(case, dtype)
    here = op.forward(case, input, boxes)
    got = op.forward(case, input.cuda(), boxes.cuda())
    assert_bitwise_equal([x.cpu() for x in got], list(here))
    gradient = op.backward(case, grad.cuda(), got[1:], boxes.cuda())
    assert_bitwise_equal(gradient.cpu(), op.backward(case, grad, here[1:], boxes))


@pytest.mark.cuda
@each_op
@each_dtype
def test_the_reference_gives_the_same_bits_on_a_gpu(op, dtype):
    input, boxes, grad = op.make(FEW, dtype)
    here = op.reference_forward(FEW, input, boxes)
    got = op.reference_forward(FEW, input.cuda(), boxes.cuda())
    assert_bitwise_equal([x.cpu() for x in got], list(here))
    gradient = op.reference_backward(FEW, grad.cuda(), got[1:], boxes.cuda())
    assert_bitwise_equal(gradient.cpu(), op.reference_backward(FEW, grad, here[1:], boxes))


def as_torchvision(op, case, input, boxes, grad, out, gradient):
    """Asserts torchvision's values, to the bit where nothing but the order of sums could differ."""
    expected = op.gradient(case, input, boxes, grad, op.native)
    if op is PS_ROI_ALIGN:
        # 0 / 0 where there are no samples.
        target = torch.where(expected[0].isnan(), 0, expected[0])
        assert (out - target).abs().max() <= 1e-5 * input.abs().max()
    else:
        assert_bitwise_equal(out, expected[0])
    epsilon = torch.finfo(input.dtype).eps
    scale = expected[1].abs().max() + grad.abs().max()
    assert (gradient - expected[1]).abs().max() <= 50 * epsilon * scale


@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("bins", [(7, 5), (1, 1), (3, 14)], ids=str)
def test_values_and_gradients_are_torchvisions(device, op, dtype, ratio, bins):
    case = few_channels(op, Case((2, 3, 21, 34), 200, bins, 0.25, ratio))
    input, boxes, grad = op.make(case, dtype, device)
    out, gradient = op.gradient(case, input, boxes, grad)
    # Some bins outside and some inside, or the comparison proves little.
    assert 0 < out.count_nonzero() < out.numel()
    as_torchvision(op, case, input, boxes, grad, out, gradient)


@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_hostile_boxes_are_as_in_torchvision(device, op, dtype, scale, ratio):
    boxes = hostile_boxes(2, 9, 12)
    case = Case((2, 2, 9, 12), len(boxes), (3, 2), scale, ratio, boxes=boxes)
    input, boxes, grad = op.make(case, dtype, device)
    as_torchvision(op, case, input, boxes, grad, *op.gradient(case, input, boxes, grad))


def contributions(op, case, grad, chosen, boxes):
    """{(channel, y, x): [fractions]} of the images' cells, an image each, in the definition."""
    kind = fixedpoint.compute_dtype(grad.dtype)
    g = grad.to(kind)
    image = align.image_of(boxes, case.shape[0])
    height, width = case.shape[2:]
    cells = [{} for _ in range(case.shape[0])]

    def send(k, channel, y, x, value):
        (part,) = fractions_of(value.reshape(1))
        cells[image[k]].setdefault((channel, y, x), []).append(part)

    roi = align.geometry(
        boxes, case.shape[0], (height, width), case.bins, case.scale, case.ratio, True
    )
    wy, wx = align.both_axes(roi, case.bins, (height, width))
    for k, c, p, q in torch.ones(grad.shape).nonzero().tolist():
        own = (c * case.bins[0] + p) * case.bins[1] + q
        if op.name == "roi_pool":
            cell = int(chosen[0][k, c, p, q])
            if cell >= 0:
                send(k, c, cell // width, cell % width, g[k, c, p, q])
        elif op is PS_ROI_ALIGN:
            weight = wy[k, p, :, None] * wx[k, q, None]
            for y, x in weight.nonzero().tolist():
                send(k, own, y, x, weight[y, x] * g[k, c, p, q])
        else:
            # What torchvision sends from a single one tells the bin's cells.
            one = torch.zeros(1, *grad.shape[1:], dtype=kind)
            one[0, c, p, q] = 1
            input = torch.zeros(op.shape(case), dtype=kind)
            sent = op.gradient(case, input, boxes[k : k + 1], one, op.native)[1]
            bin_cells = sent[image[k], own].nonzero()
            for y, x in bin_cells.tolist():
                send(k, own, y, x, g[k, c, p, q] / torch.tensor(len(bin_cells), dtype=kind))
    return cells


@each_op
@each_dtype
def test_error_stays_inside_the_published_bound(device, op, dtype):
    """Against the exact sum of the contributions, each a number of the type it is computed in."""
    case = Case((2, 1, 5, 6), 30, (2, 3))
    input, boxes, grad = op.make(case, dtype)
    chosen = op.forward(case, input, boxes)[1:]
    there = [x.to(device) for x in chosen]
    got = op.backward(case, grad.to(device), there, boxes.to(device)).cpu()
    limbs = 2 if dtype == torch.float64 else 1
    for i, cells in enumerate(contributions(op, case, grad, chosen, boxes)):
        own = (boxes[:, 0] == i).nonzero()[:, 0]
        g = fixedpoint.headroom(len(own) * (1 if op.sensitive else 6))
        amax = max(map(abs, fractions_of(grad[own])))
        assert len(cells) > 5
        for at in torch.ones(got[i].shape).nonzero().tolist():
            parts = cells.get(tuple(at), [])
            (result,) = fractions_of(got[i][tuple(at)].reshape(1))
            slack = len(parts) * amax * Fraction(2) ** (limbs * (g - 62))
            assert abs(result - sum(parts)) <= slack + half_ulp(result, dtype)


@each_name
def test_errors_are_near_those_of_float32_accumulation(device, op):
    case = Case((2, 4, 25, 34), 400, (3, 3), 0.25, 2, largest=0.5)
    input, boxes, grad = op.make(case, device=device)

    def gradient(function, dtype):
        args = (x.to(dtype) for x in (input, boxes, grad))
        return op.gradient(case, *args, function)[1].double()

    truth = gradient(op.native, torch.float64)
    errors = [gradient(f, torch.float32) - truth for f in (op.public, op.native)]
    for norm in (torch.inf, 2):
        ours, native = (torch.linalg.vector_norm(e, norm) for e in errors)
        assert ours <= 1.25 * native


def test_the_operators_are_what_the_functions_run(device):
    for op in (ROI_POOL, EXACT_ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL):
        input, boxes, grad = op.make(FEW, device=device)
        out, *chosen = op.forward(FEW, input, boxes)
        expected = (out, op.backward(FEW, grad, chosen, boxes))
        assert_bitwise_equal(op.gradient(FEW, input, boxes, grad), expected)
