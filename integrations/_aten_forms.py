"""From one function to the kernels of an operator's forms: functional, in-place and with out=.

A `Compute` takes the arguments of the functional form and returns the result in memory of its own,
or None for a call that it leaves to the kernel that was there before: another dtype, wrong
arguments (whose error is then PyTorch's), a layout that is not strided. An `Applies` takes the same
arguments and says whether they ask for what truncdet has a definition of, such as a sum and not a
product; it comes first, since most calls of some operators, such as index_put, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from truncdet.fixedpoint import FORMATS

Compute = Callable[..., "Tensor | tuple[Tensor | None, ...] | None"]
Applies = Callable[..., bool]
Result = TypeVar("Result")
Form = Callable[[Compute, Applies], Callable[..., Any]]


def always(*_: object, **__: object) -> bool:
    """Whatever the arguments are, truncdet has a definition for them."""
    return True


def functional(compute: Compute, applies: Applies) -> Callable[..., Any]:
    """The kernel of a form that returns new tensors."""

    def kernel(original: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs) if applies(*args, **kwargs) else None
        return original.call_boxed(keys, *args, **kwargs) if result is None else result

    return kernel


def in_place(compute: Compute, applies: Applies) -> Callable[..., Any]:
    """The kernel of a form that changes its first argument."""

    def kernel(original: Any, keys: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = None
        if applies(self, *args, **kwargs) and writable(self, (*args, *kwargs.values())):
            result = compute(self, *args, **kwargs)
        if result is None:
            return original.call_boxed(keys, self, *args, **kwargs)
        assert isinstance(result, Tensor)
        return self.copy_(result)

    return kernel


def changing(compute: Compute, applies: Applies) -> Callable[..., Any]:
    """As `in_place`, for a `compute` that changes its first argument itself and returns it."""

    def kernel(original: Any, keys: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = None
        if applies(self, *args, **kwargs) and writable(self, (*args, *kwargs.values())):
            result = compute(self, *args, **kwargs)
        return original.call_boxed(keys, self, *args, **kwargs) if result is None else result

    return kernel


def into(*names: str) -> Form:
    """The form that writes to the keyword arguments `names`, one a result and of any shape."""

    def form(compute: Compute, applies: Applies) -> Callable[..., Any]:
        def kernel(original: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = dict(kwargs)
            outs = [inputs.pop(name) for name in names]
            first, *others = args
            result = None
            # The first argument may be one of `outs` itself: that is the in-place form.
            if applies(*args, **inputs) and all(
                fits(out, first) and writable(out, (*others, *inputs.values())) for out in outs
            ):
                result = compute(*args, **inputs)
            if result is None:
                return original.call_boxed(keys, *args, **kwargs)
            # As PyTorch's own kernels: to the right shape, with a warning unless `out` was empty.
            results = result if isinstance(result, tuple) else (result,)
            for x, out in zip(results, outs, strict=True):
                torch.ops.aten.clone.out(x, out=out)
            return outs[0] if len(outs) == 1 else tuple(outs)

        return kernel

    return form


def unless_refused(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result | None:
    """What one of truncdet's functions returns; None if it cannot take the arguments."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError):
        return None


def supported(*tensors: Tensor) -> bool:
    """Whether the tensors are strided and of one dtype and device, and the dtype is one of ours."""
    first = tensors[0]
    return first.dtype in FORMATS and all(
        x.layout == torch.strided and x.dtype == first.dtype and x.device == first.device
        for x in tensors
    )


def fits(out: Tensor, input: Tensor) -> bool:
    """Whether results computed from `input` can be copied to `out` as they are."""
    return (out.dtype, out.device, out.layout) == (input.dtype, input.device, input.layout)


def writable(target: Tensor, others: Iterable[object]) -> bool:
    """Whether PyTorch would write to `target`: no element twice, and none that it still reads."""
    if _may_overlap_itself(target):
        return False
    return not any(_overlap(target, x) for x in _tensors(others))


def _may_overlap_itself(x: Tensor) -> bool:
    """Whether two elements may lie in one place. Then PyTorch refuses to write, or, where it does
    not see it, adds each contribution to what the others left; a copy of a result would not."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gaps share memory; with gaps PyTorch does not ask either."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    starts = a.data_ptr(), b.data_ptr()
    ends = (start + x.numel() * x.element_size() for start, x in zip(starts, (a, b), strict=True))
    return max(starts) < min(ends) and _dense(a) and _dense(b)


def _dense(x: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))
