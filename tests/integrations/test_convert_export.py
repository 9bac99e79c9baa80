"""Converted layers under the tools that look into models: script, trace, fx, compile, export."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
import torchvision
from _convert_cases import KINDS, both_kinds, multi, run_multi, run_single, single
from test_torchvision import ORIGINAL, scene
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, RoIAlign
from truncdet.integrations._precision import keep_precision
from truncdet.integrations._swap import swap_of

import truncdet
from truncdet.testing import assert_bitwise_equal

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is depre:FutureWarning")


class Script(nn.Module):
    """Two RoI layers in a model that TorchScript can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.levels = single(), multi()

    def forward(
        self,
        features: Tensor,
        rois: Tensor,
        maps: dict[str, Tensor],
        boxes: list[Tensor],
        shapes: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor]:
        return self.pool(features, rois), self.levels(maps, boxes, shapes)


def notices(caught: list[Any]) -> list[str]:
    return [str(w.message) for w in caught if "truncdet" in str(w.message)]


def test_scripted_code_is_the_original_and_the_model_stays_converted() -> None:
    model, plain = Script(), Script()
    pool, levels = model.pool, model.levels
    truncdet.convert(model)
    expected = run_single(pool), run_multi(levels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scripted = torch.jit.script(model)
        torch.jit.script(model)
    assert notices(caught) == [
        "truncdet.convert: torch.jit.script uses the framework's own operator, as if nothing were "
        "converted"
    ]
    reference = torch.jit.script(plain)
    for name in ("pool", "levels"):
        assert getattr(scripted, name).code == getattr(reference, name).code
        assert getattr(scripted, name).original_name == getattr(reference, name).original_name
    assert "truncdet" not in str(scripted.graph) and "RoIAlign" in str(scripted.graph)
    assert_bitwise_equal(run_single(scripted.pool), run_single(plain.pool))
    # In place, torch.jit.script would otherwise have put the original layers back for good.
    assert model.pool is pool and model.levels is levels
    assert_bitwise_equal(run_single(copy.deepcopy(pool)), expected[0])
    assert_bitwise_equal((run_single(pool), run_multi(levels)), expected)


def test_off_and_another_mode_right_after_scripting() -> None:
    for mode, was in (("off", "fixed_point"), ("truncate", "fixed_point")):
        model = Script()
        truncdet.convert(model)
        with pytest.warns(RuntimeWarning, match=r"torch\.jit\.script uses the framework's own"):
            torch.jit.script(model)
        assert not truncdet.convert(model)
        assert {change.was for change in truncdet.convert(model, mode)} == {was}
        assert (type(model.pool) is RoIAlign) == (mode == "off")


def test_scripted_layers_in_a_model_are_skipped() -> None:
    model = nn.Sequential(torch.jit.script(single()), torch.jit.script(nn.ReLU()))
    conversion = truncdet.convert(model)
    assert [(left.name, left.reason) for left in conversion.skipped] == [("0", "it is TorchScript")]
    assert not conversion


@both_kinds
def test_a_trace_records_the_original(kind: str) -> None:
    make, run = KINDS[kind]
    layer, example = make(), []
    run(lambda *args: example.append(args) or make()(*args))
    truncdet.convert(layer)
    inputs = tuple(
        {name: map.detach() for name, map in value.items()} if isinstance(value, dict) else value
        for value in example[0]
    )
    if kind == "MultiScaleRoIAlign":
        inputs = (inputs[0], inputs[1])
        tracee: Any = Fixed(layer)
    else:
        inputs, tracee = (inputs[0].detach(), inputs[1]), layer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(tracee, inputs, strict=False, check_trace=False)
        torch.jit.trace(tracee, inputs, strict=False, check_trace=False)
    assert len(notices(caught)) == 1
    assert "torch.jit.trace uses the framework's own" in notices(caught)[0]
    assert "torchvision::roi_align" in str(traced.inlined_graph)
    assert "truncdet::" not in str(traced.inlined_graph)


class Fixed(nn.Module):
    """MultiScaleRoIAlign for one image size: a trace takes tensors only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, maps: dict[str, Tensor], boxes: list[Tensor]) -> Tensor:
        out: Tensor = self.layer(maps, boxes, [(64, 64)])
        return out


@both_kinds
def test_a_symbolic_trace_calls_the_original(kind: str) -> None:
    make, run = KINDS[kind]
    layer = make()
    truncdet.convert(layer)
    with pytest.warns(RuntimeWarning, match=r"symbolic trace \(torch\.fx\) uses the framework's"):
        graph = torch.fx.symbolic_trace(layer)
    if kind == "RoIAlign":
        assert_bitwise_equal(run(graph), run(make()))


@both_kinds
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_compiled_layers_have_the_bits_of_eager_ones(kind: str, mode: str) -> None:
    torch._dynamo.reset()
    make, run = KINDS[kind]
    layer = make()
    whole = kind == "RoIAlign"  # which boxes are of a level depends on the data
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=whole)
    truncdet.convert(compiled, mode)
    expected = run(layer)
    assert_bitwise_equal(run(compiled), expected)
    truncdet.convert(compiled, "off")
    assert_bitwise_equal(run(compiled), run(make()))


def test_an_exported_program_holds_our_operator() -> None:
    features, boxes, _ = scene()
    layer = single()
    truncdet.convert(layer)
    program = torch.export.export(layer, (features.detach(), boxes))
    assert "truncdet.roi_align" in str(program.graph)
    assert_bitwise_equal(program.module()(features, boxes), layer(features, boxes))


def test_quantized_features_and_foreign_devices_go_to_the_original() -> None:
    features, boxes, _ = scene()
    layer = single()
    truncdet.convert(layer)
    quantized = torch.quantize_per_tensor(features.detach()[:1], 0.1, 0, torch.qint8)
    rois = torch.quantize_per_tensor(boxes * torch.tensor([0.0, 1, 1, 1, 1]), 0.1, 0, torch.qint8)
    expected = ORIGINAL(quantized, rois, 3, 0.5, 2, True).int_repr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer(quantized, rois).int_repr(), expected)

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    elsewhere = features.detach().half().as_subclass(Elsewhere)
    with pytest.warns(RuntimeWarning, match="device mps uses the framework's own operator"):
        # torchvision's kernel, for one, takes no boxes of another type than the features'.
        found = layer(elsewhere, keep_precision(boxes))
    expected = single()(features.detach().half(), boxes.half())
    assert_bitwise_equal(found.as_subclass(Tensor), expected)


@both_kinds
def test_our_classes_hide_no_type_of_an_attribute_from_torchscript(kind: str) -> None:
    make, _ = KINDS[kind]
    layer = make()
    truncdet.convert(layer)
    swap = swap_of(layer)
    assert swap is not None
    for cls in (swap.converted, swap.exporting):
        ours = [base for base in cls.__mro__ if base.__module__.startswith("truncdet.")]
        assert len(ours) > 1
        assert not any(vars(base).get("__annotations__") for base in ours)


class Named(MultiScaleRoIAlign):
    """A subclass for which TorchScript finds the attribute types in its base."""


def test_a_scripted_subclass_keeps_the_types_of_its_attributes() -> None:
    layer, code = Named(["0", "1"], (3, 2), 2), torch.jit.script(Named(["0", "1"], (3, 2), 2)).code
    truncdet.convert(layer)
    with pytest.warns(RuntimeWarning, match=r"torch\.jit\.script"):
        assert torch.jit.script(layer).code == code


def test_torchvision_keeps_the_names_that_our_forward_uses() -> None:
    poolers = vars(sys.modules["torchvision.ops.poolers"])
    assert {"_filter_input", "_setup_scales", "_convert_to_roi_format"} <= set(poolers)
    assert torchvision.ops.MultiScaleRoIAlign is poolers["MultiScaleRoIAlign"]
