"""detectron2's ROIAlignRotated, DeformConv and ModulatedDeformConv under the patch.

Where detectron2 was built without its compiled operators, the layers of deformable convolutions are
placeholders. The module is then loaded once more beside a stand-in for `detectron2._C` without any
operator, so that its own layers and autograd functions are there; what the compiled operators would
compute is not checked. The values of rotated boxes are compared with mmcv's kernel.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import _detectron2_needed  # noqa: F401
import detectron2
import pytest
import torch
from _frameworks import requires
from _operator_cases import Case, close, convolution, draw, features, orders, rotated, same
from detectron2.layers import ROIAlignRotated
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import RotatedBoxes
from torch import Tensor, nn
from truncdet.integrations import detectron2 as d2
from truncdet.integrations._detectron2_table import TABLE

import truncdet
from truncdet.testing import assert_bitwise_equal

MODULE = "detectron2.layers.deform_conv"
rotated_module: Any = sys.modules["detectron2.layers.roi_align_rotated"]
HELD = (rotated_module.roi_align_rotated,)


def degrees(count: int) -> Tensor:
    rois = rotated(count)
    return torch.cat([rois[:, :5], rois[:, 5:] * 180 / math.pi], 1)


def radians(rois: Tensor) -> Tensor:
    return torch.cat([rois[:, :5], (rois[:, 5:].double() * math.pi / 180).to(rois.dtype)], 1)


ROTATED = Case(
    lambda x, rois: ROIAlignRotated((3, 2), 0.9, 2)(x, rois),
    lambda x, rois: truncdet.roi_align_rotated(x, radians(rois), (3, 2), 0.9, 2),
    lambda: {"input": features(3)},
    degrees,
)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    apply = vars(rotated_module._ROIAlignRotated).get("apply")
    yield
    assert not d2.is_patched() and rotated_module.roi_align_rotated is HELD[0]
    assert vars(rotated_module._ROIAlignRotated).get("apply") is apply


@pytest.fixture
def deform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """detectron2's module of deformable convolutions as it is where operators are compiled."""
    if "_C" in vars(sys.modules[MODULE]):
        return sys.modules[MODULE]
    stand_in = types.ModuleType("detectron2._C")
    monkeypatch.setattr(detectron2, "_C", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "detectron2._C", stand_in)
    before = vars(detectron2.layers)["deform_conv"]
    monkeypatch.delitem(sys.modules, MODULE)
    found = importlib.import_module(MODULE)  # also sets the attribute of the package
    monkeypatch.setattr(detectron2.layers, "deform_conv", before)
    return found


def test_rotated_boxes_have_the_bits_of_our_operator() -> None:
    with d2.patched():
        first = ROTATED.run()
        assert_bitwise_equal(first, ROTATED.run(ROTATED.ours))
        for order in orders():
            assert_bitwise_equal(ROTATED.run(order=order), first)


@requires("mmcv")
def test_angles_turn_as_in_detectron2() -> None:
    # detectron2's kernel is mmcv's with aligned=True, angles counter-clockwise and in degrees.
    from mmcv.ops import roi_align_rotated

    with d2.patched():
        ours = ROTATED.run()
    close(ours, ROTATED.run(lambda x, rois: roi_align_rotated(x, radians(rois), (3, 2), 0.9, 2)))


def test_poolers_of_rotated_boxes_built_before_and_after() -> None:
    arguments = (3, (0.5, 0.25), 2, "ROIAlignRotated")
    before = ROIPooler(*arguments)
    maps = [draw(1, 3, 32, 32), draw(1, 3, 16, 16, seed=1)]
    found = [RotatedBoxes(torch.tensor([[20.0, 20, 12, 8, 30], [30, 30, 400, 300, -60]]))]
    if "roi_align_rotated_forward" not in dir(torch.ops.detectron2):
        with pytest.raises((AttributeError, RuntimeError)):  # it was built without
            before(maps, found)
    with d2.patched():
        assert_bitwise_equal(before(maps, found), ROIPooler(*arguments)(maps, found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_features(dtype: torch.dtype) -> None:
    x, rois = features(3).to(dtype), degrees(40)
    with d2.patched():
        out = ROIAlignRotated((3, 2), 0.9, 2)(x, rois)
        exact = ROIAlignRotated((3, 2), 0.9, 2)(x.float(), rois)
    assert_bitwise_equal(out, exact.to(dtype))


def modes() -> list[Any]:
    return [rotated_module.roi_align_rotated, vars(rotated_module._ROIAlignRotated).get("apply")]


def test_other_modes_leave_them_to_detectron2() -> None:
    before = modes()
    with d2.patched():
        ours = rotated_module.roi_align_rotated
        assert all(new is not old for new, old in zip(modes(), before, strict=True))
        with d2.patched("truncate"):
            assert all(new is old for new, old in zip(modes(), before, strict=True))
    assert all(new is old for new, old in zip(modes(), before, strict=True))
    with pytest.raises((AttributeError, RuntimeError)) if not compiled() else nullcontext():
        ours(features(3), degrees(40), (3, 2), 0.9, 2)


def compiled() -> bool:
    return hasattr(torch.ops.detectron2, "roi_align_rotated_forward")


def convolutions(module: Any) -> dict[str, Case]:
    def v1(x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
        return truncdet.deform_conv2d(x, offset, weight)

    def few() -> dict[str, Tensor]:
        return {k: v for k, v in convolution().items() if k in ("input", "offset", "weight")}

    return {
        "deform_conv": Case(lambda *args: module.deform_conv(*args, 1, 0, 1, 1, 2), v1, few),
        "_DeformConv.apply": Case(
            lambda *args: module._DeformConv.apply(*args, 1, 0, 1, 1, 2), v1, few
        ),
        "modulated_deform_conv": Case(
            lambda *args: module.modulated_deform_conv(*args, 1, 0, 1, 1, 2), same, convolution
        ),
    }


def test_deformable_convolutions(deform: Any) -> None:
    before = deform.deform_conv, deform.modulated_deform_conv
    for case in convolutions(deform).values():
        with d2.patched():
            assert_bitwise_equal(case.run(), case.run(case.ours))
    assert (deform.deform_conv, deform.modulated_deform_conv) == before
    assert "apply" not in vars(deform._DeformConv)


def test_values_are_those_of_what_detectron2_runs_on_a_cpu(deform: Any) -> None:
    # torchvision's forward, for one group of offsets.
    x, offset, _, weight, _ = convolution(deform_groups=1).values()
    plain = deform.deform_conv(x, offset, weight, 1, 0, 1, 1, 1)
    with d2.patched():
        ours = deform.deform_conv(x, offset, weight, 1, 0, 1, 1, 1)
    close([ours], [plain])


def test_layers(deform: Any) -> None:
    torch.manual_seed(0)
    inputs = convolution()
    norm = nn.BatchNorm2d(6)
    one = deform.DeformConv(4, 6, 3, deformable_groups=2, norm=norm, activation=torch.relu)
    two = deform.ModulatedDeformConv(4, 6, 3, deformable_groups=2)
    with d2.patched():
        first = one(inputs["input"], inputs["offset"])
        second = two(inputs["input"], inputs["offset"], inputs["mask"])
        empty = one(inputs["input"][:0], inputs["offset"][:0])
    expected = truncdet.deform_conv2d(inputs["input"], inputs["offset"], one.weight)
    assert_bitwise_equal(first, norm(expected).relu())
    assert empty.shape == (0, 6, 7, 8)
    assert_bitwise_equal(
        second,
        truncdet.deform_conv2d(
            inputs["input"], inputs["offset"], two.weight, two.bias, mask=inputs["mask"]
        ),
    )


def test_converted_layers(deform: Any) -> None:
    torch.manual_seed(0)
    inputs = convolution()
    one = deform.DeformConv(4, 6, 3, deformable_groups=2, activation=torch.relu)
    two = deform.ModulatedDeformConv(4, 6, 3, deformable_groups=2)
    three = ROIAlignRotated((3, 2), 0.9, 2)
    calls = {
        one: (inputs["input"], inputs["offset"]),
        two: (inputs["input"], inputs["offset"], inputs["mask"]),
        three: (features(3), degrees(40)),
    }
    with d2.patched():
        expected = [layer(*given) for layer, given in calls.items()]
    model = nn.ModuleList(calls)
    keys = list(model.state_dict())
    assert len(truncdet.convert(model)) == 3 and list(model.state_dict()) == keys
    for (layer, given), values in zip(calls.items(), expected, strict=True):
        assert_bitwise_equal(layer(*given), values)
    again = copy.deepcopy(model)
    assert_bitwise_equal(again[2](*calls[three]), expected[2])
    assert len(truncdet.convert(model, "off")) == 3
    assert [type(layer) for layer in model] == [
        deform.DeformConv,
        deform.ModulatedDeformConv,
        ROIAlignRotated,
    ]


def test_placeholders_are_nothing_to_convert() -> None:
    conversion = truncdet.convert(nn.Sequential(nn.ReLU()))
    assert not conversion.changed and not conversion.skipped


def test_without_compiled_operators_the_placeholders_stay() -> None:
    module = sys.modules[MODULE]
    if "_C" in vars(module):
        pytest.skip("detectron2 has its compiled operators")
    before = module.deform_conv
    with d2.patched():
        assert module.deform_conv is before
        with pytest.raises(ImportError, match="not compiled"):
            module.deform_conv()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_somebody_elses_wrapper_is_refused(
    row: Any, deform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapper(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(sys.modules[row.module], row.name, wrapper)
    said = f"{row.module}.{row.name} must be detectron2's own {row.name} to be patched"
    with pytest.raises(truncdet.TruncdetError, match=said):
        d2.patch()
    assert not d2.is_patched()
    monkeypatch.undo()


def test_a_trace_records_detectron2s_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its forward asks for the operator itself while it is traced.
    asked: list[str] = []

    class Operators:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return lambda x, *args: x.mean() * torch.ones(40, 3, 3, 2)

    monkeypatch.setattr(torch.ops, "detectron2", Operators())
    with d2.patched():
        torch.jit.trace(
            ROIAlignRotated((3, 2), 0.9, 2), (features(3), degrees(40)), check_trace=False
        )
    assert set(asked) == {"roi_align_rotated_forward"}
