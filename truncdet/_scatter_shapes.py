"""Arguments of scatter_add and index_add: what is allowed, and how it becomes three dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from truncdet import _sticky, fixedpoint


def check_scatter(op: str, input: Tensor, dim: int, index: Tensor, src: Tensor) -> None:
    """Raises for arguments that scatter_add cannot take, naming the argument."""
    _check_common(op, input, dim, index, src, "src")
    check_beside(op, input, dim, index)
    if index.numel() == 0:
        return
    if len(sizes(src)) != len(sizes(input)):
        raise ValueError(
            f"{op}: src must have input's number of dimensions, {input.dim()}, got {src.dim()}"
        )
    for d, (have, used) in enumerate(zip(sizes(src), sizes(index), strict=True)):
        if used > have:
            raise ValueError(
                f"{op}: index must be at most as large as src, {have} in dimension {d}, got {used}"
            )


def check_index(op: str, input: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Raises for arguments that index_add cannot take, naming the argument."""
    _check_common(op, input, dim, index, source, "source")
    if index.dim() > 1:
        raise ValueError(f"{op}: index must be a vector, got {index.dim()} dimensions")
    wanted = list(sizes(input))
    wanted[dim] = index.numel()
    if list(sizes(source)) != wanted:
        raise ValueError(
            f"{op}: source must have input's shape with index.numel() at dim, {wanted}, "
            f"got {list(source.shape)}"
        )


def _check_common(op: str, input: Tensor, dim: int, index: Tensor, src: Tensor, name: str) -> None:
    check_float(op, "input", input)
    if src.dtype != input.dtype:
        raise TypeError(f"{op}: {name} must have input's dtype, {input.dtype}, got {src.dtype}")
    check_dim_and_index(op, input, dim, index)
    check_device(op, "input", input, name, src)


def check_float(op: str, name: str, x: Tensor) -> None:
    """Raises unless `x` has one of the types that can be summed."""
    if x.dtype not in fixedpoint.FORMATS:
        raise TypeError(
            f"{op}: {name} must be float64, float32, float16 or bfloat16, got {x.dtype}"
        )


def check_device(op: str, where: str, input: Tensor, name: str, x: Tensor) -> None:
    """Raises unless `x` is on the device of `input`, the argument called `where`."""
    if x.device != input.device:
        raise ValueError(
            f"{op}: {name} must be on {where}'s device, {input.device}, got {x.device}"
        )


def check_dim_and_index(op: str, input: Tensor, dim: int, index: Tensor) -> None:
    """Raises for a dim, or a type or device of index, that no operator along `dim` takes."""
    check_integers(op, "index", index)
    check_device(op, "input", input, "index", index)
    rank = len(sizes(input))
    if not -rank <= dim < rank:
        raise ValueError(f"{op}: dim must be in [{-rank}, {rank - 1}], got {dim}")


def check_integers(op: str, name: str, x: Tensor) -> None:
    """Raises unless `x` can name places."""
    if x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: {name} must be int64 or int32, got {x.dtype}")


def check_beside(op: str, input: Tensor, dim: int, index: Tensor) -> None:
    """Raises unless `index` has input's dimensions and, outside `dim`, is nowhere larger."""
    if index.numel() == 0:
        return
    most = sizes(input)
    if len(sizes(index)) != len(most):
        raise ValueError(
            f"{op}: index must have input's number of dimensions, {input.dim()}, got {index.dim()}"
        )
    for d, used in enumerate(sizes(index)):
        if d != dim % len(most) and used > most[d]:
            raise ValueError(
                f"{op}: index must be at most as large as input, {most[d]} in dimension {d}, "
                f"got {used}"
            )


def sizes(x: Tensor) -> Sequence[int]:
    """The shape, where a scalar counts as a vector of one element (as torch has it)."""
    return x.shape if x.dim() > 0 else (1,)


def three_dimensions(x: Tensor, dim: int) -> Tensor:
    """`x` as [before, along, after] `dim`; a view wherever there can be one."""
    dim %= x.dim()
    return x.reshape(math.prod(x.shape[:dim]), x.size(dim), math.prod(x.shape[dim + 1 :]))


def expand_index(index: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """The vector `index` of index_add in the shape of its source, without memory of its own."""
    if len(shape) == 0:
        return index.reshape(())
    inserted = [1] * len(shape)
    inserted[dim] = index.numel()
    return index.reshape(inserted).expand(shape)


def unexpanded(index: Tensor) -> Tensor:
    """One copy of what an expanded tensor repeats."""
    for d, stride in enumerate(index.stride()):
        index = index.narrow(d, 0, 1) if stride == 0 and index.size(d) > 1 else index
    return index


def check_range(operator: int, index: Tensor, size: int) -> None:
    """Raises on the CPU if an element of `index` is not in [0, size); a GPU is not waited for.

    `operator` is the bit of the operator to name, or 0 if such elements are meant to be left out.
    """
    if operator == 0 or not index.is_cpu or index.numel() == 0:
        return
    low, high = torch.aminmax(unexpanded(index))
    if int(low) >= 0 and int(high) < size:
        return
    place = ((index < 0) | (index >= size)).nonzero()[0].tolist()
    where = place[0] if len(place) == 1 else tuple(place)
    got = int(index[tuple(place)])
    name = _sticky.OPERATORS[operator]
    raise ValueError(f"{name}: index must be in [0, {size}), got {got} at position {where}")


def receiving(index: Tensor, dim: int) -> tuple[slice, ...]:
    """The part of the input that can receive, where `index` is smaller than it beside `dim`."""
    used = sizes(index)
    return tuple(slice(None) if d == dim % len(used) else slice(n) for d, n in enumerate(used))
