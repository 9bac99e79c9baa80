"""mmcv's operators beside RoIAlign, in mmcv's own arguments, on truncdet's.

Their kernels bypass the dispatcher. Where they exist for the CPU at all, ours are within rounding
of them; mmcv must be imported by the time that one is called, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from truncdet.integrations import _deform
from truncdet.integrations._substitute import CONVOLVED, SUMMED, Substitute

import truncdet


def roi_pool(input: Tensor, rois: Tensor, output_size: Any, spatial_scale: float = 1.0) -> Tensor:
    """mmcv rounds no corner of a RoI, as torchvision does."""
    result: Tensor = truncdet.roi_pool(input, rois, output_size, spatial_scale, rounded=False)
    return result


def roi_align_rotated(
    input: Tensor,
    rois: Tensor,
    output_size: Any,
    spatial_scale: float,
    sampling_ratio: int = 0,
    aligned: bool = True,
    clockwise: bool = False,
) -> Tensor:
    """Both have the same arguments."""
    result: Tensor = truncdet.roi_align_rotated(
        input, rois, output_size, spatial_scale, sampling_ratio, aligned, clockwise
    )
    return result


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deform_groups: int = 1,
    bias: bool = False,
    im2col_step: int = 32,
) -> Tensor | None:
    """Any batch size is one step here; as in mmcv, all is of the offset's type."""
    if bias is not False:
        return None
    x, kernel = input.type_as(offset), weight.type_as(offset)
    return _deform.deform_conv2d(
        x, offset, kernel, None, stride, padding, dilation, groups, deform_groups
    )


def modulated_deform_conv2d(
    input: Tensor,
    offset: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deform_groups: int = 1,
) -> Tensor | None:
    """As in mmcv, all is of the offset's type."""
    x, kernel, masks = (tensor.type_as(offset) for tensor in (input, weight, mask))
    biases = None if bias is None else bias.type_as(offset)
    return _deform.deform_conv2d(
        x, offset, kernel, biases, stride, padding, dilation, groups, deform_groups, masks
    )


def ms_deform_attn(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: Any = 64,
) -> Tensor:
    """Locations and weights keep the precision that they come with; mmcv casts them to value's."""
    return truncdet.ms_deform_attn(
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
    )


def ms_deform_attn_pytorch(
    value: Tensor,
    value_spatial_shapes: Any,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor | None:
    """The function that the layer calls on a CPU, made of grid_sample."""
    types = {value.dtype, sampling_locations.dtype, attention_weights.dtype}
    if torch.is_autocast_enabled(value.device.type):
        # As grid_sample, which is float32 there.
        value = value if value.dtype == torch.float64 else value.float()
    elif len(types) > 1:
        return None  # grid_sample has an error for it
    shapes = torch.as_tensor(value_spatial_shapes, device=value.device)
    cells = shapes.prod(1)
    starts = cells.cumsum(0) - cells
    return truncdet.ms_deform_attn(value, shapes, starts, sampling_locations, attention_weights)


def dynamic_scatter(feats: Tensor, coors: Tensor, reduce_type: str = "max") -> Any:
    """Both have the same arguments."""
    return truncdet.dynamic_scatter(feats, coors, reduce_type)


def nms(
    bboxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    offset: int,
    score_threshold: float,
    max_num: int,
) -> Tensor:
    """mmcv's kernel on boxes sorted stably, so that equal scores keep their order everywhere.

    It sorts again, and finds no equal scores.
    """
    kept = None
    if score_threshold > 0:
        (kept,) = torch.where(scores > score_threshold)
        bboxes, scores = bboxes[kept], scores[kept]
    order = torch.sort(scores, descending=True, stable=True).indices
    # Exact in float32: the kernel's table of pairs would not hold 2^24 boxes.
    ranks = torch.arange(len(order), 0, -1, device=scores.device, dtype=torch.float32)
    found: Tensor = NMS.original()(bboxes[order], ranks, iou_threshold, offset, 0.0, max_num)
    found = order[found]
    return found if kept is None else kept[found]


NMS = Substitute(
    "mmcv.ops.nms",
    "",
    nms,
    "NMSop",
    part="nms, batched_nms: order of equal scores",
    tier="T1",
    by="mmcv's kernel, sorted stably",
)
TABLE = (
    Substitute(
        "mmcv.ops.roi_pool",
        "roi_pool",
        roi_pool,
        "RoIPoolFunction",
        part="RoIPool, roi_pool",
        by="truncdet.roi_pool",
    ),
    Substitute(
        "mmcv.ops.roi_align_rotated",
        "roi_align_rotated",
        roi_align_rotated,
        "RoIAlignRotatedFunction",
        part="RoIAlignRotated, roi_align_rotated",
        by="truncdet.roi_align_rotated",
    ),
    Substitute(
        "mmcv.ops.deform_conv",
        "deform_conv2d",
        deform_conv2d,
        "DeformConv2dFunction",
        part="DeformConv2d, deform_conv2d, SAConv2d",
        tier=CONVOLVED,
        by="truncdet.deform_conv2d",
    ),
    Substitute(
        "mmcv.ops.modulated_deform_conv",
        "modulated_deform_conv2d",
        modulated_deform_conv2d,
        "ModulatedDeformConv2dFunction",
        part="ModulatedDeformConv2d, modulated_deform_conv2d",
        tier=CONVOLVED,
        by="truncdet.deform_conv2d",
    ),
    Substitute(
        "mmcv.ops.multi_scale_deform_attn",
        "",
        ms_deform_attn,
        "MultiScaleDeformableAttnFunction",
        part="MultiScaleDeformableAttention",
        by="truncdet.ms_deform_attn",
    ),
    Substitute(
        "mmcv.ops.multi_scale_deform_attn",
        "multi_scale_deformable_attn_pytorch",
        ms_deform_attn_pytorch,
        part="multi_scale_deformable_attn_pytorch",
        by="truncdet.ms_deform_attn",
    ),
    Substitute(
        "mmcv.ops.scatter_points",
        "dynamic_scatter",
        dynamic_scatter,
        "_DynamicScatter",
        part="DynamicScatter, dynamic_scatter",
        tier=SUMMED,
        by="truncdet.dynamic_scatter",
    ),
    NMS,
)
