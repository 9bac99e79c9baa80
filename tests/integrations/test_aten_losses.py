"""Losses of maps and sequences under the patch: truncdet's bits, PyTorch's calls and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _aten_draw import assert_same_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from truncdet.integrations import aten

import truncdet
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum"]
Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    before = torch._C._dispatch_dump("aten::nll_loss2d_forward")
    yield
    assert not aten.is_patched()
    assert torch._C._dispatch_dump("aten::nll_loss2d_forward") == before


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int) -> Tensor:
    """Classes of a map, some of them left out."""
    target = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(7))
    return target.masked_fill(drawn(8, *shape) > 1, 3)


def loss_and_gradient(loss: Loss, x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    out = loss(leaf, *rest, **options)
    return out.detach(), torch.autograd.grad(out, leaf, torch.full_like(out, 1.7))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 40, 3), (2, 5, 40), (3, 5, 4, 3, 2)], ids=str)
def test_losses_of_maps_have_truncdets_bits_in_every_order(
    shape: tuple[int, ...],
    reduction: str,
    weighted: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    logs = (drawn(0, *shape) * 9).log_softmax(1).to(device, dtype)
    target = classes(shape[0], *shape[2:]).to(device)
    weight = drawn(2, 5).abs().to(device, dtype) if weighted else None
    options = {"weight": weight, "ignore_index": 3, "reduction": reduction}
    expected = truncdet.nll_loss(logs, target, **options)
    plain, slope = loss_and_gradient(F.nll_loss, logs, target, **options)
    for order in (
        slice(None),
        torch.randperm(shape[2], generator=torch.Generator().manual_seed(3)),
    ):
        arguments = logs[:, :, order], target[:, order]
        with aten.patched():
            found, gradient = loss_and_gradient(F.nll_loss, *arguments, **options)
        assert_bitwise_equal(found, expected)
        # By PyTorch's own backward, from the sum of the factors.
        torch.testing.assert_close(gradient, slope[:, :, order], rtol=2e-2, atol=2e-2)
        if dtype in (torch.float32, torch.float64):
            ours = loss_and_gradient(truncdet.nll_loss, *arguments, **options)[1]
            torch.testing.assert_close(gradient, ours, rtol=1e-6, atol=0)
    torch.testing.assert_close(expected, plain, rtol=5e-2, atol=1e-2)


def test_the_plain_loss_of_a_map_depends_on_the_order() -> None:
    logs, target = (drawn(0, 2, 5, 400, 3) * 9).log_softmax(1), classes(2, 400, 3)
    sums = set()
    for seed in range(9):
        order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
        sums.add(F.nll_loss(logs[:, :, order], target[:, order], reduction="sum").item())
    assert len(sums) > 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_has_truncdets_bits(reduction: str, device: torch.device) -> None:
    logits, target = drawn(0, 2, 5, 40, 3).to(device), classes(2, 40, 3).to(device)
    expected = truncdet.cross_entropy(logits, target, ignore_index=3, reduction=reduction)
    layer = torch.nn.CrossEntropyLoss(ignore_index=3, reduction=reduction)
    with aten.patched():
        assert_bitwise_equal(layer(logits, target), expected)


def test_enable_covers_both_losses_and_disable_ends_it() -> None:
    logs, targets, inputs, wanted = sequences(torch.float32)
    image, target = (drawn(0, 2, 5, 400, 3) * 9).log_softmax(1), classes(2, 400, 3)

    def both(library: Any) -> tuple[Tensor, Tensor]:
        slope = loss_and_gradient(library.ctc_loss, logs, targets, inputs, wanted)[1]
        return library.nll_loss(image, target, reduction="sum"), slope

    plain, expected = both(F), both(truncdet)
    truncdet.enable(frameworks=["torch"])
    try:
        for found, ours in zip(both(F), expected, strict=True):
            assert_bitwise_equal(found, ours)
    finally:
        truncdet.disable()
    for found, before, ours in zip(both(F), plain, expected, strict=True):
        assert_bitwise_equal(found, before)
        assert not torch.equal(found, ours)


def test_both_results_can_be_written_to_tensors() -> None:
    logs, target = drawn(0, 2, 5, 40, 3), classes(2, 40, 3)
    call = logs, target, drawn(2, 5).abs(), 1, 3
    with aten.patched():
        loss, factors = ops.nll_loss2d_forward(*call)
        outs = torch.empty(0), torch.empty(())
        results = ops.nll_loss2d_forward.output(*call, output=outs[0], total_weight=outs[1])
        assert results[0] is outs[0] and results[1] is outs[1]
        with pytest.raises(RuntimeError):
            ops.nll_loss2d_forward.output(
                *call, output=torch.empty(0), total_weight=torch.empty(0, dtype=torch.int64)
            )
    assert_bitwise_equal(outs[0], loss)
    assert_bitwise_equal(outs[1], factors)
    assert_bitwise_equal(loss, truncdet.nll_loss(logs, target, call[2], ignore_index=3))
    weights = call[2][target].masked_fill(target == 3, 0)
    torch.testing.assert_close(factors, weights.sum())


def test_maps_without_a_reduction_and_losses_of_rows_are_the_originals() -> None:
    def all_of() -> list[Tensor]:
        logs, target = drawn(0, 2, 5, 4, 3), classes(2, 4, 3)
        return [
            F.nll_loss(logs, target, reduction="none"),
            F.nll_loss(logs[..., 0, 0], target[..., 0, 0]),
            *ops.nll_loss2d_forward(logs, target, None, 0, 3),
        ]

    plain = all_of()
    with aten.patched():
        for found, expected in zip(all_of(), plain, strict=True):
            assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_map_without_a_used_place_is_as_pytorch_has_it(reduction: str) -> None:
    for size in (4, 0):
        logs, target = drawn(0, 2, 5, size, 3), torch.full((2, size, 3), 3)
        plain = loss_and_gradient(F.nll_loss, logs, target, ignore_index=3, reduction=reduction)
        with aten.patched():
            found = loss_and_gradient(F.nll_loss, logs, target, ignore_index=3, reduction=reduction)
        torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


def sequences(
    dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Four items; the last is too short for its target."""
    logs = (drawn(0, 30, 4, 7) * 2).double().log_softmax(2)
    targets = torch.randint(1, 7, (4, 9), generator=torch.Generator().manual_seed(1))
    return logs.to(device, dtype), targets.to(device), [30, 20, 11, 2], [9, 8, 0, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zero_infinity", [False, True], ids=["", "zero_infinity"])
@pytest.mark.parametrize("reduction", ["none", *REDUCTIONS])
@pytest.mark.parametrize("given", ["numbers", "tensors", "one after the other"])
def test_gradients_of_ctc_loss_have_truncdets_bits(
    given: str, reduction: str, zero_infinity: bool, dtype: torch.dtype, device: torch.device
) -> None:
    logs, targets, inputs, wanted = sequences(dtype, device)
    lengths: tuple[Any, Any] = (inputs, wanted)
    if given != "numbers":
        lengths = torch.tensor(inputs), torch.tensor(wanted)
    if given == "one after the other":
        targets = torch.cat([row[:n] for row, n in zip(targets, wanted, strict=True)])
    options = {"reduction": reduction, "zero_infinity": zero_infinity}
    expected = loss_and_gradient(truncdet.ctc_loss, logs, targets, *lengths, **options)[1]
    plain = loss_and_gradient(F.ctc_loss, logs, targets, *lengths, **options)
    with aten.patched():
        found = loss_and_gradient(F.ctc_loss, logs, targets, *lengths, **options)
    assert_bitwise_equal(found[1], expected)
    assert_bitwise_equal(found[0], plain[0])
    assert found[1].stride() == plain[1].stride()
    assert not torch.equal(found[1], plain[1]), "the plain gradient must have other bits"
    # Where the loss is infinite, what PyTorch has for a gradient depends on the device.
    ours, theirs = (x[1] if device.type == "cpu" else x[1][:, :3] for x in (found, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_ctc_loss_of_one_item_and_the_overload_of_tensors() -> None:
    logs, targets, inputs, wanted = sequences(torch.float32)
    one = logs[:, 0], targets[0], (30,), (9,)
    expected = loss_and_gradient(truncdet.ctc_loss, *one)[1]
    losses, alpha = ops._ctc_loss(logs, targets, inputs, wanted)
    state = losses, alpha, 0, True
    with aten.patched():
        assert_bitwise_equal(loss_and_gradient(F.ctc_loss, *one)[1], expected)
        by_numbers = ops._ctc_loss_backward(losses, logs, targets, inputs, wanted, *state)
        lengths = torch.tensor(inputs), torch.tensor(wanted)
        by_tensors = ops._ctc_loss_backward.Tensor(losses, logs, targets, *lengths, *state)
    assert_bitwise_equal(by_tensors, by_numbers)


MAP, TARGET = drawn(0, 2, 5, 4, 3), classes(2, 4, 3)


def ctc_backward(**changes: Any) -> Tensor:
    """A call of ctc_loss's backward with some other arguments."""
    logs, targets, inputs, wanted = sequences(torch.float32)
    losses, alpha = ops._ctc_loss(logs, targets, inputs, wanted)
    arguments = {"grad": losses, "log_probs": logs, "targets": targets, **changes}
    rest = {"neg_log_likelihood": losses, "log_alpha": alpha, "blank": 0}
    lengths = {"input_lengths": inputs, "target_lengths": wanted}
    gradient: Tensor = ops._ctc_loss_backward(**{**rest, **lengths, **arguments})
    return gradient


WRONG: dict[str, Callable[[], Any]] = {
    "a class too many": lambda: F.nll_loss(MAP, torch.full_like(TARGET, 5)),
    "a negative class": lambda: F.nll_loss(MAP, torch.full_like(TARGET, -1)),
    "classes of floats": lambda: F.nll_loss(MAP, TARGET.float()),
    "classes of int32": lambda: F.nll_loss(MAP, TARGET.int()),
    "weights of another number": lambda: F.nll_loss(MAP, TARGET, torch.ones(4)),
    "weights of another dtype": lambda: F.nll_loss(MAP, TARGET, torch.ones(5).double()),
    "a map of another size": lambda: F.nll_loss(MAP, TARGET[..., :2]),
    "a map of another batch": lambda: F.nll_loss(MAP, TARGET[:1]),
    "a map of integers": lambda: F.nll_loss(MAP.long(), TARGET),
    "a map without a batch": lambda: ops.nll_loss2d_forward(MAP[0], TARGET[0], None, 1, -100),
    "sequences of half": lambda: ctc_backward(log_probs=torch.zeros(30, 4, 7).half()),
    "sequences of integers": lambda: ctc_backward(log_probs=torch.zeros(30, 4, 7).long()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_the_very_error_that_it_does_without_the_patch(name: str) -> None:
    assert_same_error(WRONG[name])


def test_where_truncdet_refuses_the_original_runs() -> None:
    logs, targets, inputs, wanted = sequences(torch.float32)
    longer = torch.cat([targets.flatten()[: sum(wanted)], targets[0]])  # more than their lengths
    losses, alpha = ops._ctc_loss(logs, targets, inputs, wanted)
    call = (losses, logs, longer, inputs, wanted, losses, alpha, 0, True)
    with pytest.raises(ValueError, match="targets must have as many elements"):
        truncdet.ctc_loss(logs, longer, inputs, wanted)
    plain = ops._ctc_loss_backward(*call)
    with aten.patched():
        assert_bitwise_equal(ops._ctc_loss_backward(*call), plain)


def test_weights_of_any_shape_and_weights_with_a_gradient() -> None:
    weight = drawn(2, 5).abs()
    expected = truncdet.nll_loss(MAP, TARGET, weight)
    with aten.patched():
        assert_bitwise_equal(F.nll_loss(MAP, TARGET, weight.view(1, 5)), expected)
        with torch.no_grad():
            assert_bitwise_equal(F.nll_loss(MAP, TARGET, weight.requires_grad_()), expected)


def test_derivatives_keep_autograds_formulas() -> None:
    x = torch.rand(2, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    target = classes(2, 2, 2)
    with aten.patched():
        assert torch.autograd.gradcheck(
            lambda x: F.cross_entropy(x, target, label_smoothing=0.1), x, nondet_tol=0.0
        )
        assert torch.autograd.gradgradcheck(lambda x: F.cross_entropy(x, target), x, nondet_tol=0.0)
        logits = drawn(0, 5, 2, 4).double().requires_grad_()
        labels = torch.tensor([[1, 2], [3, 3]])
        assert torch.autograd.gradcheck(
            lambda x: F.ctc_loss(x.log_softmax(2), labels, (5, 4), (2, 2)), logits, nondet_tol=0.0
        )


def test_autocast_casts_as_before() -> None:
    logits = drawn(0, 2, 5, 4, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(logits, TARGET)
        with aten.patched():
            found = F.cross_entropy(logits, TARGET)
        expected = truncdet.cross_entropy(logits, TARGET)
    assert found.dtype == plain.dtype
    assert_bitwise_equal(found, expected)


def test_fake_tensors_and_tracing_see_one_loss() -> None:
    with aten.patched(), FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        leaf = mode.from_tensor(MAP).requires_grad_()
        F.cross_entropy(leaf, mode.from_tensor(TARGET)).backward()
    assert leaf.grad is not None and leaf.grad.shape == MAP.shape
