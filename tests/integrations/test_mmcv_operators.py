"""mmcv's operators beside RoIAlign under the patch: values, gradients, ways in, and back again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import _mmcv_needed  # noqa: F401
import mmcv.ops
import numpy
import pytest
import torch
from _frameworks import requires
from _mmcv_operator_cases import (
    ALL,
    CASES,
    CUDA_ALONE,
    HELD,
    attention_module,
    our_dcn,
    plain_attention,
)
from _operator_cases import (
    SHAPES,
    STARTS,
    Case,
    attention,
    boxes,
    close,
    convolution,
    differs,
    draw,
    features,
    rotated,
)
from mmcv.ops.deform_conv import DeformConv2dFunction
from mmcv.ops.roi_align_rotated import RoIAlignRotatedFunction
from torch import Tensor, nn
from truncdet.integrations import mmcv as integration
from truncdet.integrations._mmcv_table import TABLE

import truncdet
from truncdet.testing import assert_bitwise_equal


def snapshot() -> dict[tuple[str, str], object]:
    """What every name in mmcv's and mmdet's modules, and in the classes patched, is."""
    found: dict[tuple[str, str], object] = {
        (module, name): value
        for module, names in list(sys.modules.items())
        if module.split(".")[0] in ("mmcv", "mmdet", "_mmcv_operator_cases")
        for name, value in vars(names).items()
        # Where warnings and the compiler keep things, and submodules that are imported.
        if not name.startswith("__") and not isinstance(value, type(sys))
    }
    for row in TABLE:
        owner = vars(sys.modules[row.module]).get(row.function)
        if owner is not None:
            found |= {(row.function, name): value for name, value in vars(owner).items()}
    return found


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = snapshot()
    yield
    assert not integration.is_patched()
    after = snapshot()
    known = {owner for owner, _ in before}  # others were imported since
    assert {name for name in after if name[0] in known} == before.keys()
    assert all(after[name] is value for name, value in before.items())


@pytest.mark.parametrize("name", ALL)
def test_fixed_point_has_the_bits_of_our_operator(name: str) -> None:
    case = ALL[name]
    with integration.patched():
        assert_bitwise_equal(case.run(), case.run(case.ours))


@pytest.mark.parametrize("name", CASES)
def test_it_is_close_to_mmcv_and_not_the_same(name: str) -> None:
    plain = CASES[name].run()
    with integration.patched():
        ours = CASES[name].run()
    close(ours, plain)
    assert not all(map(torch.equal, ours, plain))


def test_orders_of_rotated_boxes_change_mmcvs_gradient_and_not_ours() -> None:
    assert differs(CASES["RoIAlignRotated"])
    with integration.patched():
        assert not differs(CASES["RoIAlignRotated"])
        assert not differs(CUDA_ALONE["RoIPool"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["truncate", "off"])
def test_other_modes_leave_them_to_mmcv(name: str, mode: str) -> None:
    plain = CASES[name].run()
    with integration.patched(), integration.patched(mode):
        assert mmcv.ops.deform_conv2d is HELD[0] and "apply" not in vars(DeformConv2dFunction)
        assert_bitwise_equal(CASES[name].run(), plain)


def test_every_row_of_the_table_is_patched_and_put_back() -> None:
    def names() -> list[Any]:
        found: list[Any] = []
        for row in TABLE:
            module = vars(sys.modules[row.module])
            found += [module[row.name]] if row.name else []
            found += [module[row.function].__dict__.get("apply")] if row.function else []
        return found

    before = names()
    with integration.patched():
        assert all(new is not old for new, old in zip(names(), before, strict=True))
        with integration.patched("truncate"):
            assert all(new is old for new, old in zip(names(), before, strict=True))
    assert all(new is old for new, old in zip(names(), before, strict=True))


@requires("mmdet")
def test_the_switch_and_the_patch_of_mmdet_cover_them() -> None:
    from truncdet.integrations import _mmdet_patch

    case = CASES["modulated_deform_conv2d"]
    expected = case.run(case.ours)
    with truncdet.deterministic(frameworks=["mmcv"]):
        assert_bitwise_equal(case.run(), expected)
    with _mmdet_patch.patched():
        assert_bitwise_equal(case.run(), expected)


def test_references_from_inside_turn_into_the_original_outside() -> None:
    case = CASES["deform_conv2d"]
    plain = case.run()
    with integration.patched():
        ours = mmcv.ops.deform_conv2d
        inside = case.run(lambda *args: ours(*args, 1, 0, 1, 1, 2))
    assert ours is not HELD[0]
    assert_bitwise_equal(case.run(lambda *args: ours(*args, 1, 0, 1, 1, 2)), plain)
    with integration.patched("truncate"):
        assert_bitwise_equal(case.run(lambda *args: ours(*args, 1, 0, 1, 1, 2)), plain)
    assert not torch.equal(inside[1], plain[1])


def test_the_mode_is_frozen_at_forward_time() -> None:
    x, rois = features(3).requires_grad_(), rotated()
    case = CASES["RoIAlignRotated"]
    with integration.patched():
        expected = case.run()[1]
        out = mmcv.ops.RoIAlignRotated((3, 2), 0.9)(x, rois)
    (gradient,) = torch.autograd.grad(out, x, draw(*out.shape, seed=9))
    assert_bitwise_equal(gradient, expected)
    assert not torch.equal(gradient, case.run()[1])


def test_subclasses_of_an_autograd_function_keep_what_they_define() -> None:
    class Doubled(RoIAlignRotatedFunction):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            first, *rest = RoIAlignRotatedFunction.backward(ctx, gradient)
            return (2 * first, *rest)

    case = CASES["RoIAlignRotated"]
    doubled = case.run(lambda x, rois: Doubled.apply(x, rois, (3, 2), 0.9))
    assert_bitwise_equal(doubled[1], 2 * case.run()[1])
    with integration.patched():
        again = case.run(lambda x, rois: Doubled.apply(x, rois, (3, 2), 0.9))
    assert_bitwise_equal(again, doubled)


def test_a_batch_need_not_be_divisible_by_im2col_step() -> None:
    case = Case(
        lambda *args: mmcv.ops.deform_conv2d(*args, 1, 0, 1, 1, 2, False, 2),
        our_dcn,
        lambda: {k: v for k, v in convolution(5).items() if k in ("input", "offset", "weight")},
    )
    with pytest.raises(AssertionError, match="divisible by im2col_step"):
        case.run()
    with integration.patched():
        assert_bitwise_equal(case.run(), case.run(our_dcn))


def test_types_are_brought_together_as_in_mmcv() -> None:
    inputs = convolution()
    args = [inputs[name] for name in ("input", "offset", "mask", "weight", "bias")]
    args[1] = args[1].double()
    plain = mmcv.ops.modulated_deform_conv2d(*args, 1, 0, 1, 1, 2)
    with integration.patched():
        ours = mmcv.ops.modulated_deform_conv2d(*args, 1, 0, 1, 1, 2)
        v1 = mmcv.ops.deform_conv2d(args[0], args[1], args[3], 1, 0, 1, 1, 2)
        assert v1.dtype == torch.float64
    assert ours.dtype == plain.dtype == torch.float64
    assert float((ours - plain).abs().max()) <= 1e-12 * float(plain.abs().max())


def test_wrong_arguments_get_mmcvs_errors() -> None:
    inputs = convolution()
    args = [inputs[name] for name in ("input", "offset", "weight")]
    with integration.patched():
        with pytest.raises(RuntimeError, match="offset"):  # one group of offsets, not two
            mmcv.ops.deform_conv2d(*args, 1, 0, 1, 1, 1)
        with pytest.raises(AssertionError, match="Only support bias is False"):
            mmcv.ops.deform_conv2d(*args, 1, 0, 1, 1, 2, True)
        with pytest.raises(ValueError, match="Expected 4D"):
            mmcv.ops.deform_conv2d(args[0][0], *args[1:], 1, 0, 1, 1, 2)


@pytest.mark.parametrize("kind", ["DeformConv2dPack", "ModulatedDeformConv2dPack"])
def test_under_autocast_the_type_of_the_offsets_decides_as_in_mmcv(kind: str) -> None:
    torch.manual_seed(0)
    layer = getattr(mmcv.ops, kind)(4, 6, 3)
    nn.init.normal_(layer.conv_offset.weight, std=0.1)
    x = features(4)
    wide = layer(x).detach()
    with torch.autocast("cpu", dtype=torch.float16), integration.patched():
        out = layer(x)
        assert out.dtype == layer.conv_offset(x).dtype == torch.float16
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert float((out.detach().float() - wide).abs().max()) <= 0.02 * float(wide.abs().max())


@pytest.mark.parametrize("autocast", [False, True])
def test_the_attention_layer(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, calls = truncdet.ms_deform_attn, []

    def spy(value: Tensor, *args: Any) -> Tensor:
        calls.append(value.dtype)
        return function(value, *args)

    monkeypatch.setattr(truncdet, "ms_deform_attn", spy)
    torch.manual_seed(0)
    layer = attention_module.MultiScaleDeformableAttention(32, 4, 2, 3, batch_first=True, dropout=0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    query = draw(2, 7, 32).requires_grad_()

    def run() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = layer(
                query,
                value=draw(2, 26, 32, seed=1),
                reference_points=draw(2, 7, 2, 2, seed=2).sigmoid(),
                spatial_shapes=SHAPES,
                level_start_index=STARTS,
            )
        return [out.detach(), *torch.autograd.grad(out.sum(), [query, *layer.parameters()])]

    plain = run()
    with integration.patched():
        ours = run()
    # Under autocast too, where grid_sample is of the wider type.
    assert calls == [torch.float32]
    if not autocast:
        close(ours, plain)
        assert not all(map(torch.equal, ours, plain))
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) <= 0.05 * float(b.abs().max()) + 1e-6


def test_mixed_types_without_autocast_get_the_originals_error() -> None:
    inputs = attention()
    inputs["value"] = inputs["value"].double()
    with integration.patched(), pytest.raises(RuntimeError, match="scalar type Double"):
        plain_attention(*inputs.values())


TIED = (torch.arange(60) % 4).float()


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("most", [-1, 7])
@pytest.mark.parametrize("offset", [0, 1])
def test_equal_scores_keep_their_order_in_nms(threshold: float, most: int, offset: int) -> None:
    found = boxes(60)[:, 1:]
    rest = {"offset": offset, "score_threshold": threshold, "max_num": most}
    # Scores without equals, in the order that equals shall have.
    distinct = TIED - torch.arange(60) / 1000
    _, expected = mmcv.ops.nms(found, distinct, 0.3, **rest)
    _, plain = mmcv.ops.nms(found, TIED, 0.3, **rest)
    assert not torch.equal(plain, expected)
    with integration.patched():
        kept, ours = mmcv.ops.nms(found, TIED, 0.3, **rest)
        assert torch.equal(mmcv.ops.nms(found, distinct, 0.3, **rest)[1], expected)
        as_arrays = mmcv.ops.nms(found.numpy(), TIED.numpy(), 0.3, **rest)
    assert torch.equal(ours, expected)
    assert torch.equal(kept, torch.cat([found[ours], TIED[ours, None]], 1))
    assert isinstance(as_arrays[1], numpy.ndarray)
    assert numpy.array_equal(as_arrays[1], expected.numpy())


def test_so_they_do_in_batched_nms() -> None:
    found, classes = boxes(60)[:, 1:], torch.arange(60) % 3
    how = {"type": "nms", "iou_threshold": 0.3}
    _, expected = mmcv.ops.batched_nms(found, TIED - torch.arange(60) / 1000, classes, how)
    _, plain = mmcv.ops.batched_nms(found, TIED, classes, how)
    assert not torch.equal(plain, expected)
    with integration.patched():
        assert torch.equal(mmcv.ops.batched_nms(found, TIED, classes, how)[1], expected)
        assert len(mmcv.ops.nms(found[:0], TIED[:0], 0.3)[1]) == 0


def test_a_trace_records_mmcvs_function_and_says_so_once() -> None:
    x, rois = features(3), rotated()
    layer = mmcv.ops.RoIAlignRotated((3, 2), 0.9)
    with integration.patched():
        said = r"roi_align_rotated with torch\.jit\.trace uses the original kernel"
        with pytest.warns(RuntimeWarning, match=said) as caught:
            for _ in range(2):
                traced = torch.jit.trace(layer, (x, rois), check_trace=False)
        assert sum("uses the original" in str(w.message) for w in caught) == 1
    assert "truncdet::" not in str(traced.inlined_graph)


def test_compiled_code_obeys_the_patch_and_its_end() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = mmcv.ops.ModulatedDeformConv2dPack(4, 6, 3)
    nn.init.normal_(layer.conv_offset.weight, std=0.3)
    x = features(4)
    plain = layer(x)
    compiled = torch.compile(layer, backend="aot_eager")
    with integration.patched():
        expected = layer(x)
        assert not torch.equal(expected, plain)
        assert_bitwise_equal(compiled(x), expected)
    assert_bitwise_equal(compiled(x), plain)


@pytest.mark.parametrize("row", [r for r in TABLE if r.name], ids=lambda row: row.name)
def test_somebody_elses_wrapper_is_refused(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapper(*args: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as change:
        change.setattr(sys.modules[row.module], row.name, wrapper)
        said = f"{row.module}.{row.name} must be mmcv's own {row.name} to be patched"
        with pytest.raises(truncdet.TruncdetError, match=said):
            integration.patch()
        assert not integration.is_patched() and mmcv.ops.deform_conv2d is HELD[0]
        with integration.patched("truncate"):  # which leaves it alone
            pass


def test_modules_imported_while_patched_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    late = type(sys)("late_module")
    monkeypatch.setitem(sys.modules, "late_module", late)
    with integration.patched():
        exec("from mmcv.ops import deform_conv2d", vars(late))
        assert late.deform_conv2d is mmcv.ops.deform_conv2d is not HELD[0]
    assert late.deform_conv2d is HELD[0]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ALL)
def test_on_a_gpu_it_is_close_to_mmcvs_kernels_and_has_our_bits(name: str) -> None:
    def on_gpu(function: Any) -> Any:
        return lambda *args: function(*(x.cuda() for x in args))

    case = ALL[name]
    plain = [x.cpu() for x in case.run(on_gpu(case.call))]
    with integration.patched():
        ours = [x.cpu() for x in case.run(on_gpu(case.call))]
    close(ours, plain)
    if "conv" not in name.lower():  # whose matrix products are the vendor library's
        with integration.patched():
            assert_bitwise_equal(ours, case.run())
