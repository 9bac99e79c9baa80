"""The operators between which deform_conv2d has its matrix products: sampling, and its gradients.

Columns are [C, taps, N, places], the matrix that the weight multiplies. `geometry` is the size of
the kernel, stride, padding and dilation, rows before columns. The definition and the plain-tensor
reference are in _deform_sample_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet import _deform_sample_reference as reference
from truncdet._library import LIB

_TENSORS = "Tensor input, Tensor offset, Tensor? mask, int[] geometry"
for _schema in (
    f"_deform_sample({_TENSORS}) -> Tensor",
    f"_deform_sample_backward(Tensor grad, {_TENSORS}, bool input_gradient, bool offset_gradient) "
    "-> (Tensor, Tensor, Tensor)",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("_deform_sample", reference.forward, "CompositeExplicitAutograd")
LIB.impl("_deform_sample_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::_deform_sample", lib=LIB)
def _fake_forward(input: Tensor, offset: Tensor, _: Any, geometry: Sequence[int]) -> Tensor:
    places = offset.size(2) * offset.size(3)
    return input.new_empty((input.size(1), geometry[0] * geometry[1], input.size(0), places))


@torch.library.register_fake("truncdet::_deform_sample_backward", lib=LIB)
def _fake_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    geometry: Sequence[int],
    input_gradient: bool,
    offset_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty(input.shape if input_gradient else (0,)),
        offset.new_empty(offset.shape if offset_gradient else (0,)),
        offset.new_empty(mask.shape if offset_gradient and mask is not None else (0,)),
    )
