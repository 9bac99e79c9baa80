"""RoI pooling whose gradient repeats bit for bit: schema, autograd and the public function.

The maths and the plain-tensor reference are in _roi_pool_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from truncdet import _roi_pool_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._roi_align_reference import empty_gradient
from truncdet._roi_autograd import remember_input
from truncdet._roi_boxes import call, check_features, check_same_device, prepare_boxes
from truncdet._sticky import raise_pending

_BINS = "SymInt pooled_height, SymInt pooled_width, float spatial_scale, bool rounded"
for _schema in (
    f"roi_pool(Tensor input, Tensor boxes, {_BINS}) -> (Tensor, Tensor)",
    "roi_pool_backward(Tensor grad, Tensor argmax, Tensor boxes, SymInt images, SymInt channels, "
    f"SymInt height, SymInt width, {_BINS}, bool channels_last) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("roi_pool", reference.forward, "CompositeExplicitAutograd")
LIB.impl("roi_pool_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::roi_pool", lib=LIB)
def _fake_forward(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, *_: Any
) -> tuple[Tensor, Tensor]:
    check_same_device(input, boxes, "roi_pool")
    shape = (boxes.shape[0], input.shape[1], pooled_height, pooled_width)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("truncdet::roi_pool_backward", lib=LIB)
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
    check_same_device(grad, boxes, "roi_pool")
    return empty_gradient(grad, (images, channels, height, width), rest[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, boxes, *ctx.arguments = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(boxes, output[1])
    remember_input(ctx, input)


def _backward(ctx: Any, grad: Tensor, _argmax: Any) -> tuple[Tensor | None, ...]:
    boxes, argmax = ctx.saved_tensors
    gradient = torch.ops.truncdet.roi_pool_backward(
        grad, argmax, boxes, *ctx.shape, *ctx.arguments, ctx.channels_last
    )
    return gradient, None, None, None, None, None


torch.library.register_autograd(
    "truncdet::roi_pool", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::roi_pool_backward", without_second_derivative("roi_pool"), lib=LIB
)


def roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    rounded: bool = True,
) -> Tensor:
    """Takes the largest cell of every bin of every region of interest; the gradient's bits repeat.

    A drop-in for `torchvision.ops.roi_pool` and, with `rounded=False`, for `mmcv.ops.roi_pool`. The
    gradient of a bin goes to the cell it chose, and the gradient of `input` is accumulated in fixed
    point (see `truncdet.fixedpoint`): the same bits run to run, on CPU and GPU, whatever the order
    of the RoIs, and for one image whatever else is in the batch. Boxes receive no gradient.

    Example:
        >>> x = torch.arange(12.0).reshape(1, 1, 3, 4).requires_grad_()
        >>> boxes = torch.tensor([[0.0, 0.0, 0.0, 3.0, 2.0], [0.0, 2.0, 1.0, 3.0, 2.0]])
        >>> truncdet.roi_pool(x, boxes, 1).flatten()
        tensor([11., 11.], grad_fn=<ViewBackward0>)
        >>> truncdet.roi_pool(x, boxes, 1).sum().backward()
        >>> x.grad[0, 0, 2]
        tensor([0., 0., 0., 2.])

    Args:
        input: features [N, C, H, W]; float64, float32, float16 or bfloat16; contiguous or
            channels_last without a copy.
        boxes: [K, 5] rows of (batch index, x1, y1, x2, y2), or a list of tensors [L, 4] of
            (x1, y1, x2, y2), one an image (images past its end have none), in pixels of the image
            that `spatial_scale` maps to the features. Of any floating dtype; coordinates are used
            in float32, or float64 for float64 features.
        output_size: bins, an int or (PH, PW), NumPy's kinds included.
        spatial_scale: features' pixels per image pixel.
        rounded: round the corners to cells first, both of them inside the RoI, as torchvision does.
            False: the RoI goes from x1 to x2 + 1 in image pixels and only the edges of bins are
            rounded, as in mmcv; a RoI without area then gives zeros without a gradient.

    Returns:
        [K, C, PH, PW] of the features' dtype, contiguous: torchvision's values (those of its CPU
        operator, where it takes the dtypes). Of equal cells the first one, row by row, is chosen. A
        bin outside the map, and a RoI with a NaN or infinite coordinate, gives 0 without a
        gradient. NaN is never chosen, and neither is what is not above -3.4e38, the lowest float32
        number: a bin of nothing else is that number (-inf in float16 and bfloat16), without a
        gradient. With S the exact sum of the n gradients that reach a cell, amax the image's
        largest finite gradient magnitude and G = ceil(log2(its RoIs times PH times PW)):
        |R - S| <= n * amax * 2^(G - 62) + 2^-24 |R| for float32 (2^-11 for float16, 2^-8 for
        bfloat16); for float64 n * amax * 2^(2 G - 124) + 2^-53 |R|.

    Raises:
        ValueError: if an argument has a wrong shape or value; on the CPU also for a batch index
            outside the batch.
        TypeError: if an argument has a wrong type or dtype.
        TruncdetError: if an earlier call met an out-of-range index on a GPU (see `check`), or a
            second derivative is asked for.

    Formula: Girshick, "Fast R-CNN", ICCV 2015.
    """
    raise_pending()
    bins = check_features("roi_pool", input, output_size, spatial_scale)
    rois = prepare_boxes(input, boxes, "roi_pool")
    out: Tensor
    arguments = (*bins, float(spatial_scale), bool(rounded))
    out, _ = call(torch.ops.truncdet.roi_pool, input, rois, *arguments, op="roi_pool")
    return out


class RoIPool(nn.Module):
    """`roi_pool` as a module, with torchvision's constructor and `rounded`.

    Example:
        >>> pool = truncdet.RoIPool(7, spatial_scale=0.25)
        >>> pool(torch.randn(1, 8, 16, 16), [torch.tensor([[0.0, 0.0, 40.0, 40.0]])]).shape
        torch.Size([1, 8, 7, 7])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float = 1.0,
        rounded: bool = True,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.rounded = rounded

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:
        """See `roi_pool`."""
        return roi_pool(input, rois, self.output_size, self.spatial_scale, self.rounded)

    def extra_repr(self) -> str:
        rule = "" if self.rounded else ", rounded=False"
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}{rule}"
