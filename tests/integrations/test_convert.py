"""`convert` on torchvision's layers: the bits, the report, and that nothing else changes."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from _convert_cases import KINDS, Model, both_kinds, multi, run_single, single
from test_torchvision import ORIGINAL, scene, small_detector, train_step
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, RoIAlign
from truncdet.integrations import _alive
from truncdet.integrations import torchvision as tv
from truncdet.integrations._conversion import Change

import truncdet
from truncdet.testing import assert_bitwise_equal


@pytest.fixture(autouse=True)
def nothing_global() -> Iterator[None]:
    forwards = RoIAlign.forward, MultiScaleRoIAlign.forward
    yield
    assert (RoIAlign.forward, MultiScaleRoIAlign.forward) == forwards
    assert not tv.is_patched()
    assert torchvision.ops.roi_align is ORIGINAL


def ordered(kind: str, mode: str) -> list[list[Tensor]]:
    """Gradients under some orders of the RoIs."""
    make, run = KINDS[kind]
    layer = make()
    truncdet.convert(nn.Sequential(layer), mode)
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    return [run(layer, order)[1:] for order in orders]


@both_kinds
def test_negative_control_plain_gradients_depend_on_the_order(kind: str) -> None:
    first, *others = ordered(kind, "off")
    assert any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@both_kinds
def test_fixed_point_gradients_do_not(kind: str) -> None:
    first, *others = ordered(kind, "fixed_point")
    for other in others:
        assert_bitwise_equal(other, first)


@both_kinds
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_a_converted_layer_has_the_bits_of_the_patch(kind: str, mode: str) -> None:
    make, run = KINDS[kind]
    layer, plain = make(), run(make())
    with tv.patched(mode):
        expected = run(make())
    truncdet.convert(layer, mode)
    assert_bitwise_equal(run(layer), expected)
    tolerance = 1e-5 if mode == "fixed_point" else 2.0**-9
    for ours, theirs in zip(run(layer), plain, strict=True):
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())
        assert not torch.equal(ours, theirs)


@both_kinds
def test_truncate_runs_the_original_though_torchvision_is_patched(kind: str) -> None:
    make, run = KINDS[kind]
    layer = make()
    truncdet.convert(layer, "truncate")
    expected = run(layer)
    with tv.patched("fixed_point"):
        again = make()
        truncdet.convert(again, "truncate")
        assert_bitwise_equal(run(again)[0], expected[0])


def test_literal_is_the_published_line_and_warns() -> None:
    layer = single()
    with pytest.warns(UserWarning, match="through half to double"):
        changed = truncdet.convert(layer, "truncate", literal=True).changed
    assert changed[0].mode == "truncate (literal)"
    features, boxes, upstream = scene()
    expected = ORIGINAL(features.half().double(), boxes.half().double(), 3, 0.5, 2, True).float()
    expected.backward(upstream)
    assert features.grad is not None
    assert_bitwise_equal(run_single(layer), [expected.detach(), features.grad])


def test_it_says_what_changed() -> None:
    model = Model()
    conversion = truncdet.convert(model)
    name = "torchvision.ops.roi_align.RoIAlign"
    assert conversion.changed == tuple(conversion)
    assert conversion.changed == (
        Change("pool", "off", "fixed_point", name),
        Change("levels.0", "off", "fixed_point", "torchvision.ops.poolers.MultiScaleRoIAlign"),
    )
    assert (len(conversion), conversion.skipped, conversion.not_covered) == (2, (), ())
    assert str(conversion).splitlines()[:2] == [
        "layer     class                                       was  mode",
        "pool      torchvision.ops.roi_align.RoIAlign          off  fixed_point",
    ]
    again = truncdet.convert(model)
    assert not again and str(again) == "no layer changed"
    switched = truncdet.convert(model, "truncate")
    assert {(change.was, change.mode) for change in switched} == {("fixed_point", "truncate")}
    assert len(truncdet.convert(model, "off")) == 2
    assert not truncdet.convert(model, "off")


@both_kinds
def test_the_mode_is_frozen_at_forward_time(kind: str) -> None:
    make, run = KINDS[kind]
    layer = make()
    truncdet.convert(layer)
    expected = run(layer)

    def then_off(*args: Any) -> Tensor:
        out: Tensor = layer(*args)
        truncdet.convert(layer, "off")
        return out

    assert_bitwise_equal(run(then_off), expected)


@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_stay_float32_beside_features_of_half_types(kind: str, dtype: torch.dtype) -> None:
    make, run = KINDS[kind]
    layer = make()
    truncdet.convert(layer)
    plain = run(layer, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = run(layer, dtype=dtype)
    assert_bitwise_equal(autocast, plain)
    assert {tensor.dtype for tensor in autocast} == {dtype}
    # The same features, widened: one rounding of the result is all that may differ.
    assert_bitwise_equal(plain[0], run(layer, dtype=dtype, wide=True)[0].to(dtype))


def test_levels_may_come_in_different_types() -> None:
    draw = torch.Generator().manual_seed(0)
    maps = {"0": torch.randn(1, 3, 32, 32, generator=draw)}
    maps["1"] = torch.randn(1, 3, 16, 16, generator=draw).bfloat16()
    boxes = [torch.tensor([[1.0, 1.0, 9.0, 9.0], [0.0, 0.0, 900.0, 900.0]])]
    with tv.patched():
        expected = multi()(maps, boxes, [(64, 64)])
    layer = multi()
    truncdet.convert(layer)
    assert_bitwise_equal(layer(maps, boxes, [(64, 64)]), expected)


def test_boxes_far_from_the_origin_are_not_moved_under_autocast() -> None:
    features = torch.randn(1, 1, 4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    boxes = torch.tensor([[0, 4001.25, 1.0, 4003.75, 3.0]])
    moved = boxes.bfloat16().float()
    layer = RoIAlign(1, 1.0, 2, True)
    truncdet.convert(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(features, boxes)
    assert_bitwise_equal(found, truncdet.roi_align(features, boxes, 1, 1.0, 2, True))
    assert not torch.equal(found, truncdet.roi_align(features, moved, 1, 1.0, 2, True))


def test_a_training_step_has_the_bits_of_the_patch() -> None:
    state = torch.get_rng_state()
    with tv.patched():
        expected = train_step(mask=False)
    plain, model = train_step(mask=False), small_detector(mask=False)
    truncdet.convert(model)
    ours = train_step(False, model)
    torch.set_rng_state(state)
    assert_bitwise_equal(ours, expected)
    for name, value in plain.items():
        assert torch.allclose(ours[name], value, rtol=0.05, atol=5e-3), name


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    model = Model()
    with pytest.raises(TypeError, match=r"convert: model must be an nn\.Module, got dict"):
        truncdet.convert({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="convert: mode must be one of fixed_point, truncate, off"):
        truncdet.convert(model, "fast")
    with pytest.raises(ValueError, match="convert: mode must not be 'snap' for RoIAlign"):
        truncdet.convert(model, "snap")
    with pytest.raises(ValueError, match="convert: literal must be False unless mode is 'trunc"):
        truncdet.convert(model, literal=True)
    assert type(model.pool) is RoIAlign


def test_untested_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(torchvision, "__version__", "0.99.0")
    model = Model()
    with pytest.raises(truncdet.TruncdetError, match=r"convert: torchvision must be >= 0\.26 and"):
        truncdet.convert(model)
    assert type(model.pool) is RoIAlign
    assert not truncdet.convert(nn.ReLU())
    assert len(truncdet.convert(model, allow_untested=True)) == 2
    assert len(truncdet.convert(model, "off")) == 2


@pytest.fixture
def none_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_alive, "_converted", type(_alive._converted)())


@pytest.mark.usefixtures("none_converted")
def test_the_status_table_counts_the_converted_layers_in_a_note() -> None:
    def notes() -> list[str]:
        return [note for note in truncdet.status().notes if "truncdet.convert" in note]

    one, two = Model(), nn.Sequential(single())
    assert notes() == []
    truncdet.convert(one)
    truncdet.convert(one)
    shown = "truncdet.convert has converted 2 layers in this process (mode {}); the table shows"
    assert notes() == [shown.format("fixed_point") + " patches"]
    truncdet.convert(two, "truncate")
    assert [note.split(" layer")[0][-1] for note in notes()] == ["2", "1"]
    assert "1 layer in this process (mode truncate)" in notes()[1]
    truncdet.convert(one, "truncate")
    assert notes() == [shown.format("truncate").replace("2", "3") + " patches"]
    truncdet.convert(two, "off")
    assert notes() == [shown.format("truncate") + " patches"]
    # The count keeps no model alive.
    kept = weakref.ref(one.pool)
    del one
    gc.collect()
    assert kept() is None and notes() == []


def test_a_model_without_torchvision_imports_nothing() -> None:
    code = (
        "import sys, torch, truncdet; truncdet.convert(torch.nn.Linear(1, 1));"
        "print([m for m in ('torchvision', 'mmcv', 'mmdet', 'detectron2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
