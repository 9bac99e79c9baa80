"""Gradients of roi_pool and the position-sensitive operators: no order, batch or NaN elsewhere
changes a bit."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import (
    LAYOUT,
    fractions_of,
    from_words,
    infinity,
    nearest_word,
    sign_bit,
    words_of,
)
from pool_cases import ROI_POOL, each_name, each_op
from roi_cases import PERMUTATIONS, Case, each_dtype, each_format, permutations
from scatter_cases import CANCELLING

from truncdet.testing import assert_bitwise_equal

CROWD = Case((1, 3, 6, 7), 40, (2, 2))
MIXED = Case((3, 2, 8, 9), 24, (2, 3))


@each_op
@each_dtype
def test_permutations_of_the_rois_keep_the_bits(device, op, dtype):
    case = Case((3, 3, 9, 17), 60, (3, 3))
    input, boxes, grad = op.make(case, dtype, device)
    out, *chosen = op.forward(case, input, boxes)
    first = op.backward(case, grad, chosen, boxes)
    for order in permutations(case.rois, 20):
        order = order.to(device)
        permuted = [x[order] for x in chosen]
        assert_bitwise_equal(op.backward(case, grad[order], permuted, boxes[order]), first)
        got = op.forward(case, input, boxes[order])
        assert_bitwise_equal(got, (out[order], *permuted))


@each_op
def test_many_permutations_of_a_crowd_keep_the_bits(device, op):
    input, boxes, grad = op.make(CROWD, device=device)
    chosen = op.forward(CROWD, input, boxes)[1:]
    first = op.backward(CROWD, grad, chosen, boxes)
    for order in permutations(CROWD.rois):
        order = order.to(device)
        got = op.backward(CROWD, grad[order], [x[order] for x in chosen], boxes[order])
        assert_bitwise_equal(got, first)


@each_name
def test_permutations_change_the_bits_of_the_float32_operator(device, op):
    """The negative control."""
    input, boxes, grad = op.make(CROWD, device=device)
    seen = set()
    for order in permutations(CROWD.rois, 30):
        order = order.to(device)
        got = op.gradient(CROWD, input, boxes[order], grad[order], op.native)[1]
        seen.add(tuple(words_of(got)))
    assert len(seen) > 1


@each_op
@each_dtype
def test_permutations_of_a_cancelling_sum_keep_the_bits(device, op, dtype):
    parts = [v for v in CANCELLING if dtype != torch.float16 or abs(v) < 60000]
    parts = torch.tensor(parts, dtype=torch.float64).to(dtype).repeat(50).to(device)
    first = op.one_cell_sum(parts)
    for order in permutations(parts.numel(), min(200, PERMUTATIONS)):
        assert_bitwise_equal(op.one_cell_sum(parts[order.to(device)]), first)
    # 2^-60 is far below the resolution of the sum, so only the rest counts.
    exact = sum(fractions_of(parts))
    slack = 300 * max(abs(v) for v in fractions_of(parts)) * Fraction(2) ** (9 - 62)
    words = [nearest_word(exact + side * slack, dtype) for side in (-1, 1)]
    assert words[0] <= words_of(first)[0] <= words[1]


@each_op
@each_dtype
@pytest.mark.parametrize("step", [-1, 0, 1], ids=["below", "power_of_two", "above"])
@pytest.mark.parametrize("count", [1, 3, 64, 65])
def test_full_head_room_does_not_overflow(device, op, dtype, step, count):
    """amax at and beside a power of two, every contribution as large as it can be."""
    largest = from_words([nearest_word(Fraction(8), dtype) + step], dtype)
    expected = nearest_word(count * fractions_of(largest)[0], dtype)
    parts = largest.to(device).expand(count).contiguous()
    assert words_of(op.one_cell_sum(parts)) == [expected]
    assert words_of(op.one_cell_sum(-parts)) == [expected | sign_bit(dtype)]


@pytest.mark.parametrize("rounded", [True, False])
@each_dtype
def test_one_cell_may_receive_all_bins_of_all_rois(device, dtype, rounded):
    """Bins smaller than a cell choose it together; ones below a power of two fill the head-room."""
    case = Case((1, 1, 1, 1), 16, (4, 4), boxes=torch.zeros(16, 5))
    value = from_words([nearest_word(Fraction(2), dtype) - 1], dtype)
    grad = value.expand(16, 1, 4, 4).contiguous()
    boxes, chosen = case.make_boxes(dtype, device), torch.zeros_like(grad, dtype=torch.int32)
    args = (grad.to(device), chosen.to(device), boxes, *case.shape, 4, 4, 1.0, rounded, False)
    got = torch.ops.truncdet.roi_pool_backward(*args)
    assert words_of(got) == [nearest_word(256 * fractions_of(value)[0], dtype)]


@each_op
@each_dtype
def test_only_a_sum_beyond_the_range_overflows(device, op, dtype):
    top = from_words([infinity(dtype) - 1], dtype, device)
    # Partial sums beyond the largest number do no harm.
    back = torch.cat([top, top, top, -top, -top])
    assert words_of(op.one_cell_sum(back)) == [infinity(dtype) - 1]
    assert words_of(op.one_cell_sum(top.expand(2).contiguous())) == [infinity(dtype)]


@each_op
@each_dtype
def test_subnormal_gradients_are_added_exactly(device, op, dtype):
    sign = sign_bit(dtype)
    assert words_of(op.one_cell_sum(from_words([1] * 5, dtype, device))) == [5]
    assert words_of(op.one_cell_sum(from_words([7, sign | 7], dtype, device))) == [0]


@each_op
@each_dtype
@pytest.mark.parametrize("path", ["backward", "reference_backward"])
def test_flushing_denormals_changes_no_bit(op, dtype, path):
    input, boxes, grad = op.make(MIXED, dtype)
    chosen = op.forward(MIXED, input, boxes)[1:]
    smallest = from_words([1 << LAYOUT[dtype][0]], dtype)
    grads = [grad * smallest, grad * smallest * 4]
    grads[1][::3] = grad[::3]
    backward = getattr(op, path)
    before = [backward(MIXED, g, chosen, boxes) for g in grads]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = [backward(MIXED, g, chosen, boxes) for g in grads]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert any(0 < word < 1 << LAYOUT[dtype][0] for word in words_of(before[0]))


def reached(op, case, chosen, boxes, k, c, p, q):
    """The cells [N, C, H, W] that one gradient reaches."""
    one = torch.zeros(case.rois, case.shape[1], *case.bins)
    one[k, c, p, q] = 1
    return op.backward(case, one, chosen, boxes.float()) != 0


@each_op
@each_dtype
@each_format
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_nonfinite_gradient_reaches_its_cells_alone(device, op, dtype, memory_format, value):
    input, boxes, grad = op.make(MIXED, dtype)
    chosen = op.forward(MIXED, input, boxes)[1:]
    k = next(
        k
        for k in (boxes[:, 0] == 1).nonzero()[:, 0].tolist()
        if reached(op, MIXED, chosen, boxes, k, 1, 0, 1).any()
    )
    mask = reached(op, MIXED, chosen, boxes, k, 1, 0, 1)
    grad[k, 1, 0, 1] = 0
    expected = op.backward(MIXED, grad, chosen, boxes)
    grad[k, 1, 0, 1] = value
    there = [x.to(device) for x in chosen]
    last = memory_format == torch.channels_last
    got = op.backward(MIXED, grad.to(device), there, boxes.to(device), last)
    assert_bitwise_equal(got, torch.where(mask, torch.full_like(expected, value), expected))


@each_op
@each_dtype
def test_opposite_infinities_give_nan(device, op, dtype):
    sums = {
        (torch.inf, 1.0): torch.inf,
        (-torch.inf, torch.inf): torch.nan,
        (-torch.inf, -torch.inf): -torch.inf,
        (torch.nan, torch.inf): torch.nan,
    }
    for parts, expected in sums.items():
        got = op.one_cell_sum(torch.tensor(parts, dtype=dtype, device=device))
        assert_bitwise_equal(got, torch.full_like(got, expected))


@each_op
@each_dtype
@pytest.mark.parametrize("poison", [False, True], ids=["", "others_with_nan"])
def test_the_gradient_of_an_image_does_not_depend_on_the_batch(device, op, dtype, poison):
    case = MIXED
    input, boxes, grad = op.make(case, dtype, device)
    chosen = op.forward(case, input, boxes)[1:]
    if poison:
        grad[boxes[:, 0] != 1, 0] = torch.nan
    else:
        grad[boxes[:, 0] == 0] *= 16
    whole = op.backward(case, grad, chosen, boxes)
    for images in ([0, 1, 2], [1], [2, 1], [1, 1], [2, 0, 1]):
        # A batch of these images, the RoIs of each in turn.
        rows = [(boxes[:, 0] == i).nonzero()[:, 0] for i in images]
        own = torch.cat(rows)
        there = boxes[own].clone()
        there[:, 0] = torch.cat([torch.full((len(r),), float(n)) for n, r in enumerate(rows)])
        part = case._replace(shape=(len(images), *case.shape[1:]), rois=len(own))
        got = op.backward(part, grad[own], [x[own] for x in chosen], there)
        assert_bitwise_equal(got, whole[torch.tensor(images, device=device)])


@each_op
def test_number_of_threads_does_not_matter(op):
    input, boxes, grad = op.make(MIXED)

    def run():
        out, *chosen = op.forward(MIXED, input, boxes)
        return out, op.backward(MIXED, grad, chosen, boxes)

    first = run()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_bitwise_equal(run(), first)
    finally:
        torch.set_num_threads(threads)


@each_op
@pytest.mark.parametrize("path", ["backward", "reference_backward"])
@pytest.mark.parametrize("count, headroom", [(2, 1), (3, 2), (4, 2), (5, 3), (9, 4)])
def test_the_unit_of_the_sums_follows_from_the_image_alone(device, op, path, count, headroom):
    """2^(G - 62) with 2^G the RoIs of the image; a crowd in another image does not coarsen it."""
    unit = 2.0 ** (headroom - 62)
    x1, y1, x2, y2 = op.one_cell
    own = [[0.0, x1, y1, x2, y2]] * (count - 1) + [[0.0, x1 - 1, y1 - 1, x2 - 1, y2 - 1]]
    boxes = torch.tensor(own + [[1.0, x1, y1, x2, y2]] * 200, device=device)
    case = Case((2, 1, 3, 3), len(boxes), (1, 1), ratio=1, boxes=boxes)
    chosen = op.chosen_anywhere(case, device)
    if chosen:
        chosen[0][count - 1] = 0
    # The largest value, just below one, is elsewhere; a cell gets one contribution.
    for value, expected in ((unit, unit), (1.5 * unit, 2 * unit), (0.5 * unit, 0), (-unit, -unit)):
        grad = torch.zeros(len(boxes), 1, 1, 1, device=device)
        grad[0], grad[count - 1] = value, 0.75
        grad[count:] = 1024.0
        got = getattr(op, path)(case, grad, chosen, boxes)
        assert got[0, 0, 1, 1] == expected
        assert got[0, 0, 0, 0] == 0.75 and got[1, 0, 1, 1] == 200 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bins_of_roi_pool_count_in_the_head_room(device, dtype):
    """Two RoIs of four bins: 2^(3 - 62), or a full cell would overflow."""
    boxes = torch.tensor([[0.0, 1, 1, 1, 1], [0.0, 0, 0, 0, 0]], device=device)
    case = Case((1, 1, 3, 3), 2, (2, 2), boxes=boxes)
    chosen = (torch.tensor([4, 0], device=device).int().reshape(2, 1, 1, 1).expand(2, 1, 2, 2),)
    grad = torch.zeros(2, 1, 2, 2, dtype=dtype, device=device)
    grad[1] = 0.75
    for value, expected in ((2.0**-59, 2.0**-59), (2.0**-60, 0.0), (1.5 * 2.0**-59, 2.0**-58)):
        grad[0, 0, 0, 1] = value
        assert ROI_POOL.backward(case, grad, chosen, boxes)[0, 0, 1, 1] == expected
