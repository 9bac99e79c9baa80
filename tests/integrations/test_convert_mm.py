"""`convert` on the real mmcv and mmdet: RoIAlign in all its variants, extractors, a detector."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import _mmdet_needed  # noqa: F401
import _mmdet_tiny as tiny
import mmcv.ops
import pytest
import torch
from mmdet.models.roi_heads.roi_extractors import GenericRoIExtractor, SingleRoIExtractor
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from test_torchvision import scene
from torch import Tensor, nn
from truncdet.integrations import mmcv as mmcv_patch
from truncdet.integrations._precision import keep_rois
from truncdet.integrations._swap import swap_of

import truncdet
from truncdet.testing import assert_bitwise_equal

VARIANTS: tuple[dict[str, Any], ...] = (
    {"output_size": 3, "spatial_scale": 0.5, "sampling_ratio": 2},
    {"output_size": (3, 3)},  # adaptive sampling
    {"output_size": 3, "pool_mode": "max", "sampling_ratio": 2},
    {"output_size": 3, "aligned": False},
    {"output_size": 3, "use_torchvision": True, "sampling_ratio": 2},
    {"output_size": 3, "use_torchvision": True, "pool_mode": "max"},
)
variants = pytest.mark.parametrize(
    "options", VARIANTS, ids=lambda o: " ".join(f"{key}={o[key]}" for key in o)
)


@pytest.fixture(autouse=True)
def nothing_global() -> Iterator[None]:
    before = vars(mmcv.ops.RoIAlign)["forward"], mmcv.ops.roi_align
    yield
    assert (vars(mmcv.ops.RoIAlign)["forward"], mmcv.ops.roi_align) == before
    assert not mmcv_patch.is_patched()


def run(layer: Any, order: Any = None) -> list[Tensor]:
    """Output and gradient of the features, for RoIs in some order."""
    features, boxes, upstream = scene()
    order = torch.arange(len(boxes)) if order is None else order
    out = layer(features, boxes[order])
    out.backward(upstream[order])
    assert features.grad is not None
    return [out.detach(), features.grad]


def expected(options: dict[str, Any]) -> list[Tensor]:
    """What our own operator gives; torchvision, which only averages, ignores pool_mode."""
    pool_mode = "avg" if options.get("use_torchvision") else options.get("pool_mode", "avg")
    return run(
        lambda features, boxes: truncdet.roi_align(
            features,
            boxes,
            options["output_size"],
            options.get("spatial_scale", 1.0),
            options.get("sampling_ratio", 0),
            options.get("aligned", True),
            pool_mode,
        )
    )


@variants
def test_every_variant_has_the_bits_of_our_operator_and_the_values_of_mmcv(
    options: dict[str, Any],
) -> None:
    layer, plain = mmcv.ops.RoIAlign(**options), run(mmcv.ops.RoIAlign(**options))
    assert [change.layer for change in truncdet.convert(layer)] == ["mmcv.ops.roi_align.RoIAlign"]
    ours = run(layer)
    assert_bitwise_equal(ours, expected(options))
    assert float((ours[0] - plain[0]).abs().max()) <= 1e-5 * float(scene()[0].detach().abs().max())
    assert torch.allclose(ours[1], plain[1], rtol=1e-4, atol=1e-4)


@variants
def test_truncate_is_close_and_off_is_mmcv_again(options: dict[str, Any]) -> None:
    layer, plain = mmcv.ops.RoIAlign(**options), run(mmcv.ops.RoIAlign(**options))
    truncdet.convert(layer, "truncate")
    out = run(layer)[0]
    assert float((out - plain[0]).abs().max()) <= 2.0**-10 * float(scene()[0].detach().abs().max())
    with mmcv_patch.patched():  # the original runs, whatever is patched
        assert_bitwise_equal(run(layer)[0], out)
    truncdet.convert(layer, "off")
    assert type(layer) is mmcv.ops.RoIAlign
    assert_bitwise_equal(run(layer), plain)


@pytest.mark.parametrize("use_torchvision", [True, False])
def test_truncate_runs_the_function_that_the_layer_is_set_to(use_torchvision: bool) -> None:
    # Who sets it may have an mmcv without kernels for the device.
    layer = mmcv.ops.RoIAlign(3, use_torchvision=use_torchvision)
    truncdet.convert(layer, "truncate")
    swap = swap_of(layer)
    assert swap is not None and swap.source == ("torchvision" if use_torchvision else "mmcv")


ORDERS = [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(20)]


def test_gradients_depend_on_the_order_in_plain_layers_alone() -> None:
    layer = mmcv.ops.RoIAlign(3, 1.0, 2)
    first, *others = (run(layer, order)[1] for order in ORDERS)
    assert any(not torch.equal(other, first) for other in others)
    truncdet.convert(layer)
    first, *others = (run(layer, order)[1] for order in ORDERS)
    for other in others:
        assert_bitwise_equal(other, first)


def extractor(kind: type = SingleRoIExtractor, layer: str = "RoIAlign") -> Any:
    return kind(
        roi_layer={"type": layer, "output_size": 3},
        out_channels=3,
        featmap_strides=[4, 8],
    )


def pyramid(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 3, 4, width, generator=draw).to(dtype).requires_grad_()
        for width in (1100, 550)
    ]


# Far to the right, where half and bfloat16 move a coordinate by pixels, small and large.
ROIS = torch.tensor([[0, 4001.3, 1.0, 4008.9, 9.0], [0, 4101.7, 0.0, 4390.3, 15.0]])


@pytest.mark.parametrize("kind", [SingleRoIExtractor, GenericRoIExtractor])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extractors_no_longer_round_boxes(kind: type, dtype: torch.dtype) -> None:
    module, model = extractor(kind), nn.Sequential()
    model.add_module("extractor", module)
    conversion = truncdet.convert(model)
    assert [change.name for change in conversion] == [
        "extractor.roi_layers.0",
        "extractor.roi_layers.1",
    ]
    # Only the one that casts boxes has to be kept from it.
    assert conversion.precise == (("extractor",) if kind is SingleRoIExtractor else ())
    exact = module([features.detach().float() for features in pyramid(dtype)], ROIS)
    out = module(pyramid(dtype), ROIS)
    assert type(out) is Tensor and out.dtype == dtype
    step = torch.finfo(dtype).eps * float(exact.abs().max()) * len(module.roi_layers)
    assert float((out.float() - exact).abs().max()) <= step
    rounded = module(pyramid(dtype), ROIS.to(dtype).float())
    assert float((rounded.float() - exact).abs().max()) > 4 * step
    out.sum().backward()
    truncdet.convert(model, "off")
    assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs


def test_the_hook_is_there_once_and_follows_copies() -> None:
    module = extractor()
    for mode in ("fixed_point", "truncate", "fixed_point"):
        assert truncdet.convert(module, mode).precise == ("",)
    assert list(module._forward_pre_hooks.values()) == [keep_rois]
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(again._forward_pre_hooks.values()) == [keep_rois]
        assert_bitwise_equal(
            again(pyramid(torch.float16), ROIS), module(pyramid(torch.float16), ROIS)
        )
        assert len(truncdet.convert(again, "off")) == 2
        assert not again._forward_pre_hooks
    assert list(module._forward_pre_hooks.values()) == [keep_rois]


def test_extractors_of_other_layers_keep_rounding() -> None:
    for layer, covered in (("RoIPool", True), ("PrRoIPool", False)):
        module = extractor(layer=layer)
        conversion = truncdet.convert(module)
        assert conversion.precise == () and not module._forward_pre_hooks
        assert (len(conversion), len(conversion.not_covered)) == ((2, 0) if covered else (0, 2))


def test_layers_that_it_cannot_cover_are_listed() -> None:
    model = nn.Sequential(mmcv.ops.PrRoIPool(3, 1.0), mmcv.ops.RiRoIAlignRotated(3, 1.0))
    names = [left.layer.rsplit(".", 1)[1] for left in truncdet.convert(model).not_covered]
    assert names == ["PrRoIPool", "RiRoIAlignRotated"]


def test_every_extractor_of_a_detector_is_converted() -> None:
    state = torch.get_rng_state()
    register_all_modules()
    model = MODELS.build(tiny.config("cascade").model)
    torch.set_rng_state(state)
    keys = list(model.state_dict())
    layers = [m for m in model.modules() if type(m) is mmcv.ops.RoIAlign]
    conversion = truncdet.convert(model)
    assert len(conversion) == len(layers) == 6 * 4  # three stages, boxes and masks, four levels
    assert len(conversion.precise) == 6 and not conversion.skipped
    assert list(model.state_dict()) == keys
    assert len(truncdet.convert(copy.deepcopy(model), "off")) == len(layers)
