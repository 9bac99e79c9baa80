"""RoIAlign with max pooling, as in mmcv: schema, autograd and the call `roi_align` makes.

The maths and the plain-tensor reference are in _roi_align_max_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _roi_align_max_reference as reference
from truncdet import _roi_align_reference as average
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._roi_autograd import remember_input
from truncdet._roi_boxes import call, check_same_device

LIB.define(
    "roi_align_max(Tensor input, Tensor boxes, SymInt pooled_height, SymInt pooled_width, "
    "float spatial_scale, int sampling_ratio, bool aligned) -> (Tensor, Tensor)"
)
LIB.define(
    "roi_align_max_backward(Tensor grad, Tensor argmax, Tensor boxes, SymInt images, "
    "SymInt channels, SymInt height, SymInt width, SymInt pooled_height, SymInt pooled_width, "
    "float spatial_scale, int sampling_ratio, bool aligned, bool channels_last) -> Tensor"
)


LIB.impl("roi_align_max", reference.forward, "CompositeExplicitAutograd")
LIB.impl("roi_align_max_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::roi_align_max", lib=LIB)
def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, *_: Any
) -> tuple[Tensor, Tensor]:
    check_same_device(input, boxes)
    shape = (boxes.shape[0], input.shape[1], pooled_height, pooled_width)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("truncdet::roi_align_max_backward", lib=LIB)
def _fake_backward(
    grad: Tensor,
    argmax: Tensor,
    boxes: Tensor,
    images: int,
    channels: int,
    height: int,
    width: int,
    *rest: Any,
) -> Tensor:
    check_same_device(grad, boxes)
    return average.empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, boxes, *ctx.arguments = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(boxes, output[1])
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor, _argmax: Any) -> tuple[Tensor | None, ...]:
    boxes, argmax = ctx.saved_tensors
    gradient = torch.ops.truncdet.roi_align_max_backward(
        grad, argmax, boxes, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, None, None, None, None, None, None


torch.library.register_autograd(
    "truncdet::roi_align_max", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::roi_align_max_backward", without_second_derivative("roi_align"), lib=LIB
)


def roi_align_max(
    input: Tensor,
    boxes: Tensor,
    bins: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """`roi_align` with pool_mode='max'; boxes [K, 5] in the compute type."""
    out: Tensor
    out, _ = call(
        torch.ops.truncdet.roi_align_max,
        input,
        boxes,
        bins[0],
        bins[1],
        spatial_scale,
        sampling_ratio,
        aligned,
    )
    return out
