"""The gradients of embedding tables, from aten's arguments to truncdet's.

An index out of range, which the forward has reported, reaches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported

from truncdet._divide import divide
from truncdet._embedding import weight_gradient
from truncdet._embedding_bag import MEAN, SUM, table_gradient

_MAX = 2
_INDICES = (torch.int64, torch.int32)


def embedding(
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor | None:
    """In the arguments of `aten::embedding_dense_backward`."""
    if not (supported(grad_output) and _indexes(indices, grad_output) and grad_output.dim() > 0):
        return None
    width = grad_output.size(-1)
    if grad_output.numel() != indices.numel() * width or num_weights < 0:
        return None
    flat = grad_output.reshape(indices.numel(), width)
    total = weight_gradient(flat, indices.reshape(-1), num_weights, padding_idx, scale_grad_by_freq)
    return divide(total, None, grad_output.dtype)


def embedding_bag(
    grad: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor | None:
    """In the arguments of `aten::_embedding_bag_dense_backward`."""
    if not supported(grad, *([] if per_sample_weights is None else [per_sample_weights])):
        return None
    if grad.dim() != 2 or num_weights < 0 or not _indexes(indices, grad):
        return None
    if mode == _MAX:
        return _largest(grad, maximum_indices, bag_size, num_weights, per_sample_weights)
    if mode not in (SUM, MEAN) or not _indexes(offset2bag, grad):
        return None
    if offset2bag.shape != indices.shape or indices.dim() != 1:
        return None
    if per_sample_weights is not None and (
        mode != SUM or per_sample_weights.shape != indices.shape
    ):
        return None
    shape = (num_weights, grad.size(1))
    options = mode, scale_grad_by_freq, padding_idx
    return table_gradient(grad, shape, indices, offset2bag, per_sample_weights, *options)


def _largest(
    grad: Tensor, chosen: Tensor, sizes: Tensor, rows: int, samples: Tensor | None
) -> Tensor | None:
    """Every element goes to the row that it was taken from."""
    if not (_indexes(chosen, grad) and chosen.shape == grad.shape and samples is None):
        return None
    if not (_indexes(sizes, grad) and sizes.shape == grad.shape[:1]):
        return None
    # An empty bag has taken from none, and on the CPU it names the first; -1 is left out.
    taken = torch.where(sizes[:, None] > 0, chosen, -1).to(torch.int64)
    start = grad.new_zeros(rows, grad.size(1))
    sums: Tensor = torch.ops.truncdet.scatter_add(start, 0, taken, grad, False, 0)
    return sums


def _indexes(indices: Tensor, grad: Tensor) -> bool:
    return (
        indices.dtype in _INDICES
        and indices.layout == torch.strided
        and indices.device == grad.device
    )
