"""Other people's extractors and layers in half: patch and `convert` leave their casts alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import _mmdet_needed  # noqa: F401
import mmcv.ops
import pytest
import torch
from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor, SingleRoIExtractor
from torch import Tensor, nn
from truncdet.integrations import mmcv as mmcv_patch
from truncdet.integrations import mmdet as mm

import truncdet
from truncdet.testing import assert_bitwise_equal

DRAW = torch.Generator().manual_seed(0)
FEATURES = tuple(torch.randn(1, 4, 32 // 2**i, 1024 // 2**i, generator=DRAW) for i in range(2))
HALF = tuple(level.half() for level in FEATURES)
ROIS = torch.tensor([[0.0, 1.3, 2.7, 47.3, 44.1], [0.0, 2047.3, 1.1, 3001.7, 101.9]])


def layer(kind: Any = "RoIAlign") -> dict[str, Any]:
    return {"type": kind, "output_size": 3, "sampling_ratio": 2}


def made(cls: Any = SingleRoIExtractor, roi_layer: Any = None) -> Any:
    roi_layer = layer() if roi_layer is None else roi_layer
    return cls(roi_layer=roi_layer, out_channels=4, featmap_strides=[4, 8])


class Strict(mmcv.ops.RoIAlign):  # type: ignore[misc]
    """A layer that pools in the type it is given, whatever it inherits from."""

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        weight = torch.ones(5, 4, dtype=input.dtype)
        assert rois.dtype == input.dtype
        return (rois / 4096 @ weight)[:, :, None, None].expand(-1, -1, 3, 3)


class Foreign(nn.Module):
    """A layer of no framework."""

    def __init__(self, spatial_scale: float, output_size: int, sampling_ratio: int) -> None:
        super().__init__()
        self.output_size = (output_size, output_size)

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        return Strict.forward(self, input, rois)


class Rotated(mmcv.ops.RoIAlignRotated):  # type: ignore[misc]
    """mmcv's own kernel; a sixth column, the angle, is made of what the extractor cast."""

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        assert rois.dtype == input.dtype and type(rois) is Tensor
        boxes = torch.cat([rois, torch.zeros_like(rois[:, :1])], 1)
        return super().forward(input.float(), boxes.float()).to(input.dtype)


class Encoding(SingleRoIExtractor):  # type: ignore[misc]
    """Casts for itself, for layers and buffers in half; the pooling is the one it inherits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fc = nn.Linear(5, 4).half()

    def forward(self, feats: Any, rois: Tensor, roi_scale_factor: Any = None) -> Any:
        cast = rois.type_as(feats[0])
        kept = feats[0].new_zeros(len(rois), 5)
        kept[torch.arange(len(rois))] = cast / 4096
        encoded = self.fc(torch.cat([kept[:, :3], cast[:, 3:] / 4096], 1))
        assert encoded.dtype == feats[0].dtype
        return super().forward(feats, rois, roi_scale_factor) + encoded[:, :, None, None]


class Mapping(SingleRoIExtractor):  # type: ignore[misc]
    """Chooses levels in half."""

    def map_roi_levels(self, rois: Tensor, num_levels: int) -> Any:
        edges = torch.tensor([1000.0], dtype=torch.float16)
        assert rois.dtype == edges.dtype
        return torch.bucketize(rois[:, 1].contiguous(), edges)


class Copied(BaseRoIExtractor):  # type: ignore[misc]
    """Not mmdet's forward at all, though it casts alike."""

    def forward(self, feats: Any, rois: Tensor, roi_scale_factor: Any = None) -> Any:
        rois = rois.type_as(feats[0])
        assert type(rois) is Tensor and rois.dtype == feats[0].dtype
        return self.roi_layers[0](feats[0], rois)


EXTRACTORS: dict[str, Callable[[], Any]] = {
    "rotated": lambda: made(roi_layer={**layer(Rotated), "sampling_ratio": 2}),
    "layer with its own forward": lambda: made(roi_layer=layer(Strict)),
    "layer of no framework": lambda: made(roi_layer=layer(Foreign)),
    "encoding": lambda: made(Encoding),
    "mapping": lambda: made(Mapping),
    "copied": lambda: made(Copied),
}


def half_runs(module: Any) -> Tensor:
    result = module(HALF, ROIS)
    assert type(result) is Tensor and result.dtype == torch.float16
    return result


@pytest.mark.parametrize("name", EXTRACTORS)
def test_what_works_in_half_works_patched_and_converted(name: str) -> None:
    module = EXTRACTORS[name]()
    half_runs(module)  # it works without us
    with mm.patched():
        half_runs(module)
    assert truncdet.convert(module).precise == ()
    half_runs(module)


def test_the_patched_forward_is_precise_for_a_subclass_that_calls_it() -> None:
    module = made(Encoding)
    nn.init.zeros_(module.fc.weight)
    nn.init.zeros_(module.fc.bias)
    with mm.patched():
        found = half_runs(module)
        assert_bitwise_equal(found, half_runs(made()))
        assert not torch.equal(found, half_runs(made(Copied)))
    level = made().map_roi_levels(ROIS, 2)
    for i in range(2):
        expected = truncdet.roi_align(HALF[i], ROIS[level == i], 3, 0.25 / 2**i, 2, True)
        assert_bitwise_equal(found[level == i], expected)
    rounded = truncdet.roi_align(HALF[1], ROIS[1:].half().float(), 3, 0.125, 2, True)
    assert not torch.equal(found[level == 1], rounded)


def test_an_object_with_a_forward_of_its_own_is_not_converted_to_precise_boxes() -> None:
    module = made()
    module.forward = lambda feats, rois: rois.type_as(feats[0])
    assert truncdet.convert(module).precise == ()
    assert type(module(HALF, ROIS)) is Tensor and module(HALF, ROIS).dtype == torch.float16


def test_one_layer_that_is_not_ours_is_enough() -> None:
    module = made()
    module.roi_layers[1] = made(roi_layer=layer(Strict)).roi_layers[1]
    with mm.patched():
        half_runs(module)
    assert truncdet.convert(module).precise == ()
    half_runs(module)


def test_converting_under_the_patch_and_after_it_is_the_same() -> None:
    inside, outside = made(), made()
    with mm.patched():
        assert truncdet.convert(inside).precise == ("",)
    assert truncdet.convert(outside).precise == ("",)
    assert_bitwise_equal(half_runs(inside), half_runs(outside))
    with mm.patched():
        assert_bitwise_equal(half_runs(inside), half_runs(copy.deepcopy(outside)))


def test_where_mmcv_is_off_nothing_is_precise() -> None:
    module = made()
    plain = half_runs(module)
    with mm.patched():
        assert not torch.equal(half_runs(module), plain)
        with mmcv_patch.patched("off"):
            assert_bitwise_equal(half_runs(module), plain)


@pytest.mark.parametrize("way", ["patched", "converted"])
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_a_compiled_extractor_has_the_bits_of_the_eager_one(mode: str, way: str) -> None:
    torch._dynamo.reset()
    module = made()
    if way == "converted":
        truncdet.convert(module, mode)
    with mm.patched(mode if way == "patched" else "off"):
        eager = half_runs(module)
        result = torch.compile(module, backend="aot_eager")(HALF, ROIS)
    assert type(result) is Tensor
    assert_bitwise_equal(result, eager)
