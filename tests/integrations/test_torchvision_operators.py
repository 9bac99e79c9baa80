"""torchvision under the patch: gradients of RoIPool, PSRoIAlign, PSRoIPool and deform_conv2d."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from _operator_cases import Case, boxes, close, convolution, differs, draw, features, same
from torch import Tensor
from torchvision import ops
from truncdet.integrations import torchvision as tv
from truncdet.integrations._torchvision_table import BACKWARDS

import truncdet
from truncdet import _strict
from truncdet.testing import assert_bitwise_equal

torch_ops: Any = torch.ops.torchvision


def pooling(function: Any, ours: Any, channels: int, *rest: Any) -> Case:
    return Case(
        lambda x, rois: function(x, rois, (3, 2), 0.7, *rest),
        lambda x, rois: ours(x, rois, (3, 2), 0.7, *rest),
        lambda: {"input": features(channels)},
        boxes,
    )


def unmasked() -> dict[str, Tensor]:
    inputs = convolution(groups=2)
    return {name: inputs[name] for name in ("input", "offset", "weight")}


POOLS = {
    "roi_pool": pooling(ops.roi_pool, truncdet.roi_pool, 3),
    "ps_roi_align": pooling(ops.ps_roi_align, truncdet.ps_roi_align, 12),
    "ps_roi_align with a ratio": pooling(ops.ps_roi_align, truncdet.ps_roi_align, 12, 2),
    "ps_roi_pool": pooling(ops.ps_roi_pool, truncdet.ps_roi_pool, 12),
}
STEPS = ((2, 1), (1, 2), (1, 2))
CASES = {
    **POOLS,
    "deform_conv2d": Case(
        lambda x, offset, mask, weight, bias: ops.deform_conv2d(x, offset, weight, bias, mask=mask),
        same,
        convolution,
    ),
    "deform_conv2d without a mask": Case(
        lambda x, offset, weight: ops.deform_conv2d(x, offset, weight),
        lambda x, offset, weight: truncdet.deform_conv2d(x, offset, weight),
        unmasked,
    ),
    "deform_conv2d with steps": Case(
        lambda x, offset, weight: ops.deform_conv2d(x, offset, weight, None, *STEPS),
        lambda x, offset, weight: truncdet.deform_conv2d(x, offset, weight, None, *STEPS),
        lambda: unmasked() | {"offset": draw(2, 36, 5, 10, scale=3.0, seed=1)},
    ),
}
each = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    assert not tv.is_patched()


@each
def test_forwards_stay_torchvisions_and_gradients_become_ours(name: str) -> None:
    case = CASES[name]
    plain, expected = case.run(), case.run(case.ours)
    with tv.patched():
        ours = case.run()
    assert_bitwise_equal(ours[0], plain[0])
    assert_bitwise_equal(ours[1:], expected[1:])
    close(ours, plain)
    assert not all(map(torch.equal, ours, plain))
    # Undone: torchvision's own gradients, to the bit.
    assert_bitwise_equal(case.run(), plain)


@pytest.mark.parametrize("name", POOLS)
def test_the_order_of_rois_changes_torchvisions_gradient_and_not_ours(name: str) -> None:
    assert differs(POOLS[name])
    with tv.patched():
        assert not differs(POOLS[name])


@each
@pytest.mark.parametrize("mode", ["truncate", "off"])
def test_other_modes_leave_them_to_torchvision(name: str, mode: str) -> None:
    plain = CASES[name].run()
    with tv.patched(), tv.patched(mode):
        assert_bitwise_equal(CASES[name].run(), plain)


@each
def test_the_patch_at_the_time_of_the_backward_counts(name: str) -> None:
    case = CASES[name]
    plain = case.run()
    leaves = [x.requires_grad_() for x in case.inputs().values()]
    out = case.call(*leaves, *(() if case.rois is None else (case.rois(40),)))
    upstream = draw(*out.shape, seed=9)
    with tv.patched():
        expected = case.run()[1:]
        found = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    assert_bitwise_equal(list(found), expected)
    assert_bitwise_equal(list(torch.autograd.grad(out, leaves, upstream)), plain[1:])


def test_scripted_and_compiled_code_gets_our_gradients() -> None:
    torch._dynamo.reset()
    case = POOLS["roi_pool"]

    def pool(x: Tensor, rois: Tensor) -> Tensor:
        result: Tensor = ops.roi_pool(x, rois, [3, 2], 0.7)
        return result

    scripted = torch.jit.script(ops.RoIPool([3, 2], 0.7))
    compiled = torch.compile(pool, backend="aot_eager")
    plain = case.run()
    for function in (scripted, compiled):
        assert_bitwise_equal(case.run(function), plain)
        with tv.patched():
            assert_bitwise_equal(case.run(function), case.run())


@each
def test_double_is_ours_too(name: str) -> None:
    case = CASES[name]
    wide = Case(
        case.call,
        case.ours,
        lambda: {key: x.double() for key, x in case.inputs().items()},
        None if case.rois is None else lambda count: case.rois(count).double(),  # type: ignore
    )
    with tv.patched():
        assert_bitwise_equal(wide.run()[1:], wide.run(wide.ours)[1:])


@each
def test_expanded_gradients_are_taken(name: str) -> None:
    case = CASES[name]
    rows = () if case.rois is None else (case.rois(40),)
    with tv.patched():
        found = []
        for upstream in (torch.ones(()), None):
            leaves = [x.requires_grad_() for x in case.inputs().values()]
            out = case.call(*leaves, *rows)
            given = torch.ones_like(out) if upstream is None else upstream.expand_as(out)
            found.append(list(torch.autograd.grad(out, leaves, given)))
    assert_bitwise_equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_go_to_the_cells_that_were_chosen(dtype: torch.dtype) -> None:
    # Cells that our coordinates put outside the RoI: torchvision computes them in half.
    grad = draw(1, 1, 1, 2).to(dtype)
    rois = torch.tensor([[0, 1.0, 1.0, 2.0, 2.0]]).to(dtype)
    argmax = torch.tensor([[[[0, 11]]]], dtype=torch.int32)
    with tv.patched():
        found = torch_ops._roi_pool_backward(grad, rois, argmax, 1.0, 1, 2, 1, 1, 3, 4)
    expected = torch.zeros(1, 1, 12, dtype=dtype)
    expected[0, 0, argmax.flatten().long()] = grad.flatten()
    assert_bitwise_equal(found, expected.view(1, 1, 3, 4))


def test_nothing_is_chosen_where_a_roi_has_no_cell() -> None:
    grad, argmax = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), -1, dtype=torch.int32)
    rois = torch.tensor([[0, 90.0, 90.0, 95.0, 95.0]])
    with tv.patched():
        found = torch_ops._roi_pool_backward(grad, rois, argmax, 1.0, 1, 1, 1, 1, 3, 4)
    assert_bitwise_equal(found, torch.zeros(1, 1, 3, 4))


def test_what_we_do_not_take_goes_to_torchvision() -> None:
    grad, argmax = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    rois = torch.tensor([[0, 0, 0, 1, 1.0]]).double()
    with tv.patched(), pytest.raises(RuntimeError, match=r"same type|[sS]calar type"):
        torch_ops._roi_pool_backward(grad, rois, argmax, 1.0, 1, 1, 1, 1, 3, 4)


def test_the_strict_checker_knows_what_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in CASES.items():
        # Forwards first: the checker sees only the backwards.
        leaves = [x.requires_grad_() for x in case.inputs().values()]
        out = case.call(*leaves, *(() if case.rois is None else (case.rois(40),))).sum()
        for mode, covered in (("fixed_point", True), ("truncate", False), ("off", False)):
            with tv.patched(mode), _strict.StrictMode(True, devices=("cpu",)):
                if covered:
                    out.backward(retain_graph=True)
                    continue
                with pytest.raises(truncdet.TruncdetError, match=r"torchvision::_\w+_backward"):
                    out.backward(retain_graph=True)
        assert name


def test_every_backward_that_the_checker_knows_is_ours() -> None:
    from truncdet._strict_table import TABLE

    known = {op for op in TABLE if op.startswith("torchvision::")} - {tv.BACKWARD_OP}
    assert known == set(BACKWARDS)
    with tv.patched():
        assert all(tv.covers(op, torch.float32) for op in known)
        assert not any(tv.covers(op, torch.complex64) for op in known)


def test_nms_is_stable_already() -> None:
    found, scores = boxes(60)[:, 1:], (torch.arange(60) % 4).float()
    distinct = scores - torch.arange(60) / 1000
    assert torch.equal(ops.nms(found, scores, 0.3), ops.nms(found, distinct, 0.3))
    classes = torch.arange(60) % 3
    batched = ops.batched_nms(found, scores, classes, 0.3)
    assert torch.equal(batched, ops.batched_nms(found, distinct, classes, 0.3))


@pytest.mark.cuda
@each
def test_on_a_gpu_the_gradients_are_close_and_have_our_bits(name: str) -> None:
    def on_gpu(*args: Tensor) -> Tensor:
        return CASES[name].call(*(x.cuda() for x in args))

    case = CASES[name]
    plain = [x.cpu() for x in case.run(on_gpu)]
    with tv.patched():
        ours = [x.cpu() for x in case.run(on_gpu)]
        if name in POOLS:
            assert_bitwise_equal(ours[1:], case.run()[1:])
    close(ours, plain)


@pytest.mark.cuda
def test_nms_is_stable_on_a_gpu_too() -> None:
    found, scores = boxes(60)[:, 1:], (torch.arange(60) % 4).float()
    kept = torchvision.ops.nms(found.cuda(), scores.cuda(), 0.3)
    assert torch.equal(kept.cpu(), torchvision.ops.nms(found, scores, 0.3))
