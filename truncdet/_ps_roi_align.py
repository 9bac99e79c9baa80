"""Position-sensitive RoIAlign whose gradient repeats bit for bit.

Every bin has input channels of its own: output channel c of bin (p, q) reads input channel
(c * PH + p) * PW + q. All else is RoIAlign with `aligned=True`, whose maths is in
_roi_align_reference.py:

    output[c, p, q]                  = sum over y of wy[p, y] * (sum over x of wx[q, x] * f[y, x])
    gradient[(c * PH + p) * PW + q]  = (wy[p, y] * wx[q, x]) * g[c, p, q]  for each RoI
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _roi_align_reference as align
from truncdet import fixedpoint
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._roi_autograd import remember_input
from truncdet._roi_boxes import (
    call,
    check_features,
    check_ratio,
    check_same_device,
    check_sensitive,
    prepare_boxes,
)
from truncdet._roi_sums import Sums
from truncdet._sticky import PS_ROI_ALIGN, raise_pending

_BINS = "SymInt pooled_height, SymInt pooled_width, float spatial_scale, int sampling_ratio"
for _schema in (
    f"ps_roi_align(Tensor input, Tensor boxes, {_BINS}) -> Tensor",
    "ps_roi_align_backward(Tensor grad, Tensor boxes, SymInt images, SymInt channels, "
    f"SymInt height, SymInt width, {_BINS}, bool channels_last) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def forward_reference(
    input: Tensor,
    boxes: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """Output [K, C / (PH * PW), PH, PW] of input [N, C, H, W] and boxes [K, 5]."""
    images, channels, *cells = input.shape
    bins = (pooled_height, pooled_width)
    align.check_batch_indices(boxes, images, "ps_roi_align", PS_ROI_ALIGN)
    roi = align.geometry(
        boxes, images, (cells[0], cells[1]), bins, spatial_scale, sampling_ratio, True
    )
    planes = input.reshape(images, channels // (bins[0] * bins[1]), *bins, *cells)
    return align.narrow(align.interpolate(planes, roi, bins), input.dtype)


def backward_reference(
    grad: Tensor,
    boxes: Tensor,
    images: int,
    channels: int,
    height: int,
    width: int,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C / (PH * PW), PH, PW], accumulated in fixed point."""
    bins, cells = (pooled_height, pooled_width), (height, width)
    align.check_batch_indices(boxes, images, "ps_roi_align", PS_ROI_ALIGN)
    roi = align.geometry(boxes, images, cells, bins, spatial_scale, sampling_ratio, True)
    wy, wx = align.both_axes(roi, bins, cells)
    values = grad.to(fixedpoint.compute_dtype(grad.dtype)).flatten(1)
    out = align.empty_gradient(grad, (images, channels, height, width), channels_last)
    number = torch.arange(channels * height * width, device=grad.device).reshape(
        channels, height, width
    )
    for image, own in align.rois_by_image(roi.image, out):
        sums = Sums(number.shape, values[own], 1)
        for k in own.tolist():
            rows, columns = wy[k].any(0).nonzero()[:, 0], wx[k].any(0).nonzero()[:, 0]
            for y in rows.tolist():
                weight = (wy[k, :, y, None, None] * wx[k][:, columns]).flatten(0, 1)
                weight = weight.repeat(channels // len(weight), 1)
                there = weight != 0
                raw = values[k][:, None].expand_as(weight)[there]
                contribution = weight[there] * sums.scaled(raw)
                sums.add(number[:, y, columns][there], contribution, raw)
        out[image] = sums.finish(out.dtype)
    return out


LIB.impl("ps_roi_align", forward_reference, "CompositeExplicitAutograd")
LIB.impl("ps_roi_align_backward", backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::ps_roi_align", lib=LIB)
def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, *_: Any
) -> Tensor:
    check_same_device(input, boxes, "ps_roi_align")
    channels = input.shape[1] // (pooled_height * pooled_width)
    return input.new_empty(boxes.shape[0], channels, pooled_height, pooled_width)


@torch.library.register_fake("truncdet::ps_roi_align_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, boxes: Tensor, images: int, channels: int, height: int, width: int, *rest: Any
) -> Tensor:
    check_same_device(grad, boxes, "ps_roi_align")
    return align.empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, *ctx.arguments = inputs
    ctx.save_for_backward(boxes)
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (boxes,) = ctx.saved_tensors
    gradient = torch.ops.truncdet.ps_roi_align_backward(
        grad, boxes, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, None, None, None, None, None


torch.library.register_autograd(
    "truncdet::ps_roi_align", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::ps_roi_align_backward", without_second_derivative("ps_roi_align"), lib=LIB
)


def ps_roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
) -> Tensor:
    """Samples every bin of every region of interest in channels of its own; bits repeat.

    A drop-in for `torchvision.ops.ps_roi_align`: RoIAlign with pixel centres at integer coordinates
    + 0.5 whose output channel c of bin (p, q) reads input channel (c * PH + p) * PW + q. The
    gradient of `input` is accumulated in fixed point (see `truncdet.fixedpoint`): the same bits run
    to run, on CPU and GPU, whatever the order of the RoIs, and for one image whatever else is in
    the batch. Boxes receive no gradient.

    Example:
        >>> features = torch.randn(2, 5 * 7 * 7, 32, 32, requires_grad=True)
        >>> boxes = torch.tensor([[0, 4.0, 4.0, 20.0, 24.0], [1, 0.0, 0.0, 31.0, 31.0]])
        >>> truncdet.ps_roi_align(features, boxes, 7).shape
        torch.Size([2, 5, 7, 7])

    Args:
        input: features [N, C, H, W], C a multiple of PH * PW; float64, float32, float16 or
            bfloat16.
        boxes: [K, 5] rows of (batch index, x1, y1, x2, y2), or a list of tensors [L, 4] of
            (x1, y1, x2, y2), one an image (images past its end have none), in pixels of the image
            that `spatial_scale` maps to the features. Of any floating dtype; coordinates are used
            in float32, or float64 for float64 features.
        output_size: bins, an int or (PH, PW), NumPy's kinds included.
        spatial_scale: features' pixels per image pixel.
        sampling_ratio: samples a bin and axis, at most 32768; 0 or less: ceil(RoI size / bins).

    Returns:
        [K, C / (PH * PW), PH, PW] of the features' dtype, contiguous, within 1e-5 of the largest
        feature of torchvision's. A RoI with a NaN or infinite coordinate, and one without area
        where `sampling_ratio` is not positive (NaN in torchvision), gives zeros and receives no
        gradient. With S the exact sum of the n contributions of a cell, amax the image's largest
        finite gradient magnitude and G = ceil(log2(its RoIs)): |R - S| <= n * amax * 2^(G - 62) +
        2^-24 |R| for float32 (2^-11 for float16, 2^-8 for bfloat16); for float64 n * amax *
        2^(2 G - 124) + 2^-53 |R|.

    Raises:
        ValueError: if an argument has a wrong shape or value; on the CPU also for a batch index
            outside the batch.
        TypeError: if an argument has a wrong type or dtype.
        TruncdetError: if an earlier call met an out-of-range index on a GPU (see `check`), or a
            second derivative is asked for.

    Formula: Li et al., "Light-Head R-CNN", 2017, arXiv:1711.07264.
    """
    raise_pending()
    bins = check_features("ps_roi_align", input, output_size, spatial_scale)
    check_sensitive("ps_roi_align", input, bins)
    ratio = check_ratio("ps_roi_align", sampling_ratio)
    rois = prepare_boxes(input, boxes, "ps_roi_align")
    arguments = (*bins, float(spatial_scale), ratio)
    out: Tensor = call(torch.ops.truncdet.ps_roi_align, input, rois, *arguments, op="ps_roi_align")
    return out


class PSRoIAlign(nn.Module):
    """`ps_roi_align` as a module, with torchvision's constructor.

    Example:
        >>> pool = truncdet.PSRoIAlign(3, spatial_scale=0.25, sampling_ratio=2)
        >>> pool(torch.randn(1, 18, 16, 16), [torch.tensor([[0.0, 0.0, 40.0, 40.0]])]).shape
        torch.Size([1, 2, 3, 3])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float = 1.0,
        sampling_ratio: int = -1,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:
        """See `ps_roi_align`."""
        return ps_roi_align(input, rois, self.output_size, self.spatial_scale, self.sampling_ratio)

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}"
        )
