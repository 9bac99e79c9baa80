"""mmcv's operators beside RoIAlign: ways to them, and the same calls of truncdet's."""

from __future__ import annotations

import sys
from typing import Any

import _mmcv_needed  # noqa: F401
import mmcv.ops
import torch
from _operator_cases import (
    SHAPES,
    STARTS,
    Case,
    attention,
    boxes,
    convolution,
    draw,
    features,
    rotated,
    same,
)
from mmcv.ops import deform_conv2d as imported
from mmcv.ops.deform_conv import DeformConv2dFunction
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from torch import Tensor

import truncdet

HELD = (imported,)  # in a tuple, which no patch looks into
attention_module = sys.modules["mmcv.ops.multi_scale_deform_attn"]


def picked(*names: str) -> Any:
    inputs = convolution()
    return lambda: {name: inputs[name] for name in names}


def plain_attention(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    function = attention_module.multi_scale_deformable_attn_pytorch
    result: Tensor = function(value, SHAPES, locations, weights)
    return result


def our_attention(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return truncdet.ms_deform_attn(value, SHAPES, STARTS, locations, weights)


def rotated_case(ratio: int, aligned: bool, clockwise: bool) -> Case:
    rest = ((3, 2), 0.9, ratio, aligned, clockwise)
    return Case(
        lambda x, rois: mmcv.ops.roi_align_rotated(x, rois, *rest),
        lambda x, rois: truncdet.roi_align_rotated(x, rois, *rest),
        lambda: {"input": features(3)},
        rotated,
    )


def our_dcn(x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
    return truncdet.deform_conv2d(x, offset, weight)


# With kernels for the CPU in mmcv.
CASES = {
    "deform_conv2d": Case(
        lambda x, offset, weight: mmcv.ops.deform_conv2d(x, offset, weight, 1, 0, 1, 1, 2),
        our_dcn,
        picked("input", "offset", "weight"),
    ),
    "deform_conv2d imported before": Case(
        lambda x, offset, weight: imported(x, offset, weight, 1, 0, 1, 1, 2),
        our_dcn,
        picked("input", "offset", "weight"),
    ),
    "DeformConv2dFunction.apply": Case(
        lambda *args: DeformConv2dFunction.apply(*args, 1, 0, 1, 1, 2),
        our_dcn,
        picked("input", "offset", "weight"),
    ),
    "modulated_deform_conv2d": Case(
        lambda *args: mmcv.ops.modulated_deform_conv2d(*args, 1, 0, 1, 1, 2), same, convolution
    ),
    "multi_scale_deformable_attn_pytorch": Case(plain_attention, our_attention, attention),
    "RoIAlignRotated": Case(
        lambda x, rois: mmcv.ops.RoIAlignRotated((3, 2), 0.9)(x, rois),
        lambda x, rois: truncdet.roi_align_rotated(x, rois, (3, 2), 0.9),
        lambda: {"input": features(3)},
        rotated,
    ),
    **{
        f"roi_align_rotated {ratio} {aligned} {clockwise}": rotated_case(ratio, aligned, clockwise)
        for ratio in (0, 2)
        for aligned in (True, False)
        for clockwise in (True, False)
    },
}
# With kernels for CUDA alone.
CUDA_ALONE = {
    "roi_pool": Case(
        lambda x, rois: mmcv.ops.roi_pool(x, rois, (3, 2), 0.7),
        lambda x, rois: truncdet.roi_pool(x, rois, (3, 2), 0.7, rounded=False),
        lambda: {"input": features(3)},
        boxes,
    ),
    "RoIPool": Case(
        lambda x, rois: mmcv.ops.RoIPool((3, 2), 0.7)(x, rois),
        lambda x, rois: truncdet.roi_pool(x, rois, (3, 2), 0.7, rounded=False),
        lambda: {"input": features(3)},
        boxes,
    ),
    "MultiScaleDeformableAttnFunction.apply": Case(
        lambda value, locations, weights: MultiScaleDeformableAttnFunction.apply(
            value, SHAPES.to(value.device), STARTS.to(value.device), locations, weights, 64
        ),
        our_attention,
        attention,
    ),
    **{
        f"dynamic_scatter {how}": Case(
            lambda feats, how=how: mmcv.ops.dynamic_scatter(feats, coors(feats), how)[0],
            lambda feats, how=how: truncdet.dynamic_scatter(feats, coors(feats), how)[0],
            lambda: {"feats": draw(60, 3)},
        )
        for how in ("sum", "mean", "max")
    },
}
ALL = {**CASES, **CUDA_ALONE}


def coors(feats: Tensor) -> Tensor:
    places = torch.randint(-1, 3, (60, 3), generator=torch.Generator().manual_seed(5)).int()
    return places.to(feats.device)
