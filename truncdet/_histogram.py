"""bincount and histc: sums by index_add, and counts of integers.

A bin of histc is the float expression of PyTorch's CPU kernel, in the compute type of the input:

    bin = floor( ((x - low) * bins) / (high - low) ),    the upper edge in the last bin

so a value near an edge falls where it falls there; on CUDA, too, where PyTorch may fuse operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import fixedpoint as fp
from truncdet._count import count
from truncdet._divide import divide
from truncdet._library import LIB

LIB.define(
    "histc(Tensor input, SymInt bins, float min, float max) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _histc(input: Tensor, bins: int, low: float, high: float) -> Tensor:
    x = input.detach().to(fp.compute_dtype(input.dtype)).reshape(-1)
    if low == high and x.numel() > 0:
        low, high = torch.stack(torch.aminmax(x)).tolist()
    if low == high:
        low, high = low - 1, high + 1
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"histc: min and max must be finite, got {low} and {high}")
    if low > high:
        raise ValueError(f"histc: max must be at least min, got {high} and {low}")
    # As tensors, so that both limits have the type of the data before anything is computed.
    left, right = (x.new_full((), limit) for limit in (low, high))
    inside = (x >= left) & (x <= right)
    places = ((x - left) * bins / (right - left)).masked_fill(~inside, 0).to(torch.int64)
    places = places.clamp(max=bins - 1).masked_fill(~inside, -1)
    return divide(count(places, bins).to(x.dtype), None, input.dtype)


LIB.impl("histc", _histc, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::histc", lib=LIB)
def _fake(input: Tensor, bins: int, low: float, high: float) -> Tensor:
    return input.new_empty(bins)


def bincount(
    input: Tensor, weights: Tensor | None = None, minlength: int = 0, *, exact: bool = False
) -> Tensor:
    """Counts every value of a vector of integers, or adds its weights, in any order alike.

    As `torch.bincount`: tiers T1, T2 and T3o. A GPU is waited for, since the length of the result
    depends on the values. There is no gradient.

    Example:
        >>> truncdet.bincount(torch.tensor([0, 2, 2]), torch.tensor([1.0, 0.5, 0.25]))
        tensor([1.0000, 0.0000, 0.7500])

    Args:
        input: vector of integers, not negative.
        weights: vector of input's length or None; float32 stays, all other types become float64.
        minlength: least number of bins.
        exact: as for `scatter_add`.

    Returns:
        max(input.max() + 1, minlength) bins: int64 counts (for an empty input in any case), or sums
        of float32 or float64 with `scatter_add`'s bound.

    Raises:
        TypeError: input is not of integers.
        ValueError: input has a negative element; a shape, a device or minlength does not fit.
    """
    if input.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"bincount: input must be of integers, got {input.dtype}")
    if input.dim() != 1:
        raise ValueError(f"bincount: input must be a vector, got {input.dim()} dimensions")
    if minlength < 0:
        raise ValueError(f"bincount: minlength must not be negative, got {minlength}")
    if weights is not None:
        shapes.check_device("bincount", "input", input, "weights", weights)
        if weights.shape != input.shape:
            raise ValueError(
                f"bincount: weights must have input's shape, {list(input.shape)}, "
                f"got {list(weights.shape)}"
            )
    index = input.to(torch.int64)
    if index.numel() == 0:  # integers, weighted or not, as PyTorch has it
        return index.new_zeros(minlength)
    low, high = torch.stack(torch.aminmax(index)).tolist()
    if low < 0:
        raise ValueError(f"bincount: input must not be negative, got {low}")
    bins = max(minlength, high + 1)
    if weights is None:
        return count(index, bins)
    values = weights.detach().to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    sums: Tensor = torch.ops.truncdet.index_add(values.new_zeros(bins), 0, index, values, exact, 0)
    return sums


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts the elements of `input` in equal bins between `min` and `max`, as integers.

    As `torch.histc`: tiers T1, T2 and T3o. If both limits are equal they are those of the data, for
    which a GPU is waited for. There is no gradient.

    Example:
        >>> truncdet.histc(torch.tensor([1.0, 2.0, 1.0]), bins=4, min=0, max=3)
        tensor([0., 2., 1., 0.])

    Args:
        input: float64, float32, float16 or bfloat16 tensor of any shape.
        bins: number of bins.
        min: lower limit, inclusive.
        max: upper limit, inclusive.

    Returns:
        Vector of `bins` counts in input's dtype; exact where that has the integer, else rounded
        once. Elements outside the limits and NaN are not counted.

    Raises:
        TypeError: input's dtype is not one of the above.
        ValueError: bins is not positive, or the limits are not finite or not in order.
    """
    shapes.check_float("histc", "input", input)
    if bins <= 0:
        raise ValueError(f"histc: bins must be positive, got {bins}")
    counts: Tensor = torch.ops.truncdet.histc(input, bins, float(min), float(max))
    return counts
