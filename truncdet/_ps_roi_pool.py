"""Position-sensitive RoI pooling whose gradient repeats bit for bit.

Every bin has input channels of its own: output channel c of bin (p, q) is the mean of the bin's
cells of input channel (c * PH + p) * PW + q. The bins are those of _roi_pool_reference.py by the
rule HALF_OPEN; in the forward alone, as in torchvision, no bin has the map's last row and column:

    output[c, p, q]                 = (sum of f[y, x] over the cells, row by row) / their number
    gradient[(c * PH + p) * PW + q] = g[c, p, q] / the number of cells  for each RoI
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    check_same_device,
    check_sensitive,
    prepare_boxes,
)
from truncdet._roi_pool_reference import HALF_OPEN, pool_bins
from truncdet._roi_sums import Sums
from truncdet._sticky import PS_ROI_POOL, raise_pending

_BINS = "SymInt pooled_height, SymInt pooled_width, float spatial_scale"
for _schema in (
    f"ps_roi_pool(Tensor input, Tensor boxes, {_BINS}) -> Tensor",
    "ps_roi_pool_backward(Tensor grad, Tensor boxes, SymInt images, SymInt channels, "
    f"SymInt height, SymInt width, {_BINS}, bool channels_last) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _cells(
    boxes: Tensor,
    images: int,
    cells: tuple[int, int],
    bins: tuple[int, int],
    scale: float,
    missing: int,
) -> Iterator[tuple[int, int, int, slice, slice]]:
    """RoI k, bin (p, q) and its rows and columns, without the last `missing` ones of the map."""
    axes = pool_bins(boxes, images, cells, bins, scale, HALF_OPEN)
    ranges = [
        torch.stack(axis.ranges(number, size - missing), 2).tolist()
        for axis, number, size in zip(axes, bins, cells, strict=True)
    ]
    for k in range(len(boxes)):
        for p in range(bins[0]):
            for q in range(bins[1]):
                rows, columns = slice(*ranges[0][k][p]), slice(*ranges[1][k][q])
                if rows.start < rows.stop and columns.start < columns.stop:
                    yield k, p, q, rows, columns


def forward_reference(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> Tensor:
    """Output [K, C / (PH * PW), PH, PW] of input [N, C, H, W] and boxes [K, 5]."""
    images, channels, height, width = input.shape
    bins = (pooled_height, pooled_width)
    align.check_batch_indices(boxes, images, "ps_roi_pool", PS_ROI_POOL)
    image = align.image_of(boxes, images)
    planes = input.reshape(images, channels // (bins[0] * bins[1]), *bins, height, width)
    dtype = fixedpoint.compute_dtype(input.dtype)
    out = input.new_zeros(len(boxes), planes.shape[1], *bins, dtype=dtype)
    for k, p, q, rows, columns in _cells(boxes, images, (height, width), bins, spatial_scale, 1):
        values = planes[image[k], :, p, q, rows, columns].to(dtype).flatten(1)
        total = torch.zeros_like(out[k, :, p, q])
        for value in values.unbind(1):
            total = total + value
        out[k, :, p, q] = total / torch.full_like(total, values.shape[1])
    return align.narrow(out, input.dtype)


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
    channels_last: bool,
) -> Tensor:
    """Gradient [N, C, H, W] of grad [K, C / (PH * PW), PH, PW], accumulated in fixed point."""
    bins, cells = (pooled_height, pooled_width), (height, width)
    align.check_batch_indices(boxes, images, "ps_roi_pool", PS_ROI_POOL)
    values = grad.to(fixedpoint.compute_dtype(grad.dtype))
    out = align.empty_gradient(grad, (images, channels, height, width), channels_last)
    number = torch.arange(channels * height * width, device=grad.device)
    number = number.reshape(channels // (bins[0] * bins[1]), *bins, height, width)
    for image, own in align.rois_by_image(align.image_of(boxes, images), out):
        sums = Sums(out.shape[1:], values[own], 1)
        for k, p, q, rows, columns in _cells(boxes[own], images, cells, bins, spatial_scale, 0):
            place = number[:, p, q, rows, columns].flatten(1)
            raw = values[own[k], :, p, q]
            scaled = sums.scaled(raw)
            share = scaled / torch.full_like(scaled, place.shape[1])
            spread = (x[:, None].expand_as(place).flatten() for x in (share, raw))
            sums.add(place.flatten(), *spread)
        out[image] = sums.finish(out.dtype)
    return out


LIB.impl("ps_roi_pool", forward_reference, "CompositeExplicitAutograd")
LIB.impl("ps_roi_pool_backward", backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::ps_roi_pool", lib=LIB)
def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, _scale: float
) -> Tensor:
    check_same_device(input, boxes, "ps_roi_pool")
    channels = input.shape[1] // (pooled_height * pooled_width)
    return input.new_empty(boxes.shape[0], channels, pooled_height, pooled_width)


@torch.library.register_fake("truncdet::ps_roi_pool_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, boxes: Tensor, images: int, channels: int, height: int, width: int, *rest: Any
) -> Tensor:
    check_same_device(grad, boxes, "ps_roi_pool")
    return align.empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, *ctx.arguments = inputs
    ctx.save_for_backward(boxes)
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (boxes,) = ctx.saved_tensors
    gradient = torch.ops.truncdet.ps_roi_pool_backward(
        grad, boxes, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, None, None, None, None


torch.library.register_autograd(
    "truncdet::ps_roi_pool", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::ps_roi_pool_backward", without_second_derivative("ps_roi_pool"), lib=LIB
)


def ps_roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """Takes the mean of every bin of every region of interest in channels of its own; bits repeat.

    A drop-in for `torchvision.ops.ps_roi_pool`: output channel c of bin (p, q) is a mean of input
    channel (c * PH + p) * PW + q. The gradient of `input` is accumulated in fixed point (see
    `truncdet.fixedpoint`): the same bits run to run, on CPU and GPU, whatever the order of the
    RoIs, and for one image whatever else is in the batch. Boxes receive no gradient.

    As in torchvision the forward leaves the map's last row and column out of every bin, while the
    gradient is shared out among all of a bin's cells, those included: where a bin reaches them it
    is not the derivative of the forward, here as there.

    Example:
        >>> x = torch.arange(32.0).reshape(1, 2, 4, 4)
        >>> truncdet.ps_roi_pool(x, torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]]), (2, 1))
        tensor([[[[ 0.5000],
                  [20.5000]]]])

    Args:
        input: features [N, C, H, W], C a multiple of PH * PW; float64, float32, float16 or
            bfloat16.
        boxes: [K, 5] rows of (batch index, x1, y1, x2, y2), or a list of tensors [L, 4] of
            (x1, y1, x2, y2), one an image (images past its end have none), in pixels of the image
            that `spatial_scale` maps to the features. Of any floating dtype; coordinates are used
            in float32, or float64 for float64 features. Corners are rounded to cells, the second
            one outside the RoI, which has at least one cell.
        output_size: bins, an int or (PH, PW), NumPy's kinds included.
        spatial_scale: features' pixels per image pixel.

    Returns:
        [K, C / (PH * PW), PH, PW] of the features' dtype, contiguous: the values of torchvision's
        CPU operator, where it takes the dtypes. A bin outside the map, and a RoI with a NaN or
        infinite coordinate, gives 0 and receives no gradient; a NaN among a bin's cells makes it
        NaN. With S the exact sum of the n contributions of a cell, amax the image's largest finite
        gradient magnitude and G = ceil(log2(its RoIs)): |R - S| <= n * amax * 2^(G - 62) +
        2^-24 |R| for float32 (2^-11 for float16, 2^-8 for bfloat16); for float64 n * amax *
        2^(2 G - 124) + 2^-53 |R|.

    Raises:
        ValueError: if an argument has a wrong shape or value; on the CPU also for a batch index
            outside the batch.
        TypeError: if an argument has a wrong type or dtype.
        TruncdetError: if an earlier call met an out-of-range index on a GPU (see `check`), or a
            second derivative is asked for.

    Formula: Dai et al., "R-FCN", NIPS 2016.
    """
    raise_pending()
    bins = check_features("ps_roi_pool", input, output_size, spatial_scale)
    check_sensitive("ps_roi_pool", input, bins)
    rois = prepare_boxes(input, boxes, "ps_roi_pool")
    arguments = (*bins, float(spatial_scale))
    out: Tensor = call(torch.ops.truncdet.ps_roi_pool, input, rois, *arguments, op="ps_roi_pool")
    return out


class PSRoIPool(nn.Module):
    """`ps_roi_pool` as a module, with torchvision's constructor.

    Example:
        >>> pool = truncdet.PSRoIPool(3, spatial_scale=0.25)
        >>> pool(torch.randn(1, 18, 16, 16), [torch.tensor([[0.0, 0.0, 40.0, 40.0]])]).shape
        torch.Size([1, 2, 3, 3])
    """

    def __init__(self, output_size: int | Sequence[int], spatial_scale: float = 1.0) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:
        """See `ps_roi_pool`."""
        return ps_roi_pool(input, rois, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"
