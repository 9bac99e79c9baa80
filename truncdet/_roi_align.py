"""RoIAlign whose gradient repeats bit for bit: schema, autograd and the public function.

The maths and the plain-tensor reference are in _roi_align_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _roi_align_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._roi_align_max import roi_align_max
from truncdet._roi_autograd import remember_input
from truncdet._roi_boxes import call, check_arguments, check_same_device, prepare_boxes
from truncdet._sticky import raise_pending

LIB.define(
    "roi_align(Tensor input, Tensor boxes, SymInt pooled_height, SymInt pooled_width, "
    "float spatial_scale, int sampling_ratio, bool aligned) -> Tensor"
)
LIB.define(
    "roi_align_backward(Tensor grad, Tensor boxes, SymInt images, SymInt channels, SymInt height, "
    "SymInt width, SymInt pooled_height, SymInt pooled_width, float spatial_scale, "
    "int sampling_ratio, bool aligned, bool channels_last) -> Tensor"
)
LIB.impl("roi_align", reference.forward, "CompositeExplicitAutograd")
LIB.impl("roi_align_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::roi_align", lib=LIB)
def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, *_: Any
) -> Tensor:
    check_same_device(input, boxes)
    return input.new_empty(boxes.shape[0], input.shape[1], pooled_height, pooled_width)


@torch.library.register_fake("truncdet::roi_align_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, boxes: Tensor, images: int, channels: int, height: int, width: int, *rest: Any
) -> Tensor:
    check_same_device(grad, boxes)
    return reference.empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, boxes, *ctx.arguments = inputs
    ctx.save_for_backward(boxes)
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (boxes,) = ctx.saved_tensors
    gradient = torch.ops.truncdet.roi_align_backward(
        grad, boxes, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, None, None, None, None, None, None


torch.library.register_autograd(
    "truncdet::roi_align", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::roi_align_backward", without_second_derivative("roi_align"), lib=LIB
)


def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    pool_mode: str = "avg",
) -> Tensor:
    """Pools every region of interest to a grid of bins by bilinear sampling; bits repeat.

    A drop-in for `torchvision.ops.roi_align`. The gradient of `input` is accumulated in fixed point
    (see `truncdet.fixedpoint`): the same bits run to run, on CPU and GPU, whatever the order of the
    RoIs, and for one image whatever else is in the batch. Boxes receive no gradient.

    Example:
        >>> features = torch.randn(2, 16, 32, 32, requires_grad=True)
        >>> boxes = torch.tensor([[0, 4.0, 4.0, 20.0, 24.0], [1, 0.0, 0.0, 31.0, 31.0]])
        >>> truncdet.roi_align(features, boxes, 7, aligned=True).shape
        torch.Size([2, 16, 7, 7])

    Args:
        input: features [N, C, H, W]; float64, float32, float16 or bfloat16; contiguous or
            channels_last without a copy.
        boxes: [K, 5] rows of (batch index, x1, y1, x2, y2), or a list of tensors [L, 4] of
            (x1, y1, x2, y2), one an image (images past its end have none), in pixels of the image
            that `spatial_scale` maps to the features. Of any floating dtype; coordinates are used
            in float32, or float64 for float64 features.
        output_size: bins, an int or (PH, PW), NumPy's kinds included.
        spatial_scale: features' pixels per image pixel.
        sampling_ratio: samples a bin and axis, at most 32768; 0 or less: ceil(RoI size / bins).
        aligned: shift by half a pixel, so that pixel centres are at integer coordinates + 0.5.
        pool_mode: 'avg', or 'max' for the largest sample of a bin: mmcv's within 1e-5 of the
            largest feature, but on purpose not where its start at -10000 shows. A bin without
            samples is -10000 there and 0 here, a bin of samples below -10000 is -10000 there, and
            NaN samples, skipped there, make the bin NaN here.

    Returns:
        [K, C, PH, PW] of the features' dtype, contiguous. A RoI with a NaN or infinite coordinate
        gives zeros and receives no gradient.

    Raises:
        ValueError: if an argument has a wrong shape or value; on the CPU also for a batch index
            outside the batch.
        TypeError: if an argument has a wrong type or dtype.
        TruncdetError: if an earlier call met an out-of-range index on a GPU (see `check`), or a
            second derivative is asked for.

    The sum of a cell is exact to n * amax * 2^(G - 62) + 2^-24 |R| (float32) with n contributions,
    amax the image's largest gradient magnitude and 2^G at least its RoIs times the bins.
    Formula: He et al., "Mask R-CNN", ICCV 2017.
    """
    raise_pending()
    bins, ratio = check_arguments(input, output_size, spatial_scale, sampling_ratio, pool_mode)
    rois = prepare_boxes(input, boxes)
    if pool_mode == "max":
        return roi_align_max(input, rois, bins, float(spatial_scale), ratio, aligned)
    out: Tensor = call(
        torch.ops.truncdet.roi_align,
        input,
        rois,
        bins[0],
        bins[1],
        float(spatial_scale),
        ratio,
        aligned,
    )
    return out


class RoIAlign(nn.Module):
    """`roi_align` as a module, with torchvision's constructor and `pool_mode`.

    Example:
        >>> pool = truncdet.RoIAlign(7, spatial_scale=0.25, sampling_ratio=2)
        >>> pool(torch.randn(1, 8, 16, 16), [torch.tensor([[0.0, 0.0, 40.0, 40.0]])]).shape
        torch.Size([1, 8, 7, 7])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float = 1.0,
        sampling_ratio: int = -1,
        aligned: bool = False,
        pool_mode: str = "avg",
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned
        self.pool_mode = pool_mode

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:
        """See `roi_align`."""
        return roi_align(
            input,
            rois,
            self.output_size,
            self.spatial_scale,
            self.sampling_ratio,
            self.aligned,
            self.pool_mode,
        )

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}, "
            f"pool_mode={self.pool_mode!r}"
        )
