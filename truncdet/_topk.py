"""topk with the lower index first on ties: which of equal elements are taken is defined.

An element and its index become one int64,

    (ordered word of the element) * 2^32 + (2^32 - 1 - index)      for the largest elements,
    (ordered word of the element) * 2^32 + index                   for the smallest,

so no two are equal and torch.topk has no choice left. float64 and int64 leave no room for an index
and are sorted stably instead. The gradient writes to places that are all different: nothing is
added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet._library import LIB
from truncdet._order import ordered_words
from truncdet.fixedpoint import FORMATS

LIB.define(
    "topk(Tensor input, SymInt k, int dim, bool largest) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_INDEX_BITS = 32
_INDICES = (1 << _INDEX_BITS) - 1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _topk(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    if input.dim() == 0:
        indices = torch.zeros((k,) * (k == 0), dtype=torch.int64, device=input.device)
        return (input.clone() if k == 1 else input.new_empty(0)), indices
    keys = ordered_words(input)
    if keys.element_size() < 8 and input.size(dim) <= _INDICES:
        places = torch.arange(input.size(dim), device=input.device)
        if largest:
            places = _INDICES - places
        places = places.reshape([-1 if d == dim % input.dim() else 1 for d in range(input.dim())])
        composite = (keys.to(torch.int64) << _INDEX_BITS).bitwise_or_(places)
        found = torch.topk(composite, k, dim, largest, sorted=True).values & _INDICES
        indices = _INDICES - found if largest else found
    else:
        order = torch.sort(keys, dim=dim, descending=largest, stable=True).indices
        indices = order.narrow(dim, 0, k).contiguous()
    return input.gather(dim, indices), indices


def _fake(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    shape = list(input.shape)
    if shape:
        shape[dim] = k
    elif k == 0:
        shape = [0]
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, _, ctx.dim, _ = inputs
    ctx.shape = input.shape
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _indices: Any) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.shape).scatter(ctx.dim, indices, grad), None, None, None


LIB.impl("topk", _topk, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::topk", _fake, lib=LIB)
torch.library.register_autograd("truncdet::topk", _backward, setup_context=_save, lib=LIB)


def topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Takes the k largest elements along a dimension, of equal ones those with the lower index.

    As `torch.topk`, whose choice among equal elements is not the same on every device. Tiers T1, T2
    and T3c, forward and backward.

    Example:
        >>> truncdet.topk(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2)
        (tensor([3., 3.]), tensor([1, 2]))

    Args:
        input: tensor of any shape; float64, float32, float16, bfloat16 or integers.
        k: number of elements, in [0, input.size(dim)].
        dim: the dimension along which is counted; negative from the end.
        largest: the largest elements, or else the smallest. NaN is larger than every number, and
            zeros of both signs are equal.
        sorted: not needed: the result is always sorted, equal elements by index.

    Returns:
        The elements, their bits as they are, and their int64 indices: input's shape with k at
        `dim`. The gradient of an element that was taken is that of its copy; of all others, 0.

    Raises:
        TypeError: an argument or the dtype is none of the above.
        ValueError: dim or k is out of range.

    Memory besides: 8 bytes an element, and what torch.topk needs.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"topk: input must be a Tensor, got {type(input).__name__}")
    if input.dtype not in FORMATS and input.dtype not in _INTEGERS:
        raise TypeError(
            "topk: input must be float64, float32, float16, bfloat16 or of integers, "
            f"got {input.dtype}"
        )
    rank = max(input.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"topk: dim must be in [{-rank}, {rank - 1}], got {dim}")
    size = input.size(dim) if input.dim() > 0 else 1
    if not 0 <= k <= size:
        raise ValueError(f"topk: k must be in [0, {size}], got {k}")
    pair: tuple[Tensor, Tensor] = torch.ops.truncdet.topk(input, k, dim, largest)
    return pair
