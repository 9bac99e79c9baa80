"""Certification: proved sums never change with the order, and the unproved are counted."""

import gc
import itertools
import math
import weakref
from fractions import Fraction

import pytest
import torch

from truncdet import wrap
from truncdet._certify import FLOOR, MOST_CONTRIBUTIONS, bound_factor, unproved_cells
from truncdet._crossing import cross
from truncdet.testing import assert_bitwise_equal, bits, midpoint_case

ROUNDINGS = [11, 3, 24, None, torch.float16, torch.bfloat16]


def rounded(values, rounding):
    return cross(values, rounding, torch.float32)


def mask(total, absolute, n, rounding=11):
    return unproved_cells(total, absolute, n, lambda v: rounded(v, rounding))


def sums(values, orders):
    """Sequential float64 sums of each row of values, in each order: [orders, rows]."""
    total = torch.zeros(len(orders), len(values), dtype=torch.float64, device=values.device)
    for column in orders.unbind(1):
        total = total + values.T[column]
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 2**30, MOST_CONTRIBUTIONS])
def test_bound_factor_is_an_upper_bound_and_tight(n):
    relative = Fraction(n - 1, 2**53)
    exact = relative / (1 - relative)
    assert Fraction(bound_factor(n)) >= exact
    assert Fraction(bound_factor(n)) <= exact * (1 + Fraction(1, 2**50))


def test_nothing_is_proved_beyond_the_most_contributions(device):
    one = torch.ones(1, dtype=torch.float64, device=device)
    assert not mask(one, one, 3).any()
    assert bound_factor(MOST_CONTRIBUTIONS + 1) == math.inf
    assert mask(one, one, MOST_CONTRIBUTIONS + 1).all()


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_proved_cells_never_change_under_permutations(rounding, device):
    generator = torch.Generator().manual_seed(0)
    size = 24
    values = torch.randn(400, size, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-20, 20, values.shape, generator=generator)
    # Sums near midpoints and edges, by construction: the last contribution moves them there.
    target = rounded(values.sum(1), rounding).double()
    step = 2.0 ** torch.randint(-56, -8, (400,), generator=generator)
    values[:200, -1] += (target * (1 + step) - values.sum(1))[:200]
    values = values.to(device)
    orders = torch.stack([torch.randperm(size, generator=generator) for _ in range(200)])
    totals = sums(values, orders.to(device))
    absolute = sums(values.abs(), orders[:1].to(device))[0]
    unproved = mask(totals[0], absolute, size, rounding)
    words = bits(rounded(totals, rounding))
    changes = (words != words[0]).any(0)
    assert not (changes & ~unproved).any()
    assert not unproved.all()


def test_unproved_cells_do_change_in_the_shipped_case(device):
    case = midpoint_case(cells=6, unproved=2, device=device)
    values = case.gradient.double().view(6, 4)
    orders = torch.tensor(list(itertools.permutations(range(4))), device=device)
    totals = sums(values, orders)
    words = bits(rounded(totals, 11))
    changes = (words != words[0]).any(0)
    assert changes.tolist() == [True, True, False, False, False, False]
    for total in totals:
        assert mask(total, values.abs().sum(1), 4).tolist() == changes.tolist()


# torch casts doubles to half types through float32, whose midpoint beyond the tie then decides.
@pytest.mark.parametrize(
    "rounding, middle",
    [
        (11, 1 + 2**-11),
        (3, 1 + 2**-3),
        (24, 1 + 2**-24),
        (None, 1 + 2**-24),
        (torch.bfloat16, 1 + 2**-8 + 2**-24),
        (torch.float16, 1 + 2**-11 + 2**-24),
    ],
)
def test_the_distance_to_a_midpoint_decides(rounding, middle, device):
    n = 100
    bound = float(Fraction(bound_factor(n)) * 2)  # of A = 1, the width 2 d of the interval
    near, far = bound * 0.9, bound * 1.1
    total = torch.tensor(
        [middle, middle + near, middle - near, middle + far, middle - far, 1.0, 2.0],
        dtype=torch.float64,
        device=device,
    )
    absolute = torch.ones_like(total)
    expected = [True, True, True, False, False, False, False]
    assert mask(total, absolute, n, rounding).tolist() == expected
    assert mask(-total, absolute, n, rounding).tolist() == expected


def test_binade_edges_overflow_and_subnormals_are_boundaries_where_they_are(device):
    def one(value, rounding, n=2):
        total = torch.tensor([value], dtype=torch.float64, device=device)
        return mask(total, total.abs(), n, rounding).item()

    edge = 2.0 - 2.0**-11  # below 2 the step is 2^-10, so this is the last midpoint
    assert one(edge, 11) and one(-edge, 11)
    assert not one(2.0 + 2.0**-11, 11)  # above it the step has doubled
    assert one(2.0 + 2.0**-10, 11)
    # Halfway to Inf and halfway to the smallest subnormal; for half as float32 sees them.
    for middle in (2.0**128 - 2.0**103, 2.0**-150):
        assert one(middle, None) and not one(middle * 1.001, None)
    for middle in (65520 - 2.0**-9, 2.0**-25 * (1 + 2**-24)):
        assert one(middle, torch.float16) and not one(middle * 1.001, torch.float16)
        assert not one(middle, 11)


def test_zeros_singles_and_non_finite_cells(device):
    nan, inf = torch.nan, torch.inf
    middle = 1 + 2.0**-11
    total = torch.tensor(
        [0.0, -0.0, 0.0, nan, inf, 1.0, middle, FLOOR / 2], dtype=torch.float64, device=device
    )
    absolute = torch.tensor(
        [0.0, 0.0, 1.0, nan, inf, inf, middle, FLOOR / 2], dtype=torch.float64, device=device
    )
    many = [False, False, True, True, True, True, True, True]
    assert mask(total, absolute, 5).tolist() == many
    single = [False, False, False, True, True, True, False, False]
    assert mask(total, absolute, 1).tolist() == single


@pytest.mark.parametrize("cells, unproved", [(8, 3), (5, 5), (4, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("keep", [3, 11, 24])
def test_the_shipped_case_has_the_count_it_says(cells, unproved, keep, device):
    case = midpoint_case(cells, unproved, keep, device)
    f = wrap(case.function, grad_bits=keep, certify=True, weights="nonnegative", n=case.n)
    x = case.x.requires_grad_()
    for _ in range(2):
        f(x, case.index).backward(case.gradient)
    assert [c.item() for c in f.unproved] == [unproved, unproved]
    assert all(c.shape == () and c.device.type == device.type for c in f.unproved)
    assert f.unproved_cells() == 2 * unproved
    f.reset_unproved()
    assert f.unproved == [] and f.unproved_cells() == 0


def test_shuffled_contributions_change_only_uncertified_bits(device):
    case = midpoint_case(cells=6, unproved=2, device=device)
    f = wrap(case.function, certify=True, weights="nonnegative", n=4)
    x = case.x.requires_grad_()
    seen = []
    for order in itertools.islice(itertools.permutations(range(4)), 24):
        shuffle = (torch.arange(6)[:, None] * 4 + torch.tensor(order)).flatten().to(device)
        y = f(x, case.index[shuffle])
        seen.append(torch.autograd.grad(y, x, case.gradient[shuffle])[0])
    stacked = bits(torch.stack(seen))
    assert (stacked[:, 2:] == stacked[0, 2:]).all()
    assert (stacked[:, :2] != stacked[0, :2]).any(0).all() or device.type == "cuda"
    assert f.unproved_cells() == 2 * 24


def test_n_may_be_implied_or_computed(device):
    case = midpoint_case(cells=6, unproved=2, device=device)
    calls = []

    def bound(x, index):
        calls.append(index.shape)
        return 1

    for n, expected in [(None, 2), (bound, 0), (1, 0), (2**51, 4)]:
        f = wrap(case.function, certify=True, weights="nonnegative", n=n)
        f(case.x.requires_grad_(), case.index).sum().backward()
        f.reset_unproved()
        f(case.x, case.index).backward(case.gradient)
        assert f.unproved_cells() == expected, n
    assert calls == [(24,), (24,)]


def test_counting_does_not_change_the_gradient(device):
    case = midpoint_case(cells=8, unproved=3, device=device)
    x = case.x.requires_grad_()
    plain = wrap(case.function)
    counted = wrap(case.function, certify=True, weights="nonnegative", n=4)
    grads = [torch.autograd.grad(f(x, case.index), x, case.gradient)[0] for f in (plain, counted)]
    if device.type == "cpu":
        assert_bitwise_equal(*grads)
    assert plain.unproved == []


def test_two_calls_in_one_graph_keep_their_counts_apart():
    first, second = midpoint_case(8, 3), midpoint_case(8, 5)
    f = wrap(first.function, certify=True, weights="nonnegative", n=4)
    x = first.x.requires_grad_()
    outputs = [f(x, first.index), f(x, second.index)]
    torch.autograd.backward(outputs, [first.gradient, second.gradient])
    assert sorted(c.item() for c in f.unproved) == [3, 5]


def test_several_inputs_and_outputs_count_together(device):
    case = midpoint_case(8, 3, device=device)

    def both(pair, index):
        return {"a": pair[0].index_select(0, index), "b": [pair[1].index_select(0, index), 7]}

    f = wrap(both, certify=True, weights="nonnegative", n=4)
    x, y = (case.x.clone().requires_grad_() for _ in range(2))
    result = f((x, y), case.index)
    assert result["b"][1] == 7
    grads = [case.gradient, case.gradient]
    torch.autograd.backward([result["a"], result["b"][0]], grads)
    assert [c.item() for c in f.unproved] == [6]
    result = f((x, y), case.index)
    result["b"][0].backward(case.gradient)
    assert [c.item() for c in f.unproved] == [6, 3]


def test_the_graph_is_freed():
    nodes = []

    def box(t):
        nodes.append(weakref.ref(t.grad_fn))
        return t * 2

    f = wrap(box, certify=True, weights="nonnegative")
    gc.disable()
    try:
        y = f(torch.ones(2, requires_grad=True))
        nodes.append(weakref.ref(y.grad_fn))
        y.sum().backward()
        assert None not in [node() for node in nodes]
        del y
        assert [node() for node in nodes] == [None, None]
    finally:
        gc.enable()


def test_a_double_result_may_be_changed_in_place():
    f = wrap(lambda t: t * 2, certify=True, weights="nonnegative")
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    f(x).add_(1).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_nothing_is_counted_without_gradients():
    case = midpoint_case()
    f = wrap(case.function, certify=True, weights="nonnegative")
    f(case.x, case.index)
    with torch.no_grad():
        f(case.x.requires_grad_(), case.index)
    assert f.unproved == []


def test_double_backward_is_refused_while_counting():
    case = midpoint_case()
    f = wrap(case.function, certify=True, weights="nonnegative")
    (grad,) = torch.autograd.grad(
        (f(case.x.requires_grad_(), case.index) ** 2).sum(), case.x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.cuda
def test_counting_does_not_wait_for_the_device():
    case = midpoint_case(device="cuda")
    f = wrap(case.function, certify=True, weights="nonnegative", n=4)
    x = case.x.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        f(x, case.index).backward(case.gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert f.unproved_cells() == 3


def test_roi_align_backward_is_counted():
    torchvision = pytest.importorskip("torchvision")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 12, 12, generator=generator, requires_grad=True)
    corner = torch.rand(40, 2, generator=generator) * 8
    boxes = torch.cat([torch.zeros(40, 1), corner, corner + 4], 1)

    def most(features, rois, size, **_):
        return len(rois) * size * size * 4

    options = dict(certify=True, weights="nonnegative", n=most)
    few = wrap(torchvision.ops.roi_align, **options)
    many = wrap(torchvision.ops.roi_align, grad_bits=45, **options)
    g = torch.randn(40, 2, 5, 5, generator=generator)
    few(x, boxes, 5, sampling_ratio=2).backward(g)
    assert few.unproved_cells() == 0
    # Kept at 45 bits a double sum has no room left for its own error.
    many(x.detach().double().requires_grad_(), boxes, 5, sampling_ratio=2).backward(g.double())
    assert 0 < many.unproved_cells() <= x.numel()


@pytest.mark.parametrize("weights", [None, "any", "positive"])
def test_certify_needs_the_statement(weights):
    with pytest.raises(ValueError, match=r"wrap: weights must be 'nonnegative' to certify.*got"):
        wrap(torch.sin, certify=True, weights=weights)


def test_other_errors():
    with pytest.raises(ValueError, match="wrap: compute_dtype must be float64 to certify"):
        wrap(torch.sin, certify=True, weights="nonnegative", compute_dtype=torch.float32)
    for n in (0, 2.0, True):
        f = wrap(lambda x: x * 2, certify=True, weights="nonnegative", n=n)
        with pytest.raises(ValueError, match="wrap: n must be, or return, an int of at least 1"):
            f(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="midpoint_case: unproved must be from 0 to 2, got 3"):
        midpoint_case(2, 3)
