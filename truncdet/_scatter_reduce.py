"""scatter_reduce for sums and means: scatter_add, and one division by an integer count.

    mean:  R = RN_T( RN_C( x + sum_i c_i ) / n )

with C the compute type (float32, or float64 for float64) and T the storage type: the fixed-point
sum is rounded once to C, the quotient once to T (see truncdet._divide). n counts the contributions,
and `input` as well if it is included; a cell that nothing reaches keeps input's bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._count import count_along, leading
from truncdet._divide import divide
from truncdet._sticky import SCATTER_REDUCE


def scatter_mean(
    start: Tensor, dim: int, index: Tensor, src: Tensor, counts: Tensor, exact: bool, bit: int
) -> Tensor:
    """RN_T( RN_C( start + sums of src ) / counts ); `counts` as count_along has them."""
    wide = divide(start, None, fp.compute_dtype(src.dtype))
    sums = torch.ops.truncdet.scatter_add(wide, dim, index, src, exact, bit)
    return divide(sums, leading(counts, sums.shape), src.dtype)


def scatter_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    exact: bool = False,
) -> Tensor:
    """Adds or averages the elements of `src` on the cells that `index` names, in any order alike.

    As `torch.scatter_reduce` with 'sum' or 'mean', with the same bits in every run, for every order
    of the contributions, on the CPU and on any GPU (tiers T1, T2 and T3o), forward and backward.

    Example:
        >>> x, index = torch.zeros(2), torch.tensor([0, 0, 0])
        >>> y = torch.tensor([1.0, 2.0, 6.0])
        >>> truncdet.scatter_reduce(x, 0, index, y, "mean", include_self=False)
        tensor([3., 0.])

    Args:
        input: float64, float32, float16 or bfloat16 tensor of any shape. Not changed.
        dim: the dimension along which `index` counts; negative from the end.
        index: int64 or int32 tensor with as many dimensions as `input`, nowhere larger than `src`
            and, outside `dim`, nowhere larger than `input`. Values in [0, input.size(dim)).
        src: what is reduced, of input's dtype and number of dimensions; elements beyond the shape
            of `index` are not used.
        reduce: 'sum' or 'mean'.
        include_self: whether input's element takes part where contributions arrive.
        exact: as for `scatter_add`.

    Returns:
        A new contiguous tensor of input's shape and dtype. A sum has `scatter_add`'s bound. A mean
        is the sum, rounded once to the compute type, divided by the number of its terms with one
        more rounding: with S the exact sum and D scatter_add's bound in the compute type
        |R - S/n| <= D/n + 2^-24 |R| for float32 (2^-53, 2^-11 and 2^-8 for the other types).

    Raises:
        TypeError: a dtype is not one of the above, or src's is not input's.
        ValueError: dim, reduce, a shape or a device does not fit; on the CPU, an index is out of
            range.
        TruncdetError: on CUDA, an earlier call met an index out of range (its contribution was
            dropped; see `truncdet.check`).
    """
    _sticky.raise_pending()
    shapes.check_scatter("scatter_reduce", input, dim, index, src)
    if reduce not in ("sum", "mean"):
        raise ValueError(f"scatter_reduce: reduce must be 'sum' or 'mean', got {reduce!r}")
    if index.numel() == 0:
        return input.clone(memory_format=torch.contiguous_format)
    start, counts = input, None
    if reduce == "mean" or not include_self:
        counts = count_along(input, dim, index)
        if include_self:
            counts = counts + 1
        else:
            start = input.masked_fill(counts > 0, 0)
    if reduce == "sum" or counts is None:
        sums: Tensor = torch.ops.truncdet.scatter_add(start, dim, index, src, exact, SCATTER_REDUCE)
        return sums
    return scatter_mean(start, dim, index, src, counts, exact, SCATTER_REDUCE)
