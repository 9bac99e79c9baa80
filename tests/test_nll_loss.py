"""nll_loss: kernels are the reference, PyTorch's semantics hold, no order changes a bit."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from exact_arithmetic import fractions_of, half_ulp
from scatter_cases import CANCELLING, each_dtype, random_floats, random_index
from scatter_group import assert_compiles, assert_gradients, assert_same_as, orders

import truncdet
from truncdet import TruncdetError, _sticky, fixedpoint, nll_loss
from truncdet import _nll_loss_reference as reference
from truncdet.testing import assert_bitwise_equal

SHAPES = [(5,), (7, 5), (3, 5, 4), (2, 5, 4, 6), (2, 5, 2, 3, 4), (2, 1, 3), (0, 5), (2, 5, 0, 3)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
each_weight = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
ops = torch.ops.truncdet


def make_target(shape, device, ignored=-100):
    """Classes of all places, with a few that are ignored."""
    places = () if len(shape) == 1 else (shape[0], *shape[2:])
    target = random_index(places, shape[0 if len(shape) == 1 else 1], device)
    if target.numel() > 3:
        target.view(-1)[::3] = ignored
    return target


def make_weight(shape, dtype, device, weighted=True):
    count = shape[0 if len(shape) == 1 else 1]
    return random_floats((count,), dtype, device, 1, seed=4) if weighted else None


def primitive_case(dtype, device, hostile):
    """Arguments of the primitive, ignored targets and those out of range among them."""
    input = random_floats((3, 5, 40), dtype, device, 2)
    weight = random_floats((5,), dtype, device, 1, seed=3)
    target = random_index((3, 40), 9, device) - 2
    target[0, :4] = torch.tensor([2**40, -(2**62), 4, 0], device=device)
    if hostile:
        input[0, 4, 2], input[0, 0, 3] = torch.nan, torch.inf
        input[1, :, 5], input[1, :, 6] = -torch.inf, -0.0
        weight[1], weight[2] = torch.inf, 0
    return input, target, weight


@each_dtype
@each_weight
@pytest.mark.parametrize("hostile", [False, True], ids=["", "hostile"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_kernels_are_the_reference(device, dtype, weighted, hostile, ignore_index):
    input, target, weight = primitive_case(dtype, device, hostile)
    weight = weight if weighted else None
    expected = reference.terms(input, target, weight, ignore_index, 0)
    got = ops._nll_terms(input, target, weight, ignore_index, 0)
    assert_bitwise_equal(got, expected)
    swapped = input.transpose(0, 2).contiguous().transpose(0, 2)
    assert_bitwise_equal(ops._nll_terms(swapped, target, weight, ignore_index, 0), expected)
    grad = got[0] * 3
    for classes in (5, 1, 19):
        own = None if weight is None else random_floats((classes,), dtype, device, 1)
        rest = (grad, target, own, classes, ignore_index, dtype)
        assert_bitwise_equal(ops._nll_spread(*rest), reference.spread(*rest))


@each_shape
@each_reduction
@each_weight
def test_values_and_gradients_are_pytorchs(device, shape, reduction, weighted):
    input = random_floats(shape, torch.float64, device, 1)
    weight = make_weight(shape, torch.float64, device, weighted)
    for ignore_index in (-100, 0):
        target = make_target(shape, device, ignore_index)
        if device.type == "cuda" and bool((target == ignore_index).all()):
            # PyTorch's mean of nothing is NaN on the CPU and 0 on a GPU: ours is the CPU's on both.
            here = nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
            there = F.nll_loss(
                input.cpu(),
                target.cpu(),
                None if weight is None else weight.cpu(),
                ignore_index=ignore_index,
                reduction=reduction,
            )
            torch.testing.assert_close(here.cpu(), there, rtol=0, atol=0, equal_nan=True)
            continue

        def through(op, target=target, ignore_index=ignore_index):
            return lambda x: op(x, target, weight, ignore_index=ignore_index, reduction=reduction)

        assert_same_as(through(nll_loss), through(F.nll_loss), input)


@each_reduction
def test_hostile_values_are_pytorchs(reduction):
    """On the CPU: what is not finite, and targets of which none is used."""
    input = random_floats((4, 3, 5), torch.float64, "cpu", 1)
    target = make_target(input.shape, "cpu")
    for value in (torch.nan, torch.inf, -torch.inf):
        poisoned = input.clone()
        poisoned[:, 1, 2] = value
        for weight in (None, torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)):
            pair = (
                op(poisoned, target, weight, reduction=reduction) for op in (nll_loss, F.nll_loss)
            )
            torch.testing.assert_close(*pair, equal_nan=True)
    unused = torch.full_like(target, -100)
    pair = (op(input, unused, reduction=reduction) for op in (nll_loss, F.nll_loss))
    torch.testing.assert_close(*pair, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_targets_of_other_integers(device, kind):
    input = random_floats((6, 5), torch.float32, device, 1)
    target = random_index((6,), 5, device)
    assert_bitwise_equal(nll_loss(input, target.to(kind)), nll_loss(input, target))


@each_dtype
@each_reduction
@each_weight
def test_half_types_are_rounded_once(device, dtype, reduction, weighted):
    """The result is that of the same numbers in a wider type; the sum itself has no half steps."""
    shape = (2, 5, 30, 40)
    input, weight = random_floats(shape, dtype, device, 1), make_weight(shape, dtype, device)
    weight = weight if weighted else None
    target = make_target(shape, device)
    wide = fixedpoint.compute_dtype(dtype)
    expected = nll_loss(
        input.to(wide), target, None if weight is None else weight.to(wide), reduction=reduction
    )
    got = nll_loss(input, target, weight, reduction=reduction)
    assert got.dtype == dtype
    assert_bitwise_equal(got, expected.to(dtype))


def test_a_mean_of_more_places_than_float16_can_count(device):
    input = torch.full((2, 2, 300, 300), -1.0, dtype=torch.float16, device=device)
    target = torch.zeros(2, 300, 300, dtype=torch.int64, device=device)
    loss = nll_loss(input.requires_grad_(), target)
    loss.backward()
    assert loss.item() == 1.0
    assert input.grad[0, 0, 0, 0].item() == torch.tensor(-1 / 180000).half().item()


@each_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@each_weight
def test_the_order_of_places_changes_no_bit(device, dtype, reduction, weighted):
    values = torch.tensor(CANCELLING * 50, device=device).to(dtype)
    input = torch.stack([values, values.flip(0)], 1)
    weight = torch.tensor([0.7, 1e-3], device=device).to(dtype) if weighted else None
    target = random_index((300,), 2, device)
    first = nll_loss(input, target, weight, reduction=reduction)
    for order in orders(300, 100):
        order = order.to(device)
        again = nll_loss(input[order], target[order], weight, reduction=reduction)
        assert_bitwise_equal(again, first)


def test_the_order_of_places_changes_plain_sums():
    """The negative control: PyTorch's function, which on the CPU adds in the order of places."""
    values = torch.tensor(CANCELLING * 50)
    input, target = torch.stack([values, values], 1), torch.zeros(300, dtype=torch.int64)
    seen = {F.nll_loss(input[order], target, reduction="sum").item() for order in orders(300, 30)}
    assert len(seen) > 1


@each_dtype
@each_weight
def test_errors_stay_inside_the_published_bound(device, dtype, weighted):
    input = random_floats((200, 3), dtype, device, 2)
    weight = make_weight(input.shape, dtype, device, weighted)
    target = random_index((200,), 3, device)
    got = nll_loss(input, target, weight, reduction="sum")
    terms, factors = reference.terms(input.unsqueeze(2), target.unsqueeze(1), weight, -1, 0)
    bits = fixedpoint.headroom(200)
    rest = 2 * (bits - 62) if dtype == torch.float64 else bits - 62
    exact, amax = sum(fractions_of(terms)), max(map(abs, fractions_of(terms)))
    result = fractions_of(got)[0]
    bound = 200 * amax * Fraction(2) ** rest + half_ulp(result, dtype)
    kind = fixedpoint.compute_dtype(dtype)
    if kind != dtype:
        bound += half_ulp(result, kind)
    assert abs(result - exact) <= bound
    mean = nll_loss(input, target, weight)
    wide = fractions_of(got.to(kind))[0] / sum(fractions_of(factors))
    assert abs(fractions_of(mean)[0] - wide) <= 4 * half_ulp(wide, dtype)


def test_gradients(device):
    for shape in ((4, 3), (2, 3, 2, 2)):
        input = random_floats(shape, torch.float64, device, 0)
        target = make_target(shape, device)
        weight = make_weight(shape, torch.float64, device)
        for reduction in ("none", "mean", "sum"):
            call = lambda x, r=reduction, t=target, w=weight: nll_loss(x, t, w, reduction=r)  # noqa: E731
            assert_gradients(call, input)


def test_memory_layouts_change_nothing(device):
    input = random_floats((2, 5, 4, 6), torch.float32, device, 1)
    target = make_target(input.shape, device)
    expected = nll_loss(input, target)
    for other in (
        input.contiguous(memory_format=torch.channels_last),
        torch.stack([input, input], -1)[..., 0],
        input.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert not other.is_contiguous()
        assert_bitwise_equal(nll_loss(other, target), expected)
    turned = target.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(nll_loss(input, turned), expected)


def test_flushing_denormals_changes_nothing():
    input = random_floats((50, 4), torch.float32, "cpu", 1)
    target = random_index((50,), 4, "cpu")
    cases = [(input * 1e-42, None), (input, torch.rand(4) + 0.5)]

    def run():
        return [nll_loss(x, target, w, reduction="sum") for x, w in cases]

    before = run()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = run()
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)
    assert before[0] != 0


def test_autocast_computes_where_pytorch_does(device):
    input = torch.randn(4, 3, 2, 2, device=device)
    target, weight = make_target(input.shape, device), torch.rand(3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for kind in (torch.bfloat16, torch.float32, torch.float64):
            arguments = (input.to(kind), target, weight.to(kind))
            assert nll_loss(*arguments).dtype == F.nll_loss(*arguments).dtype
            assert_bitwise_equal(
                nll_loss(*arguments),
                nll_loss(
                    *(
                        x.to(F.nll_loss(*arguments).dtype) if x.is_floating_point() else x
                        for x in arguments
                    )
                ),
            )


def test_compiles_in_one_graph(device):
    for shape in ((4, 3), (2, 3, 4, 4)):
        input = random_floats(shape, torch.float32, device, 1)
        target, weight = make_target(shape, device), make_weight(shape, torch.float32, device)
        for reduction in ("none", "mean"):
            call = lambda x, t=target, w=weight, r=reduction: nll_loss(x, t, w, reduction=r)  # noqa: E731
            assert_compiles(call, input)


def test_operator_checks(device):
    input, target, weight = primitive_case(torch.float32, device, False)
    target = target.clamp(0, 4)
    for own in (None, weight):
        leaf = input.clone().requires_grad_()
        torch.library.opcheck(ops.nll_terms.default, (leaf, target, own, 2, _sticky.NLL_LOSS))
        torch.library.opcheck(ops._nll_terms.default, (input, target, own, 2, 0))
        grad = torch.randn(3, 40, device=device, requires_grad=True)
        for dtype in (torch.float32, torch.float16):
            half = None if own is None else own.to(dtype)
            torch.library.opcheck(ops._nll_spread.default, (grad, target, half, 5, 2, dtype))
    pair = (torch.randn(3, device=device, requires_grad=True), torch.rand(3, device=device))
    torch.library.opcheck(ops._ratio.default, pair)


def test_a_mean_of_nothing_is_the_canonical_nan(device):
    input = torch.zeros(2, 3, device=device, requires_grad=True)
    unused = torch.full((2,), -100, device=device)
    loss = nll_loss(input, unused)
    assert_bitwise_equal(loss.detach(), torch.tensor(torch.nan))
    assert_bitwise_equal(torch.autograd.grad(loss, input)[0], torch.zeros(2, 3))
    for reduction, value in (("mean", torch.nan), ("sum", 0.0)):
        loss = nll_loss(input[:0], unused[:0], reduction=reduction)
        assert_bitwise_equal(loss.detach(), torch.tensor(value))


def test_a_target_out_of_range(device):
    input = random_floats((4, 3), torch.float32, device, 1).requires_grad_()
    target = torch.tensor([0, 3, -1, 2], device=device)
    if device.type == "cpu":
        text = r"^nll_loss: target must be in \[0, 3\) or ignore_index, -100, got 3$"
        with pytest.raises(ValueError, match=text):
            nll_loss(input, target)
        return
    _sticky.check()
    loss = nll_loss(input, target)
    with pytest.raises(TruncdetError, match=r"^nll_loss: an index was out of range"):
        _sticky.check()
    (grad,) = torch.autograd.grad(loss, input)
    assert_bitwise_equal(grad[1:3], torch.zeros_like(grad[1:3]))
    used = torch.tensor([0, 3], device=device)
    assert_bitwise_equal(loss, nll_loss(input[used], target[used]))
    _sticky.check()


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    input = random_floats((2, 5, 30, 40), torch.float32, "cuda", 1)
    target = make_target(input.shape, "cuda")
    expected = nll_loss(input, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nll_loss(input, target)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


def test_old_names_of_the_reductions():
    input, target = random_floats((4, 3), torch.float32, "cpu", 1), torch.tensor([0, 2, 1, 1])
    for old, new in (
        ({"reduce": False}, "none"),
        ({"size_average": False}, "sum"),
        ({"size_average": True}, "mean"),
        ({"size_average": False, "reduce": True}, "sum"),
    ):
        with pytest.warns(UserWarning, match=f"old names for reduction='{new}'"):
            got = nll_loss(input, target, **old)
        assert_bitwise_equal(got, nll_loss(input, target, reduction=new))


def test_wrong_arguments_are_named():
    x, t = torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)
    w = torch.ones(3)
    for text, error, args in [
        ("input must be a Tensor, got list", TypeError, ([1], t)),
        ("input must be float64, .*, got torch.int64", TypeError, (x.long(), t)),
        (r"input must have shape \[C\] or \[N, C, ...\], got \[\]", ValueError, (x[0, 0, 0], t)),
        ("target must be a Tensor, got int", TypeError, (x, 1)),
        ("target must be int64, int32 or uint8, got torch.float32", TypeError, (x, t.float())),
        (
            r"target must have input's shape without the classes, \[4, 2\], got \[4\]$",
            ValueError,
            (x, t[:, 0]),
        ),
        (
            r"target must have input's shape without the classes, \[\], got \[1\]$",
            ValueError,
            (x[0, :, 0], t[0, :1]),
        ),
        ("target must be on input's device, cpu, got meta", ValueError, (x, t.to("meta"))),
        ("weight must be a Tensor or None, got float", TypeError, (x, t, 1.0)),
        ("weight must have input's dtype, torch.float32, got torch.f", TypeError, (x, t, w.half())),
        (r"weight must have shape \[3\], got \[2\]", ValueError, (x, t, w[:2])),
        ("weight must be on input's device, cpu, got meta", ValueError, (x, t, w.to("meta"))),
        ("weight must not require a gradient", ValueError, (x, t, w.clone().requires_grad_())),
    ]:
        with pytest.raises(error, match="^nll_loss: " + text):
            nll_loss(*args)
    with pytest.raises(ValueError, match=r"^nll_loss: reduction must be .none., .*, got .avg.$"):
        nll_loss(x, t, reduction="avg")


def test_kernels_check_what_python_has_checked():
    if not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_nll_terms", "CPU"):
        pytest.skip("checks of the compiled kernels")
    x, t, w = torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64), torch.ones(3)
    for args in [(x[0], t, w), (x, t[:3], w), (x, t.int(), w), (x, t, w[:2]), (x, t, w.double())]:
        with pytest.raises(RuntimeError, match="nll_loss: "):
            ops._nll_terms(*args, -100, 0)
    with pytest.raises(RuntimeError, match="nll_loss: target must be in"):
        ops._nll_terms(x, t + 3, w, -100, 1)
    g = torch.zeros(4, 2)
    for args in [(g[0], t, w, 3), (g, t[:3], w, 3), (g.double(), t, w, 3), (g, t, w, 4)]:
        with pytest.raises(RuntimeError, match="nll_loss: "):
            ops._nll_spread(*args, -100, torch.float32)


def test_module(device):
    input = random_floats((2, 5, 4, 6), torch.float32, device, 1)
    target, weight = make_target(input.shape, device, 1), torch.rand(5, device=device)
    layer = truncdet.NLLLoss(weight, ignore_index=1, reduction="sum")
    assert isinstance(layer, torch.nn.NLLLoss)
    expected = nll_loss(input, target, weight, ignore_index=1, reduction="sum")
    assert_bitwise_equal(layer(input, target), expected)
