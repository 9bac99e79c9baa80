"""ctc_loss as it is called: forms of its arguments, autograd, compilers, wrong arguments."""

import pytest
import torch
import torch.nn.functional as F
from ctc_cases import make_case, ops, run_both
from scatter_group import assert_compiles

import truncdet
from truncdet import TruncdetError, _sticky, ctc_loss
from truncdet.testing import assert_bitwise_equal


def test_targets_and_lengths_in_all_forms(device):
    probs, targets, inputs, wanted = make_case((50, 4, 7, 9), torch.float32, device)
    expected = ctc_loss(probs, targets, inputs, wanted)
    joined = torch.cat([row[:n] for row, n in zip(targets, wanted.tolist(), strict=True)])
    lists = (inputs.tolist(), wanted.tolist())
    for labels in (targets, targets.int(), targets.cpu(), joined, joined.to(torch.uint8)):
        for first, second in (
            (inputs, wanted),
            (inputs.int().cpu(), wanted.int()),
            lists,
            tuple(map(tuple, lists)),
            (inputs, lists[1]),
        ):
            assert_bitwise_equal(ctc_loss(probs, labels, first, second), expected)


def test_one_item_without_a_batch(device):
    probs, targets, _, _ = make_case((50, 1, 7, 9), torch.float64, device)
    for reduction in ("none", "sum", "mean"):
        expected = ctc_loss(probs, targets, (50,), (9,), reduction=reduction)
        for number in (torch.tensor(50), torch.tensor([50]), (50,)):
            wanted = torch.tensor(9, device=device)
            for labels in (targets, targets[0]):
                got = ctc_loss(probs[:, 0], labels, number, wanted, reduction=reduction)
                assert got.shape == ()
                assert_bitwise_equal(got, expected.reshape(()))


def test_no_labels_at_all(device):
    probs = make_case((5, 2, 3, 0), torch.float64, device)[0]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    expected = -probs[:, :, 0].sum(0)
    got = ctc_loss(probs, none, (5, 5), (0, 0), reduction="none")
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_probabilities_of_zero_keep_their_gradient_finite(device):
    """Where PyTorch subtracts infinities: a class that is masked out."""
    probs, targets, *_ = make_case((20, 2, 5, 3), torch.float64, device)
    probs[:, :, 4] = -torch.inf
    targets = targets.clamp(max=3)
    leaf = probs.requires_grad_()
    ctc_loss(leaf, targets, (20, 20), (3, 2)).backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[:, :, 4] == 0).all()


def test_gradcheck(device):
    for size in ((6, 2, 4, 2), (5, 1, 3, 2)):
        _, targets, *_ = make_case(size, device=device)
        lengths = (torch.full((size[1],), size[0]), torch.full((size[1],), size[3]))
        logits = torch.randn(size[:3], dtype=torch.float64, device=device, requires_grad=True)
        for reduction in ("none", "mean", "sum"):
            call = lambda x, r=reduction, t=targets, n=lengths: ctc_loss(  # noqa: E731
                x.log_softmax(2), t, *n, reduction=r
            )
            assert torch.autograd.gradcheck(call, (logits,), nondet_tol=0)


def test_second_derivatives_are_refused(device):
    probs, *rest = make_case((12, 3, 4, 5), device=device)
    leaf = probs.requires_grad_()
    (first,) = torch.autograd.grad(ctc_loss(leaf, *rest), leaf, create_graph=True)
    with pytest.raises(TruncdetError, match=r"^ctc_loss: a second derivative is not implemented"):
        first.sum().backward()


def test_flushing_denormals_changes_nothing():
    case = make_case((50, 4, 7, 9), torch.float32)
    grad = torch.tensor([1e-38, 1.0, 1e-30, 1e-10])
    before = run_both(case, grad)[0]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        after = run_both(case, grad)[0]
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(after, before)


def test_autocast_computes_where_pytorch_does():
    probs, *rest = make_case((12, 3, 4, 5), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ctc_loss(probs, *rest).dtype == F.ctc_loss(probs, *rest).dtype == torch.float32
        assert ctc_loss(probs.double(), *rest).dtype == torch.float64


def test_operator_checks(device):
    case = make_case((12, 3, 4, 5), torch.float32, device)
    leaf = case[0].clone().requires_grad_()
    torch.library.opcheck(ops.ctc_loss.default, (leaf, *case[1:], 0, True))
    torch.library.opcheck(ops._ctc_loss.default, (*case, 0, True))
    _, likelihood, alpha = ops._ctc_loss(*case, 0, False)
    grad = torch.ones(3, device=device)
    rest = (*case, likelihood, alpha, 0, False)
    torch.library.opcheck(ops.ctc_loss_backward.default, (grad, *rest))


def test_compiles_in_one_graph(device):
    probs, targets, inputs, wanted = make_case((12, 3, 4, 5), torch.float32, device)
    assert_compiles(lambda x: ctc_loss(x, targets, inputs, wanted, zero_infinity=True), probs)
    assert_compiles(lambda x: ctc_loss(x, targets, (12, 10, 9), (3, 4, 0)), probs)


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    case = make_case((50, 4, 7, 9), torch.float32, "cuda")
    grad = torch.ones(4, device="cuda")

    def run():
        outputs = ops.ctc_loss(*case, 0, True)
        return (*outputs, ops.ctc_loss_backward(grad, *case, *outputs[1:], 0, True))

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


@pytest.mark.cuda
def test_labels_and_lengths_out_of_range_on_a_gpu():
    probs, targets, inputs, wanted = make_case((12, 3, 4, 5), torch.float32, "cuda")
    _sticky.check()
    for change in ((1, 9), (1, -1), (2, 13), (2, -1), (3, 6), (3, -1)):
        case = [probs, targets.clone(), inputs.clone(), wanted.clone()]
        case[3][0] = 5
        case[change[0]].view(-1)[0] = change[1]
        ctc_loss(*case)
        with pytest.raises(TruncdetError, match=r"^ctc_loss: an index was out of range"):
            _sticky.check()
    _sticky.check()


def test_wrong_arguments_are_named():
    x, t = torch.zeros(5, 2, 3), torch.ones(2, 2, dtype=torch.int64)
    inputs, wanted = torch.tensor([5, 5]), torch.tensor([2, 1])
    for text, error, args in [
        ("log_probs must be a Tensor, got list", TypeError, ([1], t, inputs, wanted)),
        (
            "log_probs must be float64, .*, got torch.int64",
            TypeError,
            (x.long(), t, inputs, wanted),
        ),
        (
            r"log_probs must have shape \[T, N, C\] or \[T, C\], got \[5\]",
            ValueError,
            (x[:, 0, 0], t, inputs, wanted),
        ),
        (r"log_probs must not be empty, got \[0, 2, 3\]", ValueError, (x[:0], t, inputs, wanted)),
        ("targets must be a Tensor, got int", TypeError, (x, 1, inputs, wanted)),
        (
            "targets must be of integers, got torch.float32",
            TypeError,
            (x, t.float(), inputs, wanted),
        ),
        (
            r"targets must have shape \[2, S\] or \[sum of target_lengths\], got \[1, 2\]",
            ValueError,
            (x, t[:1], inputs, wanted),
        ),
        (r"targets must be in \[0, 3\), got 4", ValueError, (x, t + 3, inputs, wanted)),
        (
            "targets must have as many elements as target_lengths add up to, 3, got 2",
            ValueError,
            (x, t[0], inputs, wanted),
        ),
        (
            "input_lengths must be of integers, got torch.float32",
            TypeError,
            (x, t, inputs.float(), wanted),
        ),
        ("input_lengths must be a Tensor or a sequence, got int", TypeError, (x, t, 5, wanted)),
        (r"input_lengths must be of integers, got 5\.5", TypeError, (x, t, (5.5, 5), wanted)),
        ("target_lengths must be of integers, got True", TypeError, (x, t, inputs, (True, 1))),
        (r"input_lengths must be in \[0, 5\], got 6", ValueError, (x, t, inputs + 1, wanted)),
        (r"input_lengths must be in \[0, 5\], got -1", ValueError, (x, t, (5, -1), wanted)),
        (r"target_lengths must be in \[0, 2\], got 3", ValueError, (x, t, inputs, wanted + 1)),
        (r"target_lengths must be in \[0, 2\], got -1", ValueError, (x, t, inputs, wanted - 2)),
        (
            r"target_lengths must be in \[0, 2\], got -1",
            ValueError,
            (x, t[0], inputs, torch.tensor([3, -1])),
        ),
        (
            "input_lengths must have one element for each of 2 items, got shape .3.",
            ValueError,
            (x, t, (5, 5, 5), wanted),
        ),
        (r"blank must be in \[0, 3\), got 3", ValueError, (x, t, inputs, wanted, 3)),
        (
            "reduction must be 'none', 'mean' or 'sum', got 'avg'",
            ValueError,
            (x, t, inputs, wanted, 0, "avg"),
        ),
    ]:
        with pytest.raises(error, match="^ctc_loss: " + text):
            ctc_loss(*args)


def test_kernels_check_what_python_has_checked():
    if not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_ctc_loss", "CPU"):
        pytest.skip("checks of the compiled kernels")
    x, t, i, w = make_case((5, 2, 3, 2), torch.float32)
    for args in [
        (x[0], t, i, w, 0),
        (x, t[:1], i, w, 0),
        (x, t[0], i, w, 0),
        (x, t.int(), i, w, 0),
        (x, t, i[:1], w, 0),
        (x, t, i, w.int(), 0),
        (x, t, i, w, 3),
    ]:
        with pytest.raises(RuntimeError, match="ctc_loss: "):
            ops._ctc_loss(*args, False)
    _, z, a = ops._ctc_loss(x, t, i, w, 0, False)
    g = torch.ones(2)
    for args in [(g[:1], z, a), (g.double(), z, a), (g, z[:1], a), (g, z, a.float())]:
        with pytest.raises(RuntimeError, match="ctc_loss: "):
            ops.ctc_loss_backward(args[0], x, t, i, w, *args[1:], 0, False)


def test_module(device):
    probs, *rest = make_case((12, 3, 4, 5), torch.float32, device)
    layer = truncdet.CTCLoss(blank=3, reduction="sum", zero_infinity=True)
    assert isinstance(layer, torch.nn.CTCLoss)
    assert_bitwise_equal(layer(probs, *rest), ctc_loss(probs, *rest, 3, "sum", True))
