"""`convert` on the real detectron2: ROIAlign, ROIPooler, a Mask R-CNN."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import _detectron2_tiny as tiny
import pytest
import torch
from detectron2.layers import ROIAlign
from detectron2.modeling import build_model
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes
from test_torchvision import scene
from torch import Tensor
from truncdet.integrations import detectron2 as d2

import truncdet
from truncdet import _seed
from truncdet.testing import assert_bitwise_equal


@pytest.fixture(autouse=True)
def nothing_global() -> Iterator[None]:
    forward = ROIAlign.forward
    yield
    assert ROIAlign.forward is forward
    assert not d2.is_patched()


ALL = slice(None)


def run(layer: Any, order: Any = ALL, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    features, _, upstream = scene(dtype=dtype)
    _, boxes, _ = scene()
    out = layer(features, boxes[order])
    out.backward(upstream[order])
    assert features.grad is not None
    return [out.detach(), features.grad]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_converted_layer_has_the_bits_of_our_operator(
    aligned: bool, ratio: int, dtype: torch.dtype
) -> None:
    layer = ROIAlign((3, 3), 0.5, ratio, aligned)
    plain = run(layer)
    (change,) = truncdet.convert(layer)
    assert change.layer == "detectron2.layers.roi_align.ROIAlign"
    ours = run(layer, dtype=dtype)
    expected = run(lambda x, b: truncdet.roi_align(x, b, 3, 0.5, ratio, aligned), dtype=dtype)
    assert_bitwise_equal(ours, expected)
    if dtype == torch.float32:
        bound = 1e-5 * float(scene()[0].detach().abs().max())
        assert float((ours[0] - plain[0]).abs().max()) <= bound
    truncdet.convert(layer, "off")
    assert type(layer) is ROIAlign
    assert_bitwise_equal(run(layer), plain)


ORDERS = [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(20)]


def test_gradients_depend_on_the_order_in_plain_layers_alone() -> None:
    layer = ROIAlign(3, 1.0, 2)
    first, *others = (run(layer, order)[1] for order in ORDERS)
    assert any(not torch.equal(other, first) for other in others)
    truncdet.convert(layer)
    first, *others = (run(layer, order)[1] for order in ORDERS)
    for other in others:
        assert_bitwise_equal(other, first)


def test_truncate_runs_the_original_whatever_is_patched() -> None:
    layer = ROIAlign(3, 0.5, 2)
    truncdet.convert(layer, "truncate")
    expected = run(layer)
    with d2.patched():
        again = ROIAlign(3, 0.5, 2)
        truncdet.convert(again, "truncate")
        assert_bitwise_equal(run(again), expected)
        assert_bitwise_equal(run(layer), expected)


@pytest.mark.parametrize("levels", [1, 2])
def test_poolers_no_longer_round_boxes(levels: int) -> None:
    pooler = ROIPooler((3, 3), [1 / 4, 1 / 8][:levels], 0, "ROIAlignV2")
    draw = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 3, 4, w, generator=draw).half() for w in (1100, 550)[:levels]]
    boxes = [Boxes(torch.tensor([[4001.3, 1.0, 4008.9, 9.0], [4101.7, 0.0, 4390.3, 15.0]]))]
    conversion = truncdet.convert(pooler)
    assert [change.name for change in conversion] == [f"level_poolers.{i}" for i in range(levels)]
    exact = pooler([features.float() for features in maps], boxes)
    out = pooler(maps, boxes)
    assert type(out) is Tensor and out.dtype == torch.float16
    assert_bitwise_equal(out, exact.half())
    truncdet.convert(pooler, "off")
    assert float((pooler(maps, boxes).float() - exact).abs().max()) > 0.1


def test_every_pooler_of_a_detector_is_converted(tmp_path: Path) -> None:
    restore = _seed.saved_states()
    model = build_model(tiny.config(tmp_path))
    restore()
    keys = list(model.state_dict())
    conversion = truncdet.convert(model)
    # Four levels for boxes, four for masks.
    assert len(conversion) == 8 and not conversion.skipped and not conversion.not_covered
    assert list(model.state_dict()) == keys
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(truncdet.convert(again, "off")) == 8


def test_a_converted_model_trains_to_the_bits_of_the_patch(tmp_path: Path) -> None:
    restore = _seed.saved_states()
    cfg = tiny.config(tmp_path, "faster", steps=2)
    with d2.patched():
        expected = tiny.train(cfg).digest
    trainer = tiny.trainer(cfg)
    assert len(truncdet.convert(trainer.model)) == 4
    trainer.train()
    plain = tiny.train(cfg).digest
    restore()
    assert truncdet.digest(trainer.model.state_dict()).hex == expected != plain
