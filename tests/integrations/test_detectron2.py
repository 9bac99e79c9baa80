"""detectron2 under the patch: every way to its RoIAlign, precision of boxes, and back again."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import _detectron2_tiny as tiny
import pytest
import torch
from detectron2.layers import ROIAlign
from detectron2.layers import roi_align as captured
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import BitMasks, Boxes
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from truncdet.integrations import detectron2 as d2

import truncdet
from truncdet import _seed
from truncdet.testing import assert_bitwise_equal

LAYER: Any = sys.modules["detectron2.layers.roi_align"]
LAYERS: Any = sys.modules["detectron2.layers"]
ORIGINAL = LAYER.roi_align
MODES = ("fixed_point", "truncate")
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    restore = _seed.saved_states()
    yield
    restore()
    assert not d2.is_patched() and d2.mode() == "off"
    assert LAYER.roi_align is LAYERS.roi_align is ORIGINAL
    assert "__call__" not in vars(ROIAlign) and ROIAlign.__call__ is nn.Module.__call__


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, Tensor]]:
    """Features' dtype and boxes of the calls that reach truncdet.roi_align."""
    calls: list[tuple[torch.dtype, Tensor]] = []
    ours = truncdet.roi_align

    def spied(input: Tensor, boxes: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((input.dtype, boxes))
        return ours(input, boxes, *args, **kwargs)

    monkeypatch.setattr(truncdet, "roi_align", spied)
    return calls


def scene(rois: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Features [2, 3, 16, 16], crowded RoIs [K, 5] in float32 and a gradient [K, 3, 3, 3]."""
    draw = torch.Generator().manual_seed(0)
    corner = torch.rand(rois, 2, generator=draw) * 8
    size = torch.rand(rois, 2, generator=draw) * 7 + 1
    image = torch.randint(0, 2, (rois, 1), generator=draw).float()
    features = torch.randn(2, 3, 16, 16, generator=draw).to(dtype).requires_grad_()
    gradient = torch.randn(rois, 3, 3, 3, generator=draw).to(dtype)
    return features, torch.cat([image, corner, corner + size], 1), gradient


def results(function: Callable[..., Tensor], order: Any = None, **options: Any) -> list[Tensor]:
    """Output and gradient, with the RoIs in some order and the output's rows back in place."""
    features, boxes, upstream = scene(**options)
    order = torch.arange(len(boxes)) if order is None else order
    result = function(features, boxes[order])
    result.backward(upstream[order])
    assert features.grad is not None
    return [result.detach()[order.argsort()], features.grad]


ORDERS = [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(20)]
BUILT_BEFORE = ROIAlign(3, 0.5, 2)


class Asserting(ROIAlign):  # type: ignore[misc]
    """A user's layer, with a forward of its own on top."""

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        assert rois.shape[1] == 5
        return super().forward(input, rois)


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "layer": lambda features, boxes: ROIAlign(3, 0.5, 2)(features, boxes),
    "layer built before": lambda features, boxes: BUILT_BEFORE(features, boxes),
    "layer by name": lambda features, boxes: BUILT_BEFORE(rois=boxes, input=features),
    "copied layer": lambda features, boxes: copy.deepcopy(BUILT_BEFORE)(features, boxes),
    "forward alone": lambda features, boxes: BUILT_BEFORE.forward(features, boxes),
    "subclass": lambda features, boxes: Asserting(3, 0.5, 2)(features, boxes),
    "layers.roi_align": lambda features, boxes: LAYERS.roi_align(
        features, boxes.to(features.dtype), 3, 0.5, 2, True
    ),
}
each_way = pytest.mark.parametrize("way", WAYS)


def test_negative_control_the_plain_gradient_depends_on_the_order() -> None:
    first = results(BUILT_BEFORE)
    others = [results(BUILT_BEFORE, order) for order in ORDERS]
    assert all(torch.equal(other[0], first[0]) for other in others)
    assert any(not torch.equal(other[1], first[1]) for other in others)


@each_way
def test_fixed_point_has_the_bits_of_our_own_operator_in_any_order(way: str) -> None:
    expected = results(lambda x, b: truncdet.roi_align(x, b, 3, 0.5, 2, True))
    with d2.patched():
        for order in [None, *ORDERS[:3]]:
            assert_bitwise_equal(results(WAYS[way], order), expected)


@each_way
def test_truncate_repeats_and_is_close(way: str) -> None:
    plain = results(WAYS[way])
    with d2.patched("truncate"):
        first = results(WAYS[way])
        for order in ORDERS[:3]:
            assert_bitwise_equal(results(WAYS[way], order), first)
    largest = float(scene()[0].abs().max())
    # 11 bits: half a unit in the last place of the largest feature.
    assert 0 < float((first[0] - plain[0]).abs().max()) <= largest * 2.0**-11


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_forwards_agree_with_detectron2s(aligned: bool, ratio: int) -> None:
    layer = ROIAlign((3, 2), 0.5, ratio, aligned)
    features, boxes, _ = scene()
    plain = layer(features, boxes)
    with d2.patched():
        ours = layer(features, boxes)
    limit = 1e-5 * float(features.detach().abs().max())
    assert float((ours - plain).detach().abs().max()) <= limit


@each_mode
def test_off_within_is_the_original_to_the_bit(mode: str) -> None:
    expected = results(BUILT_BEFORE)
    with d2.patched(mode), d2.patched("off"):
        assert LAYER.roi_align is ORIGINAL
        assert_bitwise_equal(results(BUILT_BEFORE), expected)


def test_the_mode_is_frozen_at_forward_time() -> None:
    features, boxes, upstream = scene()
    with d2.patched():
        expected = results(BUILT_BEFORE)
        result = BUILT_BEFORE(features, boxes)
    result.backward(upstream)
    assert features.grad is not None
    assert_bitwise_equal(features.grad, expected[1])


def test_no_name_under_detectron2_is_left() -> None:
    with d2.patched():
        left = [
            (name, key)
            for name, module in list(sys.modules.items())
            if name.split(".")[0] == "detectron2"
            for key, value in list(vars(module).items())
            if value is ORIGINAL
        ]
        assert left == []
        assert captured is ORIGINAL  # somebody else's module: it may mean torchvision's own
        assert LAYER.roi_align is LAYERS.roi_align is not ORIGINAL


@each_mode
def test_pooler_and_mask_targets_use_it(mode: str, seen: list[Any]) -> None:
    pooler = ROIPooler(3, (0.5, 0.25), 0, "ROIAlignV2", canonical_box_size=8)
    maps = [torch.rand(1, 3, 16, 16), torch.rand(1, 3, 8, 8)]
    boxes = Boxes(torch.tensor([[1.0, 1.0, 5.0, 6.0], [0.0, 0.0, 30.0, 29.0]]))
    masks = BitMasks(torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(0)) > 0.5)

    def both() -> list[Tensor]:
        return [pooler(maps, [boxes]), masks.crop_and_resize(boxes.tensor, 7)]

    plain = both()
    with d2.patched(mode):
        ours = both()
    assert len(seen) == (3 if mode == "fixed_point" else 0)
    assert float((ours[0] - plain[0]).abs().max()) <= (1e-5 if mode == "fixed_point" else 2**-11)
    assert torch.equal(ours[1], plain[1])  # thresholded


@pytest.mark.parametrize("model", ["c4", "cascade"])
def test_other_heads_use_it_too(model: str, tmp_path: Path, seen: list[Any]) -> None:
    runs = []
    for _ in range(2):
        with d2.patched():
            runs.append(tiny.train(tiny.config(tmp_path, model, steps=2)))
    assert runs[0].digest == runs[1].digest
    # One map for C4; four levels in each of three box stages, the mask head and its targets.
    assert len(seen) >= 2 * 2 * (1 if model == "c4" else 3 * 4 + 4)


def half(mode: str, literal: bool = False) -> list[Tensor]:
    """The boxes that a layer's operator gets for bfloat16 features, and what comes out."""
    layer = ROIAlign(3, 1.0, 2)
    features = torch.rand(1, 1, 1, 600, generator=torch.Generator().manual_seed(0)).bfloat16()
    boxes = torch.tensor([[0.0, 257.3, 0.0, 301.9, 1.0]])
    with d2.patched(mode, literal=literal):
        result: Tensor = layer(features, boxes)
    assert result.dtype == torch.bfloat16
    return [features, boxes, result]


def test_boxes_stay_float32_beside_half_features(seen: list[Any]) -> None:
    features, boxes, result = half("fixed_point")
    ((dtype, given),) = seen
    assert dtype == torch.bfloat16 and type(given) is Tensor
    assert_bitwise_equal(given, boxes)
    assert_bitwise_equal(result, truncdet.roi_align(features, boxes, 3, 1.0, 2, True))
    rounded = truncdet.roi_align(features, boxes.bfloat16().float(), 3, 1.0, 2, True)
    assert not torch.equal(result, rounded)  # so it would show


def test_truncate_gets_them_whole_and_literal_through_half() -> None:
    features, boxes, result = half("truncate")
    exact = ORIGINAL(features.double(), boxes.double(), 3, 1.0, 2, True)
    assert_bitwise_equal(result, exact.bfloat16())
    with pytest.warns(UserWarning, match="literal=True takes features and rois through half"):
        features, boxes, result = half("truncate", literal=True)
    literal = ORIGINAL(features.half().double(), boxes.half().double(), 3, 1.0, 2, True)
    assert_bitwise_equal(result, literal.bfloat16())
    assert not torch.equal(literal, exact)


def test_negative_control_detectron2_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(LAYER, "roi_align", lambda x, boxes, *_: given.append(boxes))
    BUILT_BEFORE(scene(dtype=torch.bfloat16)[0], scene()[1])
    assert given[0].dtype == torch.bfloat16


@each_mode
def test_a_model_under_autocast(mode: str, tmp_path: Path, seen: list[Any]) -> None:
    cfg = tiny.config(tmp_path)
    trainer = tiny.trainer(cfg)
    batch = next(iter(trainer.data_loader))
    found = []
    for _ in range(2):
        _seed.seed_all(1)
        trainer.model.zero_grad()
        with EventStorage(), d2.patched(mode), torch.autocast("cpu", torch.bfloat16):
            losses = trainer.model(batch)
        sum(losses.values()).backward()
        grads = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads)
        found.append([list(losses.values()), grads])
    assert_bitwise_equal(found[0], found[1])
    if mode == "fixed_point":
        dtypes = {(dtype, boxes.dtype) for dtype, boxes in seen}
        # Mask targets pool float32 masks.
        assert dtypes == {(torch.bfloat16, torch.float32), (torch.float32, torch.float32)}


@each_mode
def test_no_boxes(mode: str) -> None:
    with d2.patched(mode):
        for dtype in (torch.float32, torch.bfloat16):
            features = torch.rand(1, 2, 8, 8, dtype=dtype, requires_grad=True)
            result = BUILT_BEFORE(features, torch.zeros(0, 5))
            assert result.shape == (0, 2, 3, 3) and result.dtype == dtype
            result.sum().backward()
            assert features.grad is not None and not features.grad.any()
