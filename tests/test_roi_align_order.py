"""roi_align's gradient: no order, batch, denormal mode or neighbour with a NaN changes its bits."""

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
from roi_cases import (
    Case,
    backward,
    each_case,
    each_dtype,
    forward,
    one_cell_case,
    one_cell_sum,
    permutations,
    reference_backward,
    reference_forward,
    weights,
)
from scatter_cases import CANCELLING
from torchvision.ops import roi_align as torchvision_roi_align

from truncdet import roi_align
from truncdet.testing import assert_bitwise_equal

CROWD = Case((1, 3, 6, 7), 40, (2, 2))


def native_gradient(case, grad, boxes):
    x = torch.zeros(case.shape, dtype=grad.dtype, device=grad.device, requires_grad=True)
    out = torchvision_roi_align(x, boxes, case.bins, case.scale, case.ratio, case.aligned)
    return torch.autograd.grad(out, x, grad)[0]


def test_permutations_of_the_rois_keep_the_bits(device):
    grad, boxes = CROWD.make_grad(device=device), CROWD.make_boxes(device=device)
    first = backward(CROWD, grad, boxes)
    for order in permutations(CROWD.rois):
        order = order.to(device)
        assert_bitwise_equal(backward(CROWD, grad[order], boxes[order]), first)


@each_dtype
def test_permuted_rois_keep_the_bits_of_every_type(device, dtype):
    case = Case((3, 3, 9, 17), 60, (3, 3))
    grad, boxes = case.make_grad(dtype, device), case.make_boxes(dtype, device)
    input = case.make_input(dtype, device)
    out, first = forward(case, input, boxes), backward(case, grad, boxes)
    for order in permutations(case.rois, 20):
        order = order.to(device)
        assert_bitwise_equal(backward(case, grad[order], boxes[order]), first)
        assert_bitwise_equal(forward(case, input, boxes[order]), out[order])


def test_permutations_change_the_bits_of_the_float32_operator(device):
    """The negative control."""
    grad, boxes = CROWD.make_grad(device=device), CROWD.make_boxes(device=device)
    seen = {
        tuple(words_of(native_gradient(CROWD, grad[order], boxes[order])))
        for order in (o.to(device) for o in permutations(CROWD.rois, 30))
    }
    assert len(seen) > 1


@each_dtype
def test_permutations_of_a_cancelling_sum_keep_the_bits(device, dtype):
    parts = [v for v in CANCELLING if dtype != torch.float16 or abs(v) < 60000]
    parts = torch.tensor(parts, dtype=torch.float64).to(dtype).repeat(50).to(device)
    first = one_cell_sum(parts)
    for order in permutations(parts.numel()):
        assert_bitwise_equal(one_cell_sum(parts[order.to(device)]), first)
    # 2^-60 is far below the resolution of the sum, so only the rest counts.
    exact = sum(fractions_of(parts))
    amax = max(abs(v) for v in fractions_of(parts))
    slack = 300 * amax * Fraction(2) ** (9 - 62)
    words = [nearest_word(exact + side * slack, dtype) for side in (-1, 1)]
    assert words[0] <= words_of(first)[0] <= words[1]


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_permutations_change_a_cancelling_sum_of_the_native_operator(device, sum_dtype):
    """The negative control: in double, too, rounded to float32 as an accumulator would be."""
    parts = torch.tensor(CANCELLING * 50, device=device)
    case = one_cell_case(parts.numel())
    boxes = case.make_boxes(device=device).to(sum_dtype)
    seen = set()
    for order in permutations(parts.numel(), 30):
        grad = parts[order.to(device)].to(sum_dtype).reshape(-1, 1, 1, 1)
        seen.add(words_of(native_gradient(case, grad, boxes)[0, 0, 1, 1].float())[0])
    assert len(seen) > 1


@pytest.mark.parametrize("count", [2, 3, 300])
@each_dtype
def test_identical_rois_sum_to_the_nearest_multiple(device, dtype, count):
    value = torch.tensor([0.1], dtype=torch.float64).to(dtype)
    expected = nearest_word(count * fractions_of(value)[0], dtype)
    assert words_of(one_cell_sum(value.to(device).expand(count).contiguous())) == [expected]


@each_dtype
@pytest.mark.parametrize("step", [-1, 0, 1], ids=["below", "power_of_two", "above"])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 65])
def test_full_head_room_does_not_overflow(device, dtype, step, count):
    """amax at and beside a power of two, every contribution as large as it can be."""
    largest = from_words([nearest_word(Fraction(8), dtype) + step], dtype)
    expected = nearest_word(count * fractions_of(largest)[0], dtype)
    values = largest.to(device).expand(count).contiguous()
    assert words_of(one_cell_sum(values)) == [expected]
    assert words_of(one_cell_sum(-values)) == [expected | sign_bit(dtype)]


@each_dtype
def test_one_cell_may_receive_all_bins_of_all_rois(device, dtype):
    """A map of one cell: the head-room is used up, with a rounding at every step of the weights."""
    boxes = torch.tensor([[0, -0.9, -0.7, 0.8, 0.9]]).repeat(16, 1)
    case = Case((1, 1, 1, 1), 16, (4, 4), ratio=3, aligned=False, boxes=boxes)
    word = nearest_word(Fraction(2), dtype) - 1
    grad = from_words([word], dtype).expand(16, 1, 4, 4).contiguous()
    got = backward(case, grad.to(device), case.make_boxes(dtype, device))
    total = 16 * 16 * fractions_of(grad[:1, :1, :1, :1])[0]
    assert words_of(got)[0] == pytest.approx(nearest_word(total, dtype), abs=4)
    assert_bitwise_equal(got, reference_backward(case, grad, case.make_boxes(dtype)))


@each_dtype
def test_any_power_of_two_scales_the_gradient_exactly(device, dtype):
    """The exponent is the only thing that changes, as far as the format reaches."""
    largest = LAYOUT[dtype][1]
    for exponent in {1 - largest, -60, -37, -14, -1, 1, 14, 59, 60, 61, largest - 7}:
        if not 1 - largest <= exponent <= largest - 7:
            continue
        unit = Fraction(2) ** exponent
        values = [unit * n for n in (1, 3, -2, 5)]
        words = [nearest_word(v, dtype) for v in values]
        assert words_of(one_cell_sum(from_words(words, dtype, device))) == [
            nearest_word(7 * unit, dtype)
        ]


@pytest.mark.parametrize("size", [1e-38, 1e-42, 1e38])
def test_tiny_and_huge_gradients(device, size):
    values = torch.tensor([size, size, -size, size], device=device)
    expected = nearest_word(sum(fractions_of(values)), torch.float32)
    assert words_of(one_cell_sum(values)) == [expected]
    assert words_of(one_cell_sum(-values)) == [expected | sign_bit(torch.float32)]


@each_dtype
def test_only_a_sum_beyond_the_range_overflows(device, dtype):
    top = from_words([infinity(dtype) - 1], dtype, device)
    # Partial sums beyond the largest number do no harm.
    back = torch.cat([top, top, top, -top, -top])
    assert words_of(one_cell_sum(back)) == [infinity(dtype) - 1]
    assert words_of(one_cell_sum(top.expand(2).contiguous())) == [infinity(dtype)]
    assert words_of(one_cell_sum(-top.expand(2))) == [infinity(dtype) | sign_bit(dtype)]


@each_dtype
def test_subnormal_gradients_are_added_exactly(device, dtype):
    sign = sign_bit(dtype)
    assert words_of(one_cell_sum(from_words([1] * 5, dtype, device))) == [5]
    assert words_of(one_cell_sum(from_words([sign | 1, sign | 3], dtype, device))) == [sign | 4]
    assert words_of(one_cell_sum(from_words([7, sign | 7], dtype, device))) == [0]


def small_gradients(case, dtype):
    """Subnormal numbers, and the smallest normal ones, in every other place."""
    grad = case.make_grad(dtype)
    smallest = from_words([1 << LAYOUT[dtype][0]], dtype)
    return torch.stack([grad * smallest, grad * smallest * 4], 1).flatten(0, 1)[: case.rois]


@each_dtype
@pytest.mark.parametrize("path", [backward, reference_backward], ids=["kernel", "reference"])
def test_flushing_denormals_changes_no_bit(dtype, path):
    case = Case((2, 2, 7, 9), 8, (2, 3))
    boxes = case.make_boxes(dtype)
    grads = [small_gradients(case, dtype)]
    grads.append(grads[0].clone())
    grads[1][::3] = case.make_grad(dtype)[::3]
    before = [path(case, grad, boxes) for grad in grads]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert torch.tensor(1e-40) * 1.0 == 0
        after = [path(case, grad, boxes) for grad in grads]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert any(0 < word < 1 << LAYOUT[dtype][0] for word in words_of(before[0]))


MIXED = Case((3, 2, 8, 9), 24, (2, 3))


def poisoned(case, dtype, device, entries):
    """Gradient, boxes, and the cells [N, C, H, W] that the entries (k, c, p, q, value) reach."""
    grad, boxes = case.make_grad(dtype), case.make_boxes(dtype)
    image, wy, wx = weights(case, boxes)
    # Small enough that the largest magnitude of the image is still another one.
    clean = grad.clone()
    reached = {}
    for k, c, p, q, value in entries:
        clean[k, c, p, q] = 0
        grad[k, c, p, q] = value
        mask = torch.zeros(case.shape, dtype=torch.bool)
        mask[image[k], c] = (wy[k, p, :, None] != 0) & (wx[k, q, None, :] != 0)
        reached[value] = reached.get(value, torch.zeros_like(mask)) | mask
    expected = backward(case, clean, boxes)
    return grad.to(device), boxes.to(device), expected, reached


def roi_inside(case, image, skip=0):
    """A RoI of the image whose first bin reaches some cells."""
    images, wy, wx = weights(case, case.make_boxes())
    found = (images == image) & wy[:, 0].any(1) & wx[:, 0].any(1)
    return int(found.nonzero()[skip, 0])


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_a_nonfinite_gradient_reaches_its_cells_alone(device, dtype, value, channels_last):
    k = roi_inside(MIXED, 1)
    grad, boxes, expected, reached = poisoned(MIXED, dtype, device, [(k, 1, 0, 0, value)])
    (mask,) = reached.values()
    assert 0 < mask.sum() < mask[1, 1].numel()
    got = backward(MIXED, grad, boxes, channels_last)
    special = torch.full_like(expected, value)
    assert_bitwise_equal(got, torch.where(mask, special, expected))


@each_dtype
def test_opposite_infinities_give_nan(device, dtype):
    k = roi_inside(MIXED, 2)
    entries = [(k, 0, 0, 0, torch.inf), (k, 0, 0, 1, -torch.inf), (k, 0, 1, 1, torch.inf)]
    grad, boxes, expected, reached = poisoned(MIXED, dtype, device, entries)
    plus, minus = reached[torch.inf], reached[-torch.inf]
    assert (plus & minus).any() and (plus & ~minus).any()
    expected = torch.where(plus, torch.full_like(expected, torch.inf), expected)
    expected = torch.where(minus, torch.full_like(expected, -torch.inf), expected)
    expected = torch.where(plus & minus, torch.full_like(expected, torch.nan), expected)
    assert_bitwise_equal(backward(MIXED, grad, boxes), expected)


def test_a_weight_of_zero_keeps_nan_away(device):
    """A sample exactly on a cell gives its neighbour the weight zero."""
    case = one_cell_case(2)
    grad = torch.tensor([torch.nan, 1.0], device=device).reshape(2, 1, 1, 1)
    got = backward(case, grad, case.make_boxes(device=device)).cpu()
    expected = torch.zeros(1, 1, 3, 3)
    expected[0, 0, 1, 1] = torch.nan
    assert_bitwise_equal(got, expected)


@each_dtype
def test_a_nan_feature_reaches_only_the_bins_that_read_it(device, dtype):
    case = Case((2, 2, 8, 9), 60, (2, 3))
    input, boxes = case.make_input(dtype), case.make_boxes(dtype)
    clean = forward(case, input, boxes)
    image, wy, wx = weights(case, boxes)
    input[1, 0, 3, 4] = torch.nan
    read = (wy[:, :, 3, None] != 0) & (wx[:, None, :, 4] != 0) & (image == 1)[:, None, None]
    assert 0 < read.sum() < read.numel()
    expected = clean.clone()
    expected[:, 0][read] = torch.nan
    assert_bitwise_equal(forward(case, input.to(device), boxes.to(device)), expected)
    assert_bitwise_equal(reference_forward(case, input, boxes), expected)


@each_dtype
@pytest.mark.parametrize("poison", [False, True], ids=["", "others_with_nan"])
def test_the_gradient_of_an_image_does_not_depend_on_the_batch(device, dtype, poison):
    case = MIXED
    grad, boxes = case.make_grad(dtype, device), case.make_boxes(dtype, device)
    if poison:
        grad[boxes[:, 0] != 1, 0] = torch.nan
    else:
        grad[boxes[:, 0] == 0] *= 16
    whole = backward(case, grad, boxes)
    for images in ([0, 1, 2], [1], [2, 1], [1, 1], [2, 0, 1]):
        # A batch of these images, the RoIs of each in turn.
        rows = [(boxes[:, 0] == i).nonzero()[:, 0] for i in images]
        own = boxes[torch.cat(rows)].clone()
        own[:, 0] = torch.cat([torch.full((len(r),), float(n)) for n, r in enumerate(rows)])
        part = case._replace(shape=(len(images), *case.shape[1:]), rois=len(own))
        got = backward(part, grad[torch.cat(rows)], own)
        assert_bitwise_equal(got, whole[torch.tensor(images, device=device)])


@each_case
def test_number_of_threads_does_not_matter(case):
    grad, boxes, input = case.make_grad(), case.make_boxes(), case.make_input()
    first = forward(case, input, boxes), backward(case, grad, boxes)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_bitwise_equal((forward(case, input, boxes), backward(case, grad, boxes)), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("path", [backward, reference_backward], ids=["kernel", "reference"])
@pytest.mark.parametrize("count, headroom", [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_the_unit_of_the_sums_follows_from_the_image_alone(device, path, count, headroom):
    """2^(G - 62) with 2^G the RoIs of the image; a crowd in another image does not coarsen it."""
    unit = 2.0 ** (headroom - 62)
    own = [[0.0, 1, 1, 2, 2]] * (count - 1) + [[0.0, 0, 0, 1, 1]]
    boxes = torch.tensor(own + [[1.0, 1, 1, 2, 2]] * 200, device=device)
    case = Case((2, 1, 3, 3), len(boxes), (1, 1), ratio=1, boxes=boxes)
    # The largest value, just below one, is elsewhere; a cell gets one contribution.
    for value, expected in ((unit, unit), (1.5 * unit, 2 * unit), (0.5 * unit, 0), (-unit, -unit)):
        grad = torch.zeros(len(boxes), 1, 1, 1, device=device)
        grad[0], grad[count - 1] = value, 0.75
        grad[count:] = 1024.0
        got = path(case, grad, boxes)
        assert got[0, 0, 1, 1] == expected
        assert got[0, 0, 0, 0] == 0.75 and got[1, 0, 1, 1] == 200 * 1024


def test_a_coordinate_just_above_zero_is_the_border(device):
    """Its weight on the next cell would be so small that a denormal mode might decide about it."""
    boxes = torch.tensor([[0, 0.5, 0.5, 0.5 + 2.0**-50, 1.5]], dtype=torch.float64)
    case = Case((1, 1, 2, 3), 1, (1, 2), ratio=2, boxes=boxes)
    input = torch.tensor([[[[2.0, torch.nan, 1.0]] * 2]], dtype=torch.float64)
    assert forward(case, input.to(device), boxes.to(device)).tolist() == [[[[2.0, 2.0]]]]
    assert reference_forward(case, input, boxes).tolist() == [[[[2.0, 2.0]]]]


def test_the_public_function_and_the_operator_agree(device):
    case = Case((2, 3, 9, 9), 7, (2, 2))
    input = case.make_input(device=device).requires_grad_()
    boxes, grad = case.make_boxes(device=device), case.make_grad(device=device)
    out = roi_align(input, boxes, case.bins, aligned=True)
    assert_bitwise_equal(out, forward(case, input, boxes))
    (gradient,) = torch.autograd.grad(out, input, grad)
    assert_bitwise_equal(gradient, backward(case, grad, boxes))
