"""gather and index_select: torch's values, and a backward that adds in fixed point.

The gradient of `input` is scatter_add's (see truncdet._scatter): the same bits in every order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky, fixedpoint


def _check_input(op: str, input: Tensor, dim: int, index: Tensor) -> None:
    differentiable = input.is_floating_point() or input.is_complex()
    if differentiable and input.dtype not in fixedpoint.FORMATS:
        raise TypeError(
            f"{op}: input must be float64, float32, float16, bfloat16 or of integers, "
            f"got {input.dtype}"
        )
    shapes.check_dim_and_index(op, input, dim, index)


def gather(
    input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, exact: bool = False
) -> Tensor:
    """Picks one element of `input` for every element of `index`; the gradient's bits repeat.

    As `torch.gather`. The gradient is a sum of all that was picked from a place, in fixed point:
    tiers T1, T2 and T3o.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> truncdet.gather(x, 1, torch.tensor([[0, 0], [1, 0]]))
        tensor([[1., 1.],
                [4., 3.]])

    Args:
        input: tensor of any shape; float64, float32, float16 or bfloat16, or integers.
        dim: the dimension along which `index` counts; negative from the end.
        index: int64 or int32 tensor with as many dimensions as `input` and, outside `dim`, nowhere
            larger. Values in [0, input.size(dim)).
        sparse_grad: must be False.
        exact: as for `scatter_add`, in the backward.

    Returns:
        A tensor of input's dtype and index's shape. The bound of the gradient is `scatter_add`'s.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: dim, a shape or a device does not fit; on the CPU, an index is out of range.
        TruncdetError: on CUDA, an earlier call met an index out of range (it picked zero; see
            `truncdet.check`).
    """
    _sticky.raise_pending()
    _check_input("gather", input, dim, index)
    if sparse_grad:
        raise ValueError("gather: sparse_grad must be False, got True")
    shapes.check_beside("gather", input, dim, index)
    picked: Tensor = torch.ops.truncdet._gather(input, dim, index, exact, _sticky.GATHER)
    return picked


def index_select(input: Tensor, dim: int, index: Tensor, *, exact: bool = False) -> Tensor:
    """Picks the slices of `input` that `index` names; the gradient's bits repeat.

    As `torch.index_select`. The gradient is a sum of all that was picked from a slice, in fixed
    point: tiers T1, T2 and T3o.

    Example:
        >>> truncdet.index_select(torch.tensor([1.0, 2.0, 3.0]), 0, torch.tensor([2, 2, 0]))
        tensor([3., 3., 1.])

    Args:
        input: tensor of any shape; float64, float32, float16 or bfloat16, or integers.
        dim: the dimension along which `index` counts; negative from the end.
        index: int64 or int32 vector of values in [0, input.size(dim)).
        exact: as for `scatter_add`, in the backward.

    Returns:
        A tensor of input's dtype and of its shape but for index.numel() at `dim`. The bound of the
        gradient is `scatter_add`'s.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: dim, a shape or a device does not fit; on the CPU, an index is out of range.
        TruncdetError: on CUDA, an earlier call met an index out of range (it picked zero; see
            `truncdet.check`).
    """
    _sticky.raise_pending()
    _check_input("index_select", input, dim, index)
    if index.dim() > 1:
        raise ValueError(f"index_select: index must be a vector, got {index.dim()} dimensions")
    if input.dim() == 0:
        if index.numel() != 1:
            raise ValueError(
                f"index_select: index must have one element for a scalar, got {index.numel()}"
            )
        index = index.reshape(())
    else:
        shape = list(input.shape)
        shape[dim] = index.numel()
        index = shapes.expand_index(index, dim, shape)
    bit = _sticky.INDEX_SELECT
    picked: Tensor = torch.ops.truncdet._gather(input, dim, index, exact, bit)
    return picked
