"""detectron2's own operators, in its arguments, on truncdet's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from truncdet.integrations import _deform
from truncdet.integrations._substitute import CONVOLVED, Substitute

import truncdet


def roi_align_rotated(
    input: Tensor, roi: Tensor, output_size: Any, spatial_scale: float, sampling_ratio: int
) -> Tensor | None:
    """Angles come in degrees, counter-clockwise, and pixel centres are at 0.5."""
    if roi.dim() != 2 or roi.size(1) != 6:
        return None
    # In double and rounded once, as in detectron2's kernel.
    radians = (roi[:, 5:].double() * math.pi / 180).to(roi.dtype)
    rois = torch.cat([roi[:, :5], radians], 1)
    result: Tensor = truncdet.roi_align_rotated(
        input, rois, output_size, spatial_scale, sampling_ratio, aligned=True, clockwise=False
    )
    return result


def deform_conv(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    im2col_step: int = 64,
) -> Tensor | None:
    """Any batch size is one step here."""
    return _deform.deform_conv2d(
        input, offset, weight, None, stride, padding, dilation, groups, deformable_groups
    )


def modulated_deform_conv(
    input: Tensor,
    offset: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deformable_groups: int = 1,
) -> Tensor | None:
    """Steps are the same in both axes in detectron2, and may differ here."""
    steps = (stride, padding, dilation)
    return _deform.deform_conv2d(
        input, offset, weight, bias, *steps, groups, deformable_groups, mask
    )


TABLE = (
    Substitute(
        "detectron2.layers.roi_align_rotated",
        "roi_align_rotated",
        roi_align_rotated,
        "_ROIAlignRotated",
        part="ROIAlignRotated, ROIPooler of rotated boxes",
        by="truncdet.roi_align_rotated",
    ),
    Substitute(
        "detectron2.layers.deform_conv",
        "deform_conv",
        deform_conv,
        "_DeformConv",
        needs="_C",
        part="DeformConv, deform_conv",
        tier=CONVOLVED,
        by="truncdet.deform_conv2d",
    ),
    Substitute(
        "detectron2.layers.deform_conv",
        "modulated_deform_conv",
        modulated_deform_conv,
        "_ModulatedDeformConv",
        needs="_C",
        part="ModulatedDeformConv, modulated_deform_conv",
        tier=CONVOLVED,
        by="truncdet.deform_conv2d",
    ),
)
