"""What roi_pool chooses, mmcv's rule, and where the position-sensitive operators are torchvision's
to the letter or are not."""

import math

import pytest
import torch
import torchvision
from pool_cases import EXACT_ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL, ROI_POOL, each_name
from roi_cases import Case, each_dtype, stack_boxes, values

from truncdet import _roi_pool_reference as reference
from truncdet import ps_roi_align, ps_roi_pool, roi_align, roi_pool
from truncdet.testing import assert_bitwise_equal

LOWEST = torch.finfo(torch.float32).min


def gradient(out, x, grad=None):
    return torch.autograd.grad(out, x, torch.ones_like(out) if grad is None else grad)[0]


@each_dtype
def test_the_first_of_equal_cells_is_chosen_row_by_row(device, dtype):
    x = torch.zeros(1, 1, 4, 5, dtype=dtype, device=device)
    x[0, 0, 1, 3] = x[0, 0, 2, 1] = x[0, 0, 2, 4] = 2
    x.requires_grad_()
    out = roi_pool(x, stack_boxes((0, 0, 0, 4, 3)).to(device), 1)
    assert gradient(out, x).nonzero().tolist() == [[0, 0, 1, 3]]
    flat = torch.full_like(x, -3.0, requires_grad=True)
    out = roi_pool(flat, stack_boxes((0, 1, 1, 4, 3)).to(device), 1)
    assert gradient(out, flat).nonzero().tolist() == [[0, 0, 1, 1]]


@each_dtype
@pytest.mark.parametrize("signs", [(0.0, -0.0), (-0.0, 0.0)], ids=str)
def test_zeros_of_both_signs_are_equal(device, dtype, signs):
    x = torch.tensor(signs, dtype=dtype, device=device).reshape(1, 1, 1, 2)
    boxes = stack_boxes((0, 0, 0, 1, 0)).to(device)
    out = roi_pool(x, boxes, 1)
    assert_bitwise_equal(out.flatten(), x.flatten()[:1])
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    by_reference = reference.forward(x.cpu(), boxes.cpu().to(kind), 1, 1, 1.0, True)[0]
    assert_bitwise_equal(out, by_reference)


@each_dtype
def test_nan_is_never_chosen_and_a_bin_of_nothing_else_is_the_lowest_number(device, dtype):
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1, 2], [nan, nan, nan], [-inf, nan, -inf], [inf, nan, inf]]
    x = torch.tensor(rows, dtype=dtype, device=device).reshape(1, 1, 4, 3).requires_grad_()
    boxes = stack_boxes(*[(0, 0, y, 2, y) for y in range(4)]).to(device)
    out = roi_pool(x, boxes, 1)
    lowest = torch.tensor(LOWEST, dtype=torch.float64).to(dtype).item()
    assert out.flatten().tolist() == [2, lowest, lowest, inf]
    assert gradient(out, x).nonzero().tolist() == [[0, 0, 0, 2], [0, 0, 3, 0]]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    here = (x.detach().cpu(), boxes.cpu().to(kind))
    assert_bitwise_equal(out.detach(), reference.forward(*here, 1, 1, 1.0, True)[0])
    if dtype in (torch.float32, torch.float64):
        assert_bitwise_equal(out.detach(), torchvision.ops.roi_pool(x, boxes.to(kind), 1).detach())


def test_double_features_below_every_float32_are_not_chosen(device):
    """As in torchvision, which starts from float32's lowest number in every type."""
    x = torch.full((1, 1, 2, 2), -1e300, dtype=torch.float64, device=device, requires_grad=True)
    out = roi_pool(x, stack_boxes((0, 0, 0, 1, 1)).to(device), 1)
    assert out.item() == LOWEST
    assert not gradient(out, x).any()


def test_a_nan_feature_reaches_the_means_that_read_it(device):
    """Cell (2, 3) of the channel of bin (0, 1): in that bin of the first box, not of the second."""
    boxes = stack_boxes((0, 0, 0, 6, 6), (0, 0, 4, 3, 6))
    case = Case((1, 1, 7, 8), 2, (2, 2), boxes=boxes)
    for op in (PS_ROI_ALIGN, PS_ROI_POOL):
        input, boxes, _ = op.make(case, device=device)
        clean = op.call(case, input, boxes)
        input[0, 1, 2, 3] = torch.nan
        got = op.call(case, input, boxes)
        assert got.isnan().nonzero().tolist() == [[0, 0, 0, 1]]
        clean[0, 0, 0, 1] = torch.nan
        assert_bitwise_equal(got, clean)
        assert_bitwise_equal(op.reference_forward(case, input, boxes)[0], clean)


def brute_force(case, input, boxes):
    """mmcv's rule in Python's floats: {output: value}, {output: cell}."""
    out = torch.zeros(case.rois, case.shape[1], *case.bins, dtype=torch.float64)
    cells = torch.full(out.shape, -1, dtype=torch.int32)
    for k, (image, x1, y1, x2, y2) in enumerate(boxes.tolist()):
        edges = []
        for low, high, bins, size in (
            (y1, y2, case.bins[0], case.shape[2]),
            (x1, x2, case.bins[1], case.shape[3]),
        ):
            start, extent = low * case.scale, (high + 1 - low) * case.scale
            step = extent / bins
            clip = [
                [
                    min(max(f(start + n * step), 0), size)
                    for n, f in ((p, math.floor), (p + 1, math.ceil))
                ]
                for p in range(bins)
            ]
            edges.append(clip if extent > 0 else [[0, 0]] * bins)
        for p, q in torch.ones(case.bins).nonzero().tolist():
            (top, bottom), (left, right) = edges[0][p], edges[1][q]
            for c in range(case.shape[1]):
                best = -math.inf
                for y in range(top, bottom):
                    for x in range(left, right):
                        value = input[int(image), c, y, x].item()
                        if value > best:
                            best = value
                            out[k, c, p, q], cells[k, c, p, q] = value, y * case.shape[3] + x
    return out, cells


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_without_rounding_the_bins_are_mmcvs(device, scale):
    """Coordinates are sixteenths, so that Python's edges of bins and ours are the same numbers."""
    case = Case((2, 2, 9, 11), 40, (4, 2), scale)
    input, boxes, grad = EXACT_ROI_POOL.make(case, torch.float64)
    boxes[:, 1:] = (boxes[:, 1:] * 16).round() / 16
    boxes[:6, 3:] = boxes[:6, 1:3] - torch.tensor([1.0, 3.0])
    expected, cells = brute_force(case, input, boxes)
    assert 0 < (cells < 0).sum() < cells.numel()
    there = [x.to(device) for x in (input, boxes, grad)]
    out, chosen = EXACT_ROI_POOL.forward(case, *there[:2])
    assert_bitwise_equal((out.cpu(), chosen.cpu()), (expected, cells))
    sums = torch.zeros_like(input)
    for k, c, p, q in (cells >= 0).nonzero().tolist():
        sums[int(boxes[k, 0]), c].view(-1)[cells[k, c, p, q]] += grad[k, c, p, q]
    got = EXACT_ROI_POOL.gradient(case, *there)[1].cpu()
    torch.testing.assert_close(got, sums, rtol=1e-12, atol=1e-14)


def test_the_two_rules_differ(device):
    x = torch.arange(16.0, device=device).reshape(1, 1, 4, 4)
    boxes = stack_boxes((0, 0.6, 0.6, 1.4, 1.4), (0, 3, 3, 1, 1)).to(device)
    # Rounded: cell (1, 1), and (3, 3) alone. Not rounded: up to 2.4, and no area.
    assert roi_pool(x, boxes, 1).flatten().tolist() == [5, 15]
    assert roi_pool(x, boxes, 1, rounded=False).flatten().tolist() == [10, 0]


@each_dtype
def test_an_argmax_from_elsewhere_reads_and_writes_nothing_outside(device, dtype):
    """A cell outside the RoI is none that the forward gives: no gradient, whatever the tile."""
    case = Case(
        (2, 2, 8, 9), 6, (2, 3), boxes=stack_boxes(*[(i % 2, 2, 3, 5, 4) for i in range(6)])
    )
    _, boxes, grad = ROI_POOL.make(case, dtype, device)
    for cell in (-1, -(2**31), 2**31 - 1, 72, 10**6, 0, 2 * 9 + 2, 3 * 9 + 1, 4 * 9 + 6, 5 * 9 + 5):
        chosen = torch.full(grad.shape, cell, dtype=torch.int32, device=device)
        assert not ROI_POOL.backward(case, grad, (chosen,), boxes).any()
    chosen = torch.full(grad.shape, 4 * 9 + 5, dtype=torch.int32, device=device)
    got = ROI_POOL.backward(case, grad, (chosen,), boxes)
    assert got.nonzero().tolist() == [[n, c, 4, 5] for n in range(2) for c in range(2)]
    expected = reference.backward(
        *(x.cpu() for x in (grad, chosen, boxes)), *case.shape, *ROI_POOL.rest(case), False
    )
    assert_bitwise_equal(got, expected)


def test_ps_roi_align_is_roi_align_with_a_plane_a_bin(device):
    """The channels of one bin alone, pooled by roi_align, give that bin the same bits."""
    input = values((2, 2 * 6, 9, 11), 1, device=device)
    boxes = Case((2, 1, 9, 11), 12, (3, 2)).make_boxes(device=device)
    out = ps_roi_align(input, boxes, (3, 2))
    for p in range(3):
        for q in range(2):
            plane = input.reshape(2, 2, 3, 2, 9, 11)[:, :, p, q]
            plain = roi_align(plane, boxes, (3, 2), aligned=True)
            assert_bitwise_equal(out[:, :, p, q], plain[:, :, p, q])


def test_a_box_without_area_is_zero_where_torchvision_divides_by_zero(device):
    input = values((1, 4, 6, 6), 1, device=device)
    boxes = stack_boxes((0, 3, 3, 3, 3), (0, 2.5, 1, 2.5, 6)).to(device)
    assert torchvision.ops.ps_roi_align(input, boxes, 2).isnan().all()
    out = ps_roi_align(input, boxes, 2)
    assert_bitwise_equal(out, torch.zeros_like(out))
    expected = torchvision.ops.ps_roi_align(input, boxes, 2, 1.0, 2)
    torch.testing.assert_close(ps_roi_align(input, boxes, 2, 1.0, 2), expected)


def test_ps_roi_pool_leaves_the_last_row_out_of_means_but_not_of_gradients(device):
    """torchvision's forward and backward disagree about the border; a drop-in follows both."""
    x = torch.arange(16.0, device=device).reshape(1, 1, 4, 4).requires_grad_()
    boxes = stack_boxes((0, 0, 0, 4, 4)).to(device)
    for function in (ps_roi_pool, torchvision.ops.ps_roi_pool):
        out = function(x, boxes, 1)
        assert out.item() == 5.0  # of the first three rows and columns
        assert (gradient(out, x) == 1 / 16).all()


@each_name
def test_corners_on_halves_round_away_from_zero(device, op):
    """-0.5 is in torchvision's integers -1, and 2.5 is 3."""
    if op is PS_ROI_ALIGN:
        pytest.skip("its corners are not rounded")
    input = values((1, 1, 6, 6), 1, device=device)
    halves = stack_boxes((0, -0.5, 0.5, 2.5, 3.5), (0, 1.5, 1.5, 1.5, 2.5)).to(device)
    whole = stack_boxes((0, -1, 1, 3, 4), (0, 2, 2, 2, 3)).to(device)
    below = halves - torch.tensor([0, 2.0**-20, 2.0**-20, 2.0**-20, 2.0**-20], device=device)
    case = Case((1, 1, 6, 6), 2, (1, 1))
    assert_bitwise_equal(op.call(case, input, halves), op.call(case, input, whole))
    assert not torch.equal(op.call(case, input, halves), op.call(case, input, below))


def test_corners_beyond_any_map_count_as_far_away(device):
    """Where torchvision's integers overflow."""
    x = torch.arange(12.0, device=device).reshape(1, 1, 3, 4)
    boxes = stack_boxes((0, -1e20, -3e38, 1e20, 3e38), (0, 1e20, 0, 2e20, 1)).to(device)
    for rounded in (True, False):
        out = roi_pool(x, boxes, 1, rounded=rounded)
        if not rounded:
            assert out[0].item() == 0  # an infinite extent is none
            out = roi_pool(x, boxes / 1e18, 1, rounded=False)
        assert out.flatten().tolist() == [11, 0]
    assert ps_roi_pool(x, boxes, 1).flatten().tolist() == [2.5 + 0.5, 0]
