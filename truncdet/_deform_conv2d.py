"""deform_conv2d and DeformConv2d: the public function and the module.

The operator is in _deform_chunks.py, its definition there and in _deform_sample_reference.py.

Offsets and masks lie as they do in torchvision, mmcv and detectron2: for each group and tap a plane
of y and one of x. Values and gradients are torchvision's. mmcv differs for a coordinate that is
exactly -1, where its derivative by the offset is 0 and not one-sided. Offsets that are NaN lead the
CPU kernels of torchvision and mmcv out of bounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import init

from truncdet import _deform_chunks as _deform_chunks  # registers the operator used here
from truncdet._deform_conv2d_arguments import Step, check_shapes, check_tensors, pair


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Step = (1, 1),
    padding: Step = (0, 0),
    dilation: Step = (1, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Convolves with a kernel whose taps are moved, and with `mask` weighted, place by place.

    A drop-in for `torchvision.ops.deform_conv2d`, for any batch size; without `mask` deformable
    convolution, with it the modulated one of the second version. The input's gradient is
    accumulated in fixed point (see `truncdet.fixedpoint`) and those of offset and mask are summed
    in a fixed order, so that the bits repeat run to run. The matrix products with the weight, and
    the gradients of weight and bias, are the vendor library's: they repeat on one GPU model with
    one library (`truncdet.enable` sets what that takes), not across devices, and an image may see
    the rest of its batch in their last bits.

    Example:
        >>> input, weight = torch.arange(9.0).reshape(1, 1, 3, 3), torch.ones(1, 1, 1, 1)
        >>> half_a_cell_right = torch.tensor([0.0, 0.5]).reshape(1, 2, 1, 1).expand(1, 2, 3, 3)
        >>> truncdet.deform_conv2d(input, half_a_cell_right, weight)
        tensor([[[[0.5000, 1.5000, 1.0000],
                  [3.5000, 4.5000, 2.5000],
                  [6.5000, 7.5000, 4.0000]]]])

    Args:
        input: [N, C, H, W]; float64, float32, float16 or bfloat16, as all other tensors. Under
            autocast all are cast to float32 and the output back to input's dtype, as torchvision
            does on CUDA.
        offset: [N, G * KH * KW * 2, OH, OW] in cells: for each of G groups of input's channels and
            each tap, row by row, one plane of offsets along y and one along x.
        weight: [O, C / groups, KH, KW].
        bias: [O], or None.
        stride: input cells an output place, an int or (rows, columns).
        padding: rows and columns of zeros around the input, an int or (rows, columns).
        dilation: cells between taps, an int or (rows, columns).
        mask: [N, G * KH * KW, OH, OW], what samples are multiplied with, or None for ones.

    Returns:
        [N, O, OH, OW] of input's dtype, contiguous. A sample is 0 if one of its coordinates is at
        or below -1, or at or above the size of the map, and otherwise NaN where an offset is NaN.
        Let g be the gradient of the columns, which is weight^T times that of the output; A and B
        the image's largest finite magnitudes of mask (A = 1 without) and of g; S the exact sum of
        the contributions of one cell of input's gradient, n their number, and
        T = ceil(log2(KH * KW * OH * OW)). Then |R - S| <= n * 2 A B 2^(T - 62) + 2^-24 |R| for
        float32 (2^-11 for float16, 2^-8 for bfloat16); for float64 n * 2 A B 2^(2 T - 124) +
        2^-53 |R|.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a shape, a number or a device does not fit.
        TruncdetError: a second derivative is asked for.

    Besides its result the backward allocates the columns of a chunk of images, C * KH * KW * OH *
    OW elements an image and at most 2^26 in all unless one image has more, the chunk's part of the
    output's gradient, and 8.5 bytes a cell of the chunk's input (16.5 for float64).
    Formula: Dai et al., "Deformable Convolutional Networks", ICCV 2017; Zhu et al., "Deformable
    ConvNets v2", CVPR 2019.
    """
    tensors = {"input": input, "offset": offset, "weight": weight, "mask": mask, "bias": bias}
    if isinstance(input, Tensor) and _autocasts(input):
        tensors = {name: _to_float32(x) for name, x in tensors.items()}
    check_tensors(tensors)
    steps = (pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1))
    check_shapes(input, offset, weight, bias, mask, *steps)
    x, moved, kernel, masks, biases = tensors.values()
    result: Tensor = torch.ops.truncdet.deform_conv2d(x, kernel, moved, masks, biases, *steps)
    return result.to(input.dtype)


def _autocasts(input: Tensor) -> bool:
    device = input.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _to_float32(x: Tensor | None) -> Tensor | None:
    # Autocast leaves float64 alone.
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.half, torch.bfloat16) else x


class DeformConv2d(nn.Module):
    """`deform_conv2d` as a module, with torchvision's constructor, parameters and initial values.

    Example:
        >>> convolution = truncdet.DeformConv2d(4, 6, kernel_size=3, padding=1)
        >>> convolution(torch.randn(2, 4, 8, 8), torch.zeros(2, 18, 8, 8)).shape
        torch.Size([2, 6, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Step,
        stride: Step = 1,
        padding: Step = 0,
        dilation: Step = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if groups < 1 or channels % groups != 0:
                raise ValueError(
                    f"deform_conv2d: {name} must be divisible by groups, got {channels} and "
                    f"{groups}"
                )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        self.stride = pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)
        self.dilation = pair("dilation", dilation, 1)
        self.groups = groups
        self.weight = nn.Parameter(
            torch.empty(out_channels, in_channels // groups, *self.kernel_size)
        )
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new initial values, as `torch.nn.Conv2d` does."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `deform_conv2d`."""
        return deform_conv2d(
            input,
            offset,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            mask,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}"
        )
