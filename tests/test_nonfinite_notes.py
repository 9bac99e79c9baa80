"""NaN and infinities in every operator that adds through atomics, in results of odd sizes.

On CUDA they are noted in the result itself before it is written; the last element of an odd number
of halves has a neighbour in its word that is not the result's.
"""

import pytest
import torch
from roi_cases import ATOMIC, Case, backward, scheduled
from sampling_cases import each_dtype, make_attention, make_case, randn
from scatter_cases import random_index

from truncdet import index_add, scatter_add
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.truncdet


def sums_of_elements(device, dtype):
    index = random_index([5000], 1001, device)
    base = torch.zeros(1001, dtype=dtype, device=device)
    return (5000,), lambda x: scatter_add(base, 0, index, x)


def exact_sums_of_elements(device, dtype):
    index = random_index([5000], 1001, device)
    base = torch.zeros(1001, dtype=dtype, device=device)
    return (5000,), lambda x: scatter_add(base, 0, index, x, exact=True)


def sums_of_rows(device, dtype):
    index = random_index([200], 33, device)
    base = torch.zeros(33, 7, dtype=dtype, device=device)
    return (200, 7), lambda x: index_add(base, 0, index, x)


def sampling(device, dtype):
    input, grid, grad = make_case(2, dtype, device, n=1, cells=(7, 9), places=(5, 11))
    rest = (0, 0, False, True, True)
    return grad.shape, lambda x: ops.grid_sample_backward(x, input, grid, *rest)[0]


def attention(device, dtype):
    *case, weights = make_attention(dtype, device, n=1, heads=1, channels=5, queries=5)
    weights = weights.abs()  # infinities keep their sign
    return (1, 5, 5), lambda x: ops.ms_deform_attn_backward(x, *case, weights)[0]


ROIS = Case((1, 3, 9, 13), 6, (3, 2))


def rois(device, dtype):
    boxes = ROIS.make_boxes(dtype).to(device)
    shape = ROIS.make_grad(dtype).shape
    if device.type == "cuda":
        return shape, lambda x: scheduled(ROIS, x, boxes, ATOMIC)
    return shape, lambda x: backward(ROIS, x, boxes)


def largest_of_rois(device, dtype):
    boxes = ROIS.make_boxes(dtype).to(device)
    argmax = ops.roi_align_max(ROIS.make_input(dtype).to(device), boxes, *ROIS.rest)[1]
    size = (*ROIS.shape, *ROIS.rest, False)
    return argmax.shape, lambda x: ops.roi_align_max_backward(x, argmax, boxes, *size)


def leave_garbage(like):
    """Freed memory of the result's size, all bits set, which an allocator may well give again."""
    for x in [torch.empty_like(like) for _ in range(4)]:
        x.view(torch.uint8).fill_(255)


OPERATORS = (
    sums_of_elements,
    exact_sums_of_elements,
    sums_of_rows,
    sampling,
    attention,
    rois,
    largest_of_rois,
)


@each_dtype
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.__name__)
def test_they_reach_their_cells_alone(device, dtype, operator):
    shape, run = operator(device, dtype)
    clean = randn(shape, dtype, device, 1)
    each = max(2, clean.numel() // 30)
    places = torch.randperm(clean.numel(), generator=torch.Generator().manual_seed(2))
    poisoned, reached = clean.clone(), []
    for number, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        at = places[number * each : (number + 1) * each].to(device)
        marks = torch.zeros_like(clean)
        marks.view(-1)[at] = 100
        reached.append(run(marks) != 0)
        clean.view(-1)[at] = 0
        poisoned.view(-1)[at] = value
    plus, minus, nan = reached
    expected = run(clean)
    assert expected.numel() % 2 == 1
    assert expected.isfinite().all() and (~(plus | minus | nan)).any()
    expected = torch.where(plus, torch.inf, torch.where(minus, -torch.inf, expected))
    expected = torch.where(nan | (plus & minus), torch.nan, expected).to(dtype)
    assert plus.any() and minus.any() and nan.any()
    leave_garbage(expected)
    assert_bitwise_equal(run(poisoned), expected)


@each_dtype
@pytest.mark.parametrize("operator", OPERATORS[:3], ids=lambda o: o.__name__)
def test_the_last_element_is_noted_beside_nothing(device, dtype, operator):
    """All cells are noted at once, from many threads."""
    shape, run = operator(device, dtype)
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.full(shape, value, dtype=dtype, device=device)
        reached = run(torch.ones_like(x)) != 0
        leave_garbage(reached.to(dtype))
        got = run(x)
        assert reached.flatten()[-1]
        expected = torch.where(reached, torch.full_like(got, value), torch.zeros_like(got))
        assert_bitwise_equal(got, expected)
