"""roi_align_rotated: no order, batch, denormal mode or neighbour with a NaN changes its bits."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import (
    LAYOUT,
    fractions_of,
    from_words,
    half_ulp,
    nearest_word,
    sign_bit,
    words_of,
)
from roi_cases import PERMUTATIONS, each_dtype, permutations
from rotated_cases import (
    Case,
    backward,
    each_case,
    forward,
    matrices,
    one_cell_case,
    one_cell_sum,
    reference_backward,
    reference_forward,
    stack_rois,
)
from scatter_cases import CANCELLING

from truncdet import fixedpoint
from truncdet.testing import assert_bitwise_equal

CROWD = Case((1, 3, 6, 7), 40, (2, 2))
MIXED = Case((3, 2, 8, 9), 24, (2, 3))
both_paths = pytest.mark.parametrize(
    "path", [backward, reference_backward], ids=["kernel", "reference"]
)


@each_dtype
def test_permutations_of_the_rois_keep_the_bits(device, dtype):
    case = Case((3, 3, 9, 17), 60, (3, 3))
    grad, rois = case.make_grad(dtype, device), case.make_rois(dtype, device)
    input = case.make_input(dtype, device)
    out, first = forward(case, input, rois), backward(case, grad, rois)
    for order in permutations(case.rois, 20):
        order = order.to(device)
        assert_bitwise_equal(backward(case, grad[order], rois[order]), first)
        assert_bitwise_equal(forward(case, input, rois[order]), out[order])


def test_many_permutations_of_a_crowd_keep_the_bits(device):
    grad, rois = CROWD.make_grad(device=device), CROWD.make_rois(device=device)
    first = backward(CROWD, grad, rois)
    for order in permutations(CROWD.rois):
        order = order.to(device)
        assert_bitwise_equal(backward(CROWD, grad[order], rois[order]), first)


def test_permutations_change_a_float32_sum():
    """The negative control: the same contributions, added as floats."""
    grad, rois = CROWD.make_grad(), CROWD.make_rois()
    _, weights = matrices(CROWD, rois)
    parts = torch.einsum("kpqyx,kcpq->kcyx", weights, grad)
    seen = set()
    for order in permutations(CROWD.rois, 30):
        total = torch.zeros_like(parts[0])
        for part in parts[order]:
            total = total + part
        seen.add(tuple(words_of(total)))
    assert len(seen) > 1


@each_dtype
def test_permutations_of_a_cancelling_sum_keep_the_bits(device, dtype):
    parts = [v for v in CANCELLING if dtype != torch.float16 or abs(v) < 60000]
    parts = torch.tensor(parts, dtype=torch.float64).to(dtype).repeat(50).to(device)
    first = one_cell_sum(parts)
    for order in permutations(parts.numel(), PERMUTATIONS // 10):
        assert_bitwise_equal(one_cell_sum(parts[order.to(device)]), first)
    # 2^-60 is far below the resolution of the sum, so only the rest counts.
    exact = sum(fractions_of(parts))
    slack = 300 * max(abs(v) for v in fractions_of(parts)) * Fraction(2) ** (9 - 62)
    words = [nearest_word(exact + side * slack, dtype) for side in (-1, 1)]
    assert words[0] <= words_of(first)[0] <= words[1]


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
    rois = stack_rois((0, 0, 0, 1.1, 1.0, 0.6)).repeat(16, 1)
    case = Case((1, 1, 1, 1), 16, (4, 4), ratio=3, aligned=False, boxes=rois)
    word = nearest_word(Fraction(2), dtype) - 1
    grad = from_words([word], dtype).expand(16, 1, 4, 4).contiguous()
    got = backward(case, grad.to(device), case.make_rois(dtype, device))
    total = 16 * 16 * fractions_of(grad[:1, :1, :1, :1])[0]
    assert words_of(got)[0] == pytest.approx(nearest_word(total, dtype), abs=4)
    assert_bitwise_equal(got.cpu(), reference_backward(case, grad, case.make_rois(dtype)))


@each_dtype
def test_errors_stay_inside_the_published_bound(device, dtype):
    case = Case((1, 2, 5, 6), 12, (3, 2), ratio=2, largest=1.2)
    grad, rois = case.make_grad(dtype), case.make_rois(dtype)
    _, weights = matrices(case, rois)
    kind = fixedpoint.compute_dtype(dtype)
    got = fractions_of(backward(case, grad.to(device), rois.to(device)).cpu())
    amax = max(abs(v) for v in fractions_of(grad))
    bits = fixedpoint.headroom(12 * 6)
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    sums, counts = [Fraction(0)] * len(got), [0] * len(got)
    for k in range(12):
        contribution = torch.zeros(2, 5, 6, dtype=kind)
        for p in range(3):
            for q in range(2):
                contribution = contribution + weights[k, p, q] * grad[k, :, p, q, None, None].to(
                    kind
                )
        touched = weights[k].flatten(0, 1).any(0).expand(2, 5, 6).flatten().tolist()
        for i, (c, yes) in enumerate(zip(fractions_of(contribution), touched, strict=True)):
            sums[i] += c
            counts[i] += yes
    assert max(counts) > 5
    for result, exact, n in zip(got, sums, counts, strict=True):
        assert abs(result - exact) <= n * amax * Fraction(2) ** rest + half_ulp(result, dtype)


@each_dtype
def test_any_power_of_two_scales_the_gradient_exactly(device, dtype):
    """The exponent is the only thing that changes, as far as the format reaches."""
    largest = LAYOUT[dtype][1]
    for exponent in {1 - largest, -60, -37, -14, -1, 1, 14, 59, 60, 61, largest - 7}:
        if not 1 - largest <= exponent <= largest - 7:
            continue
        unit = Fraction(2) ** exponent
        words = [nearest_word(unit * n, dtype) for n in (1, 3, -2, 5)]
        expected = [nearest_word(7 * unit, dtype)]
        assert words_of(one_cell_sum(from_words(words, dtype, device))) == expected


@each_dtype
@both_paths
def test_flushing_denormals_changes_no_bit(dtype, path):
    case = Case((2, 2, 7, 9), 8, (2, 3))
    rois = case.make_rois(dtype)
    rois[0, 3:5] = torch.tensor([1e-40, 3.0])  # a side that is zero in one mode, and in both
    rois[1, 5] = 1e-41
    smallest = from_words([1 << LAYOUT[dtype][0]], dtype)
    grads = [case.make_grad(dtype) * smallest]
    grads.append(grads[0].clone())
    grads[1][::3] = case.make_grad(dtype)[::3]
    input = case.make_input(dtype)
    to_output = forward if path is backward else reference_forward

    def run():
        return [*(path(case, grad, rois) for grad in grads), to_output(case, input, rois)]

    before = run()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert torch.tensor(1e-40) * 1.0 == 0
        after = run()
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert any(0 < word < 1 << LAYOUT[dtype][0] for word in words_of(before[0]))


def poisoned(dtype, entries):
    """Gradient, RoIs, the clean result, the cells that the entries (k, c, p, q, value) reach."""
    grad, rois = MIXED.make_grad(dtype), MIXED.make_rois(dtype)
    image, weights = matrices(MIXED, rois)
    clean, reached = grad.clone(), {}
    for k, c, p, q, value in entries:
        clean[k, c, p, q] = 0
        grad[k, c, p, q] = value
        mask = torch.zeros(MIXED.shape, dtype=torch.bool)
        mask[image[k], c] = weights[k, p, q] != 0
        reached[value] = reached.get(value, torch.zeros_like(mask)) | mask
    return grad, rois, backward(MIXED, clean, rois), reached


def roi_inside(image):
    """The RoI of the image that reaches the most cells."""
    images, weights = matrices(MIXED, MIXED.make_rois())
    return int(((weights.sum((1, 2)) != 0).sum((1, 2)) * (images == image)).argmax())


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_a_nonfinite_gradient_reaches_its_cells_alone(device, dtype, value, channels_last):
    grad, rois, expected, reached = poisoned(dtype, [(roi_inside(1), 1, 0, 0, value)])
    (mask,) = reached.values()
    assert 0 < mask.sum() < mask[1, 1].numel()
    got = backward(MIXED, grad.to(device), rois.to(device), channels_last)
    assert_bitwise_equal(got.cpu(), torch.where(mask, torch.full_like(expected, value), expected))


@each_dtype
def test_opposite_infinities_give_nan(device, dtype):
    k = roi_inside(2)
    entries = [(k, 0, 0, 0, torch.inf), (k, 0, 0, 1, -torch.inf), (k, 0, 1, 1, torch.inf)]
    grad, rois, expected, reached = poisoned(dtype, entries)
    plus, minus = reached[torch.inf], reached[-torch.inf]
    assert (plus & minus).any() and (plus & ~minus).any()
    for mask, value in ((plus, torch.inf), (minus, -torch.inf), (plus & minus, torch.nan)):
        expected = torch.where(mask, torch.full_like(expected, value), expected)
    assert_bitwise_equal(backward(MIXED, grad.to(device), rois.to(device)).cpu(), expected)


@each_dtype
def test_a_weight_of_zero_keeps_nan_away(device, dtype):
    """A sample exactly on a cell gives its neighbours the weight zero."""
    case = one_cell_case(2)
    rois = case.make_rois(dtype, device)
    grad = torch.tensor([torch.nan, 1.0], dtype=dtype, device=device).reshape(2, 1, 1, 1)
    expected = torch.zeros(1, 1, 3, 3, dtype=dtype)
    expected[0, 0, 1, 1] = torch.nan
    assert_bitwise_equal(backward(case, grad, rois).cpu(), expected)
    input = torch.full((1, 1, 3, 3), torch.nan, dtype=dtype, device=device)
    input[0, 0, 1, 1] = 3
    assert forward(case, input, rois).flatten().tolist() == [3, 3]


@each_dtype
def test_a_nan_feature_reaches_only_the_bins_that_read_it(device, dtype):
    case = Case((2, 2, 8, 9), 60, (2, 3))
    input, rois = case.make_input(dtype), case.make_rois(dtype)
    expected = forward(case, input, rois)
    image, weights = matrices(case, rois)
    input[1, 0, 3, 4] = torch.nan
    read = (weights[..., 3, 4] != 0) & (image == 1)[:, None, None]
    assert 0 < read.sum() < read.numel()
    expected[:, 0][read] = torch.nan
    assert_bitwise_equal(forward(case, input.to(device), rois.to(device)).cpu(), expected)
    assert_bitwise_equal(reference_forward(case, input, rois), expected)


@each_dtype
@pytest.mark.parametrize("poison", [False, True], ids=["", "others_with_nan"])
def test_the_gradient_of_an_image_does_not_depend_on_the_batch(device, dtype, poison):
    grad, rois = MIXED.make_grad(dtype, device), MIXED.make_rois(dtype, device)
    if poison:
        grad[rois[:, 0] != 1, 0] = torch.nan
    else:
        grad[rois[:, 0] == 0] *= 16
    whole = backward(MIXED, grad, rois)
    for images in ([0, 1, 2], [1], [2, 1], [1, 1], [2, 0, 1]):
        # A batch of these images, the RoIs of each in turn.
        rows = [(rois[:, 0] == i).nonzero()[:, 0] for i in images]
        own = rois[torch.cat(rows)].clone()
        own[:, 0] = torch.cat([torch.full((len(r),), float(n)) for n, r in enumerate(rows)])
        part = MIXED._replace(shape=(len(images), *MIXED.shape[1:]), rois=len(own))
        got = backward(part, grad[torch.cat(rows)], own)
        assert_bitwise_equal(got, whole[torch.tensor(images, device=device)])


@each_case
def test_number_of_threads_does_not_matter(case):
    grad, rois, input = case.make_grad(), case.make_rois(), case.make_input()
    first = forward(case, input, rois), backward(case, grad, rois)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_bitwise_equal((forward(case, input, rois), backward(case, grad, rois)), first)
    finally:
        torch.set_num_threads(threads)


@both_paths
@pytest.mark.parametrize("count, headroom", [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_the_unit_of_the_sums_follows_from_the_image_alone(device, path, count, headroom):
    """2^(G - 62) with 2^G the RoIs of the image; a crowd in another image does not coarsen it."""
    unit = 2.0 ** (headroom - 62)
    own = [[0.0, 1.5, 1.5, 1, 1, 0]] * (count - 1) + [[0.0, 0.5, 0.5, 1, 1, 0]]
    rois = torch.tensor(own + [[1.0, 1.5, 1.5, 1, 1, 0]] * 200, device=device)
    case = Case((2, 1, 3, 3), len(rois), (1, 1), ratio=1, boxes=rois)
    # The largest value, just below one, is elsewhere; a cell gets one contribution.
    for value, expected in ((unit, unit), (1.5 * unit, 2 * unit), (0.5 * unit, 0), (-unit, -unit)):
        grad = torch.zeros(len(rois), 1, 1, 1, device=device)
        grad[0], grad[count - 1] = value, 0.75
        grad[count:] = 1024.0
        got = path(case, grad, rois)
        assert got[0, 0, 1, 1] == expected
        assert got[0, 0, 0, 0] == 0.75 and got[1, 0, 1, 1] == 200 * 1024
