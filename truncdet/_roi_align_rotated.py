"""RoIAlign of rotated boxes whose gradient repeats bit for bit: schema, autograd, public function.

The maths and the plain-tensor reference are in _roi_align_rotated_reference.py, kernels in csrc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _roi_align_rotated_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._roi_align_reference import MAX_GRID, empty_gradient
from truncdet._roi_autograd import remember_input
from truncdet._roi_boxes import _index, _size
from truncdet._sticky import raise_pending
from truncdet.fixedpoint import FORMATS, compute_dtype

MAX_RATIO = 512
MAX_BINS = 1 << 19

_REST = "SymInt pooled_height, SymInt pooled_width, float spatial_scale, int sampling_ratio"
LIB.define(
    f"roi_align_rotated(Tensor input, Tensor rois, {_REST}, bool aligned, bool clockwise) -> Tensor"
)
LIB.define(
    "roi_align_rotated_backward(Tensor grad, Tensor rois, SymInt images, SymInt channels, "
    f"SymInt height, SymInt width, {_REST}, bool aligned, bool clockwise, bool channels_last) "
    "-> Tensor"
)
LIB.impl("roi_align_rotated", reference.forward, "CompositeExplicitAutograd")
LIB.impl("roi_align_rotated_backward", reference.backward, "CompositeExplicitAutograd")


def _check_same_device(values: Tensor, rois: Tensor) -> None:
    # Fake implementations also answer when one argument alone is on `meta`.
    if values.device != rois.device:
        raise RuntimeError(
            f"roi_align_rotated: rois must be on the device of the values, {values.device}, "
            f"got {rois.device}"
        )


@torch.library.register_fake("truncdet::roi_align_rotated", lib=LIB)
def _fake_forward(
    input: Tensor, rois: Tensor, pooled_height: int, pooled_width: int, *_: Any
) -> Tensor:
    _check_same_device(input, rois)
    return input.new_empty(rois.shape[0], input.shape[1], pooled_height, pooled_width)


@torch.library.register_fake("truncdet::roi_align_rotated_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, rois: Tensor, images: int, channels: int, height: int, width: int, *rest: Any
) -> Tensor:
    _check_same_device(grad, rois)
    return empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, rois, *ctx.arguments = inputs
    ctx.save_for_backward(rois)
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rois,) = ctx.saved_tensors
    gradient = torch.ops.truncdet.roi_align_rotated_backward(
        grad, rois, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, *(None,) * 7


torch.library.register_autograd(
    "truncdet::roi_align_rotated", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::roi_align_rotated_backward", without_second_derivative("roi_align_rotated"), lib=LIB
)


def roi_align_rotated(
    input: Tensor,
    rois: Tensor,
    output_size: int | Sequence[int],
    spatial_scale: float,
    sampling_ratio: int = 0,
    aligned: bool = True,
    clockwise: bool = False,
) -> Tensor:
    """Pools every rotated region of interest to a grid of bins by bilinear sampling; bits repeat.

    A drop-in for `mmcv.ops.roi_align_rotated` (with `torch.deg2rad` of the angles, also for that of
    detectron2). The gradient of `input` is accumulated in fixed point (see `truncdet.fixedpoint`):
    the same bits run to run, on CPU and GPU, whatever the order of the RoIs, and for one image
    whatever else is in the batch. RoIs receive no gradient.

    Example:
        >>> features = torch.randn(2, 16, 32, 32, requires_grad=True)
        >>> rois = torch.tensor([[0, 12.0, 14.0, 16.0, 8.0, 0.5], [1, 16.0, 16.0, 31.0, 9.0, -1.0]])
        >>> truncdet.roi_align_rotated(features, rois, 7, 1.0, sampling_ratio=2).shape
        torch.Size([2, 16, 7, 7])

    Args:
        input: features [N, C, H, W]; float64, float32, float16 or bfloat16; contiguous or
            channels_last without a copy.
        rois: [K, 6] rows of (batch index, centre x, centre y, width, height, angle), in pixels of
            the image that `spatial_scale` maps to the features, and radians. Of any floating dtype;
            used in float32, or float64 for float64 features.
        output_size: bins, an int or (PH, PW), NumPy's kinds included.
        spatial_scale: features' pixels per image pixel.
        sampling_ratio: samples a bin and axis, at most 512; 0 or less: ceil(RoI size / bins), at
            most 32768.
        aligned: shift by half a pixel, so that pixel centres are at integer coordinates + 0.5.
            False also makes RoIs at least one feature pixel wide and high.
        clockwise: angles turn clockwise as seen in the image, instead of counter-clockwise.

    Returns:
        [K, C, PH, PW] of the features' dtype, contiguous. A RoI with a NaN or infinite number, with
        an angle beyond 1647099 (2^20 quarter turns) or whose centre and sides add up to more than
        2^22 features' pixels gives zeros and receives no gradient. Sides below zero mirror the box
        if `sampling_ratio` is given, and leave it without samples otherwise, as on mmcv's GPUs.

    Raises:
        ValueError: if an argument has a wrong shape or value; on the CPU also for a batch index
            outside the batch.
        TypeError: if an argument has a wrong type or dtype.
        TruncdetError: if an earlier call met an out-of-range index on a GPU (see `check`), or a
            second derivative is asked for.

    The sum of a cell is exact to n * amax * 2^(G - 62) + 2^-24 |R| (float32) with n contributions,
    one a RoI, amax the image's largest gradient magnitude and 2^G at least its RoIs times the bins.
    Sines and cosines are the library's own, correct to 0.5 ulp and 2^-28 more in float32.
    Formula: Ma et al., "Arbitrary-Oriented Scene Text Detection via Rotation Proposals", IEEE
    Trans. Multimedia 20(11), 2018; He et al., "Mask R-CNN", ICCV 2017.
    """
    raise_pending()
    bins, ratio = _check(input, rois, output_size, spatial_scale, sampling_ratio)
    rows = rois.detach().to(compute_dtype(input.dtype))
    arguments = (*bins, float(spatial_scale), ratio, aligned, clockwise)
    result: Tensor
    if torch.compiler.is_compiling():
        result = torch.ops.truncdet.roi_align_rotated(input, rows, *arguments)
        return result
    try:
        result = torch.ops.truncdet.roi_align_rotated(input, rows, *arguments)
    except RuntimeError:
        # The compiled kernel cannot raise a ValueError; looking at the rows beforehand would break
        # tracing with fake tensors.
        if rows.is_cpu:
            reference.raise_outside(rows, len(input))
        raise
    return result


def _check(
    input: object, rois: object, output_size: Any, spatial_scale: float, sampling_ratio: int
) -> tuple[tuple[int, int], int]:
    """Checks all arguments; returns (PH, PW) and the sampling ratio as ints."""
    name = "roi_align_rotated"
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a Tensor, got {type(input).__name__}")
    if input.dim() != 4:
        raise ValueError(f"{name}: input must have shape [N, C, H, W], got {list(input.shape)}")
    if input.dtype not in FORMATS:
        raise TypeError(
            f"{name}: input must be float64, float32, float16 or bfloat16, got {input.dtype}"
        )
    if not isinstance(rois, Tensor):
        raise TypeError(f"{name}: rois must be a Tensor, got {type(rois).__name__}")
    if rois.dim() != 2 or rois.shape[1] != 6:
        raise ValueError(f"{name}: rois must have shape [K, 6], got {list(rois.shape)}")
    if not rois.is_floating_point():
        raise TypeError(f"{name}: rois must be floating point, got {rois.dtype}")
    if rois.device != input.device:
        raise ValueError(f"{name}: rois must be on {input.device}, got {rois.device}")
    try:
        size = _size(name, output_size)
    except TypeError:
        raise TypeError(
            f"{name}: output_size must be an int or two of them, got {type(output_size).__name__}"
        ) from None
    if len(size) != 2 or not all(0 < n <= MAX_GRID and int(n) == n for n in size):
        raise ValueError(
            f"{name}: output_size must be one or two ints in [1, {MAX_GRID}], got {output_size}"
        )
    if size[0] * size[1] > MAX_BINS:
        raise ValueError(f"{name}: output_size must have at most {MAX_BINS} bins, got {size}")
    # Comparisons alone, which a compiler with symbolic numbers can trace; false for NaN.
    if not 0 < spatial_scale < math.inf:
        raise ValueError(f"{name}: spatial_scale must be positive and finite, got {spatial_scale}")
    ratio = _index(sampling_ratio)
    if ratio is None:
        raise TypeError(
            f"{name}: sampling_ratio must be an int, got {type(sampling_ratio).__name__}"
        )
    if ratio > MAX_RATIO:
        raise ValueError(
            f"{name}: sampling_ratio must be at most {MAX_RATIO}, got {sampling_ratio}"
        )
    return (int(size[0]), int(size[1])), ratio


class RoIAlignRotated(nn.Module):
    """`roi_align_rotated` as a module, with mmcv's constructor.

    Example:
        >>> pool = truncdet.RoIAlignRotated(7, spatial_scale=0.25, sampling_ratio=2)
        >>> pool(torch.randn(1, 8, 16, 16), torch.tensor([[0.0, 30, 32, 40, 12, 0.7]])).shape
        torch.Size([1, 8, 7, 7])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float,
        sampling_ratio: int = 0,
        aligned: bool = True,
        clockwise: bool = False,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned
        self.clockwise = clockwise

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        """See `roi_align_rotated`."""
        return roi_align_rotated(
            input,
            rois,
            self.output_size,
            self.spatial_scale,
            self.sampling_ratio,
            self.aligned,
            self.clockwise,
        )

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}, "
            f"clockwise={self.clockwise}"
        )
