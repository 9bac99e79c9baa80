"""Exports of a patched detectron2: the original operator, one warning; compiled code: ours."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import _detectron2_tiny as tiny
import pytest
import torch
from detectron2.export import TracingAdapter, scripting_with_instances
from detectron2.layers import ROIAlign
from detectron2.modeling import build_model
from detectron2.structures import Boxes
from torch import Tensor, nn
from truncdet.integrations import detectron2 as d2
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet import _seed
from truncdet.testing import assert_bitwise_equal

LAYER: Any = sys.modules["detectron2.layers.roi_align"]
_jit: Any = torch.jit
FIELDS = {
    "proposal_boxes": Boxes,
    "objectness_logits": Tensor,
    "pred_boxes": Boxes,
    "scores": Tensor,
    "pred_classes": Tensor,
    "pred_masks": Tensor,
}
# Of torch.jit and of detectron2 on a new torch, with or without us.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    restore = _seed.saved_states()
    yield
    restore()
    assert not d2.is_patched() and ROIAlign.__call__ is nn.Module.__call__


@pytest.fixture
def model(tmp_path: Path) -> Any:
    _seed.seed_all(0)
    return build_model(tiny.config(tmp_path)).eval()


@contextmanager
def one_warning(reason: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    ours = [str(w.message) for w in caught if "truncdet" in str(w.message)]
    assert len(ours) == 1 and f"detectron2: {reason} uses torchvision's own" in ours[0], ours


class Head(nn.Module):
    """A model around the layer; torch.compile keeps the `__call__` that its root had."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ROIAlign(3, 1.0, 2)

    def forward(self, features: Tensor, boxes: Tensor) -> Any:
        return self.pool(features, boxes)


def scene(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    features = torch.rand(1, 2, 8, 300, generator=draw).to(dtype)
    return features, torch.tensor([[0.0, 1.0, 1.3, 6.0, 5.0], [0.0, 257.3, 0.5, 280.6, 7.0]])


@pytest.mark.parametrize("torchvision_too", [False, True])
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_a_traced_layer_is_the_original(mode: str, torchvision_too: bool) -> None:
    expected = ROIAlign(3, 1.0, 2)(*scene())
    with tv.patched(mode if torchvision_too else "off"), d2.patched(mode):
        with one_warning("torch.jit.trace"):
            traced = _jit.trace(ROIAlign(3, 1.0, 2), scene())
            _jit.trace(ROIAlign(5, 1.0, 2), scene(torch.float16))
        assert "torchvision::roi_align" in str(traced.inlined_graph)
        assert_bitwise_equal(traced(*scene()), expected)
    assert_bitwise_equal(traced(*scene()), expected)


@pytest.mark.parametrize("torchvision_too", [False, True])
def test_a_scripted_layer_is_the_original(torchvision_too: bool, fresh_jit: None) -> None:
    layer = ROIAlign(3, 1.0, 2)
    expected = layer(*scene())
    with tv.patched("fixed_point" if torchvision_too else "off"), d2.patched():
        with one_warning("torch.jit.script"):
            scripted = _jit.script(layer)
            _jit.script(ROIAlign(5, 1.0, 2))
        assert "torchvision.roi_align" in scripted.inlined_graph.str().replace("::", ".")
        assert_bitwise_equal(scripted(*scene()), expected)
        # The layer itself is ours as before.
        assert_bitwise_equal(layer(*scene()), truncdet.roi_align(*scene(), 3, 1.0, 2, True))
    buffer = io.BytesIO()
    _jit.save(scripted, buffer)
    buffer.seek(0)
    assert_bitwise_equal(_jit.load(buffer)(*scene()), expected)


def test_a_model_traced_through_the_adapter(model: Any) -> None:
    inputs = tiny.inputs()

    def trace() -> tuple[Any, list[Tensor]]:
        adapter = TracingAdapter(
            model, inputs, lambda m, i: m.inference(i, do_postprocess=False)[0]
        )
        adapter.eval()
        traced = _jit.trace(adapter, adapter.flattened_inputs, check_trace=False)
        return traced, list(traced(*adapter.flattened_inputs))

    _, expected = trace()
    with d2.patched(), one_warning("torch.jit.trace"):
        traced, outputs = trace()
    assert str(traced.inlined_graph).count("torchvision::roi_align") == 8
    assert len(outputs[0]) > 0
    assert_bitwise_equal(outputs, expected)


def test_a_model_scripted_with_instances(model: Any, fresh_jit: None) -> None:
    inputs = tiny.inputs()
    with d2.patched(), one_warning("torch.jit.script"):
        # A copy, since scripting takes a ResNet of detectron2 apart.
        scripted = scripting_with_instances(copy.deepcopy(model), FIELDS)
        (found,) = scripted.inference(inputs, None, False)
    (expected,) = scripting_with_instances(model, FIELDS).inference(inputs, None, False)
    assert len(found.pred_boxes.tensor) > 0
    for name in ("scores", "pred_classes", "pred_masks"):
        assert_bitwise_equal(getattr(found, name), getattr(expected, name))


def test_on_another_device_the_original_gets_boxes_of_the_features_type() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    features, boxes = scene(torch.float16)
    expected = ROIAlign(3, 1.0, 2)(features, boxes)
    with d2.patched(), one_warning("device mps"):
        for _ in range(2):
            result = ROIAlign(3, 1.0, 2)(features.as_subclass(Elsewhere), boxes)
            assert_bitwise_equal(result.as_subclass(Tensor), expected)


def test_every_patch_warns_anew() -> None:
    for _ in range(2):
        with d2.patched(), one_warning("torch.jit.trace"):
            _jit.trace(ROIAlign(3, 1.0, 2), scene())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_compiled_layers_have_the_bits_of_eager_ones(mode: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    layer = Head()
    compiled: Callable[..., Tensor] = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def gradient(function: Callable[..., Tensor]) -> list[Tensor]:
        features, boxes = scene(dtype)
        features.requires_grad_()
        result = function(features, boxes)
        result.sum().backward()
        assert features.grad is not None
        return [result.detach(), features.grad]

    plain = gradient(layer)
    with d2.patched(mode):
        ours = gradient(layer)
        assert_bitwise_equal(gradient(compiled), ours)
    assert_bitwise_equal(gradient(compiled), plain)
    assert not torch.equal(ours[0], plain[0])


def test_copies_and_pickles_made_while_patched_know_nothing_of_it() -> None:
    layer = ROIAlign(3, 1.0, 2)
    with d2.patched():
        saved = pickle.dumps(layer)
        copied = copy.deepcopy(layer)
    assert b"truncdet" not in saved
    assert_bitwise_equal(pickle.loads(saved)(*scene()), layer(*scene()))
    assert_bitwise_equal(copied(*scene()), layer(*scene()))


@pytest.mark.parametrize("way", ["patched", "converted"])
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_a_layer_compiled_by_itself_is_one_graph_and_rounds_no_box(mode: str, way: str) -> None:
    torch._dynamo.reset()
    layer = ROIAlign(3, 1 / 64, 2)
    features = scene(torch.float16)[0]
    boxes = torch.tensor([[0.0, 1.3, 2.7, 2049.3, 447.1]])
    rounded = layer(features, boxes)
    if way == "converted":
        truncdet.convert(layer, mode)
    with d2.patched(mode if way == "patched" else "off"):
        eager = layer(features, boxes)
        for call in ({}, {"input": features, "rois": boxes}):
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            result = compiled(**call) if call else compiled(features, boxes)
            assert type(result) is Tensor
            assert_bitwise_equal(result, eager)
    assert not torch.equal(eager, rounded)


def test_hooks_of_a_compiled_layer_still_run() -> None:
    torch._dynamo.reset()
    layer = ROIAlign(3, 1.0, 2)
    layer.register_forward_hook(lambda module, args, result: result * 2)
    features, boxes = scene(torch.float16)
    with d2.patched():
        eager = layer(features, boxes)
        assert_bitwise_equal(torch.compile(layer, backend="aot_eager")(features, boxes), eager)
