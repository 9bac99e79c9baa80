"""torchvision's operators beside RoIAlign: their layers, for `convert`, and their backward kernels.

A patch leaves their functions and forward kernels alone, which add nothing twice, and overrides the
kernels of their backwards; what those are given by the forwards (the cell of each maximum, the
channel of each bin) is what ours need. Calls that truncdet has no definition for keep the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported
from truncdet.integrations._patch import Kernel
from truncdet.integrations._substitute import Substitute

import truncdet
from truncdet.fixedpoint import FORMATS


def roi_pool(input: Tensor, boxes: Any, output_size: Any, spatial_scale: float = 1.0) -> Any:
    return truncdet.roi_pool(input, boxes, output_size, spatial_scale)


def ps_roi_align(
    input: Tensor,
    boxes: Any,
    output_size: Any,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
) -> Any:
    return truncdet.ps_roi_align(input, boxes, output_size, spatial_scale, sampling_ratio)


def ps_roi_pool(input: Tensor, boxes: Any, output_size: Any, spatial_scale: float = 1.0) -> Any:
    return truncdet.ps_roi_pool(input, boxes, output_size, spatial_scale)


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    mask: Tensor | None = None,
) -> Any:
    return truncdet.deform_conv2d(input, offset, weight, bias, stride, padding, dilation, mask)


TABLE = tuple(
    Substitute(f"torchvision.ops.{module}", compute.__name__, compute)
    for module, compute in (
        ("roi_pool", roi_pool),
        ("ps_roi_align", ps_roi_align),
        ("ps_roi_pool", ps_roi_pool),
        ("deform_conv", deform_conv2d),
    )
)


def roi_pool_backward(
    grad: Tensor,
    rois: Tensor,
    argmax: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> Tensor | None:
    """The cells are those that the forward chose, wherever it thought the RoIs were."""
    if not supported(grad, rois):
        return None
    # Ours gives nothing to cells outside a RoI, and torchvision's coordinates of half types are not
    # ours; so the RoIs are the whole maps.
    maps = _coordinates(grad, rois).clone()
    maps[:, 1:] = maps.new_tensor([0, 0, width, height])
    result: Tensor = torch.ops.truncdet.roi_pool_backward(
        grad,
        argmax,
        maps,
        *(batch_size, channels, height, width),
        *(pooled_height, pooled_width, 1.0),
        rounded=True,
        channels_last=False,
    )
    return result


def ps_roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    channel_mapping: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    *sizes: int,
) -> Tensor | None:
    """The channels of bins are known without `channel_mapping`."""
    if not supported(grad, rois):
        return None
    result: Tensor = torch.ops.truncdet.ps_roi_align_backward(
        grad,
        _coordinates(grad, rois),
        *sizes,
        *(pooled_height, pooled_width, spatial_scale, sampling_ratio),
        channels_last=False,
    )
    return result


def ps_roi_pool_backward(
    grad: Tensor,
    rois: Tensor,
    channel_mapping: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    *sizes: int,
) -> Tensor | None:
    """As `ps_roi_align_backward`."""
    if not supported(grad, rois):
        return None
    result: Tensor = torch.ops.truncdet.ps_roi_pool_backward(
        grad,
        _coordinates(grad, rois),
        *sizes,
        *(pooled_height, pooled_width, spatial_scale),
        channels_last=False,
    )
    return result


def _coordinates(grad: Tensor, rois: Tensor) -> Tensor:
    # torchvision's have the gradient's dtype; ours are float32, or float64 for double.
    return rois if grad.dtype == torch.float64 else rois.float()


def deform_conv2d_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    *numbers: Any,
) -> tuple[Tensor, ...] | None:
    *steps, _, _, use_mask = numbers  # the groups are in the shapes
    if not supported(grad, input, weight, offset, mask, bias):
        return None
    pairs = tuple(zip(steps[::2], steps[1::2], strict=True))
    moved: tuple[Tensor, ...] = torch.ops.truncdet.deform_conv2d_backward(
        grad, input, weight, offset, mask if use_mask else None, *pairs, [True] * 3 + [use_mask]
    )
    for_input, for_weight, for_offset, for_mask = moved
    if not use_mask:
        for_mask = torch.zeros_like(mask)
    return for_input, for_weight, for_offset, for_mask, grad.sum((0, 2, 3))


BACKWARDS: Mapping[str, Callable[..., Any]] = {
    "torchvision::_roi_pool_backward": roi_pool_backward,
    "torchvision::_ps_roi_align_backward": ps_roi_align_backward,
    "torchvision::_ps_roi_pool_backward": ps_roi_pool_backward,
    "torchvision::_deform_conv2d_backward": deform_conv2d_backward,
}


def kernels() -> tuple[Kernel, ...]:
    """The overrides of the kernels of this torchvision, which may be built for the CPU alone."""
    return tuple(
        Kernel(op, key, _kernel(compute), around=True)
        for op, compute in BACKWARDS.items()
        for key in ("CPU", "CUDA")
        if torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
    )


def _kernel(compute: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(original: Any, keys: Any, *args: Any) -> Any:
        result = compute(*args)
        return original.call_boxed(keys, *args) if result is None else result

    return kernel


def covers(op: str, grad_dtype: torch.dtype) -> bool:
    """Whether a call of this operator runs ours while the kernels are overridden."""
    return op in BACKWARDS and grad_dtype in FORMATS
