"""Deformable convolution in the arguments of mmcv's and detectron2's own functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import truncdet


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    deform_groups: int,
    mask: Tensor | None = None,
) -> Tensor | None:
    """Computes it, or returns None where the numbers of groups are not those of the shapes.

    truncdet reads both from the shapes; the original then says what is wrong.
    """
    if input.dim() != 4 or weight.dim() != 4 or offset.dim() != 4:
        return None
    taps = weight.shape[2:].numel()
    if input.size(1) != groups * weight.size(1) or offset.size(1) != 2 * taps * deform_groups:
        return None
    steps = (_pair(stride), _pair(padding), _pair(dilation))
    result: Tensor = truncdet.deform_conv2d(input, offset, weight, bias, *steps, mask)
    return result


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return rows, columns
