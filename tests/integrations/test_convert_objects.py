"""Converted layers as objects: attributes, hooks, checkpoints, copies, pickles, subclasses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torchvision
from _convert_cases import KINDS, Model, both_kinds, multi, run_single, single
from test_torchvision import scene
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, RoIAlign
from truncdet.integrations import _convert, _swap
from truncdet.integrations._conversion import Left

import truncdet
from truncdet.testing import assert_bitwise_equal


def test_shared_layers_stay_shared_and_are_converted_once() -> None:
    model = Model()
    assert [change.name for change in truncdet.convert(model)] == ["pool", "levels.0"]
    assert model.pool is model.again
    assert type(model.again) is not RoIAlign


@both_kinds
def test_off_gives_the_very_objects_back(kind: str) -> None:
    make, run = KINDS[kind]
    layer = make()
    expected, model = run(make()), nn.Sequential(layer)
    keys = set(vars(layer))
    for mode in ("fixed_point", "truncate", "fixed_point"):
        truncdet.convert(model, mode)
    truncdet.convert(model, "off")
    assert model[0] is layer
    assert type(layer) is type(make())
    assert set(vars(layer)) == keys
    assert_bitwise_equal(run(layer), expected)


def test_a_model_that_is_a_layer_itself_is_converted() -> None:
    layer = single()
    (change,) = conversion = truncdet.convert(layer)
    assert (change.name, isinstance(layer, RoIAlign)) == ("", True)
    assert "(the model itself)" in str(conversion)


def test_checkpoints_load_both_ways() -> None:
    plain, converted = Model(), Model()
    truncdet.convert(converted)
    assert list(plain.state_dict()) == list(converted.state_dict())
    for one, other in ((plain, converted), (converted, plain)):
        with torch.no_grad():
            other.conv.weight.add_(1)
        one.load_state_dict(other.state_dict(), strict=True)
        assert_bitwise_equal(one.conv.weight.detach(), other.conv.weight.detach())


def test_attributes_and_modes_are_those_of_the_layer() -> None:
    model = Model()
    truncdet.convert(model)
    layer = model.pool
    assert isinstance(layer, RoIAlign) and isinstance(model.levels[0], MultiScaleRoIAlign)
    assert (layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned) == (
        (3, 0.5, 2, True)
    )
    assert model.levels[0].featmap_names == ["0", "1"]
    assert not model.eval().pool.training and model.train().pool.training
    assert model.double().to("cpu").conv.weight.dtype == torch.float64
    assert "output_size=3" in repr(layer)
    layer.sampling_ratio = 1  # an attribute changed afterwards counts, as before
    features, boxes, _ = scene()
    expected = truncdet.roi_align(features, boxes, 3, 0.5, 1, True)
    assert_bitwise_equal(layer(features, boxes), expected)


@both_kinds
def test_hooks_keep_working_and_see_the_layer(kind: str) -> None:
    make, run = KINDS[kind]
    layer, seen = make(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append(("pre", module)))
    layer.register_forward_hook(lambda module, args, out: seen.append(("post", module)))
    truncdet.convert(nn.Sequential(layer))
    layer.register_forward_hook(lambda module, args, out: out * 0)
    assert float(run(layer)[0].abs().max()) == 0
    assert seen == [("pre", layer), ("post", layer)]


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@both_kinds
@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, through_pickle, through_torch_save], ids=lambda w: w.__name__
)
@pytest.mark.filterwarnings("error")
def test_copies_and_pickles_stay_converted(kind: str, way: Callable[..., Any]) -> None:
    make, run = KINDS[kind]
    layer = make()
    layer.mark = [1]  # type: ignore[assignment]
    truncdet.convert(layer, "truncate")
    again = way(layer)
    assert type(again) is type(layer) and again.mark == [1]
    assert_bitwise_equal(run(again), run(layer))
    truncdet.convert(again, "off")
    assert type(again) is type(make()) and type(layer) is not type(make())


@pytest.mark.filterwarnings("error")
def test_a_copy_of_a_literal_layer_does_not_warn_again() -> None:
    layer = single()
    with pytest.warns(UserWarning, match="half"):
        truncdet.convert(layer, "truncate", literal=True)
    assert type(through_pickle(layer)) is type(copy.deepcopy(layer)) is type(layer)


class Named(RoIAlign):
    """A user's subclass that pools as torchvision does."""


class Doubling(RoIAlign):
    def forward(self, input: Tensor, rois: Any) -> Tensor:
        return 2 * super().forward(input, rois)


def test_subclasses_are_converted_if_they_pool_as_their_base_does() -> None:
    named, doubling = Named(3, 0.5, 2, True), Doubling(3, 0.5, 2, True)
    conversion = truncdet.convert(nn.Sequential(named, doubling))
    assert [change.name for change in conversion] == ["0"]
    assert isinstance(through_pickle(named), Named)
    layer = single()
    truncdet.convert(layer)
    assert_bitwise_equal(run_single(named), run_single(layer))
    reason = "its class has a forward of its own"
    assert conversion.skipped == (Left("1", reason, f"{__name__}.Doubling"),)
    assert f"skipped: 1 ({__name__}.Doubling): {reason}" in str(conversion)
    assert type(doubling) is Doubling


def test_layers_with_another_forward_on_the_object_are_skipped() -> None:
    layer = single()
    layer.forward = lambda *args: None  # type: ignore[method-assign]
    (left,) = truncdet.convert(nn.Sequential(layer)).skipped
    assert left.reason == "the object has a forward of its own"


def test_layers_whose_class_changed_since_are_skipped_and_say_so() -> None:
    layer = single()
    truncdet.convert(layer)
    layer.__class__ = type("Sharded", (type(layer),), {})
    for mode in ("truncate", "off"):
        (left,) = truncdet.convert(nn.Sequential(layer), mode).skipped
        assert left.reason == "its class was changed after it was converted"


def test_what_truncate_leaves_is_listed() -> None:
    model = nn.Sequential(
        torchvision.ops.RoIPool(3, 1.0), torchvision.ops.DeformConv2d(3, 3, 1), nn.ReLU()
    )
    conversion = truncdet.convert(model, "truncate")
    assert [left.name for left in conversion.not_covered] == ["0", "1"]
    assert {left.reason for left in conversion.not_covered} == {"'truncate' covers RoIAlign alone"}
    assert "not covered: 0 (torchvision.ops.roi_pool.RoIPool)" in str(conversion)
    assert not conversion.changed and not truncdet.convert(model, "off").not_covered


def test_the_same_class_serves_all_layers_of_a_kind() -> None:
    model = nn.Sequential(single(), single())
    truncdet.convert(model)
    assert type(model[0]) is type(model[1])
    swap = _swap.swap_of(model[0])
    assert swap is not None and swap.original is RoIAlign


class Refusing(RoIAlign):
    """Lets nobody change its class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("refused")
        super().__setattr__(name, value)


class Keyed(RoIAlign):
    """A class whose subclasses need a keyword."""

    def __init_subclass__(cls, *, key: int) -> None:
        pass


@pytest.mark.parametrize("before", ["off", "truncate"])
def test_a_layer_that_refuses_leaves_all_layers_as_they_were(before: str) -> None:
    model = nn.Sequential(single(), multi())
    truncdet.convert(model, before)
    model.append(Refusing(3, 0.5, 2))
    classes = [type(layer) for layer in model]
    with pytest.raises(AttributeError, match="refused"):
        truncdet.convert(model)
    assert [type(layer) for layer in model] == classes
    assert not any(layer._forward_pre_hooks for layer in model)


def test_an_error_in_the_last_step_leaves_all_as_it_was() -> None:
    model = nn.Sequential(single(), multi())
    keep = _convert._keep_precision

    def broken(module: nn.Module) -> bool:
        module.register_forward_pre_hook(_convert.keep_rois, with_kwargs=True)
        if module is model[1]:
            raise OSError
        return keep(module)

    with mock.patch.object(_convert, "_keep_precision", broken), pytest.raises(OSError):
        truncdet.convert(model)
    assert [type(layer) for layer in model] == [RoIAlign, MultiScaleRoIAlign]
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert len(truncdet.convert(model)) == 2


def test_a_class_that_cannot_be_subclassed_is_skipped() -> None:
    model = nn.Sequential(Keyed(3, 0.5, 2), single())
    conversion = truncdet.convert(model)
    assert [change.name for change in conversion] == ["1"]
    ((name, reason, _),) = [(s.name, s.reason, s.layer) for s in conversion.skipped]
    assert name == "0"
    assert reason.startswith("its class cannot be subclassed: TypeError: ") and "key" in reason
    assert type(model[0]) is Keyed
