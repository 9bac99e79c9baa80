"""The inside of `wrap`: arguments in, black box in double, outputs back in the caller's dtype."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from truncdet._crossing import Call, Enter, Leave, Rounding
from truncdet._truncate import check_bits, check_literal


class Recipe:
    """The arguments of `wrap`, checked, and what certification has counted so far."""

    def __init__(
        self,
        box: Callable[..., Any],
        *,
        bits: object,
        grad_bits: object,
        dtype: torch.dtype,
        selected: object,
        certify: bool,
        weights: str | None,
        n: int | Callable[..., int] | None,
    ) -> None:
        self.bits = _check_rounding(bits, "bits")
        self.grad_bits = _check_rounding(grad_bits, "grad_bits")
        self.dtype = dtype
        if dtype not in (torch.float64, torch.float32):
            raise ValueError(
                f"wrap: compute_dtype must be torch.float64 or torch.float32, got {dtype}"
            )
        self.selected = _check_selected(selected)
        self.certify, self.n = certify, n
        if certify and weights != "nonnegative":
            raise ValueError(
                "wrap: weights must be 'nonnegative' to certify, which is proved for no other "
                f"function, got {weights!r}"
            )
        if certify and dtype != torch.float64:
            raise ValueError(f"wrap: compute_dtype must be float64 to certify, got {dtype}")
        if torch.float16 in (self.bits, self.grad_bits):
            warnings.warn(
                "wrap: a literal float16 cast turns gradients of at most 2^-25 (3e-8) into zero "
                "and overflows above 65504; bits=11 and grad_bits=11 keep the exponent",
                stacklevel=3,
            )
        self.names = _parameter_names(box)
        self.unproved: list[Tensor] = []

    def _contributions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        n = self.n(*args, **kwargs) if callable(self.n) else self.n
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise ValueError(f"wrap: n must be, or return, an int of at least 1, got {n!r}")
        return n

    def run(
        self,
        box: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        chosen = self._choose(args, kwargs)
        call = None
        if self.certify and torch.is_grad_enabled():
            call = Call(self.unproved, self._contributions(args, kwargs))
        entered: list[Tensor] = []
        first: list[Tensor] = []

        def enter(tensor: Tensor, rounding: Rounding = None) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            wide: Tensor = Enter.apply(
                tensor, rounding, self.grad_bits, self.dtype, call, len(entered)
            )
            if wide.requires_grad:
                entered.append(wide)
            return wide

        def truncated(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and not first:
                first.append(tensor)
            return enter(tensor, self.bits)

        def widen(key: int | str, value: Any) -> Any:
            return map_tensors(value, truncated if key in chosen else enter)

        wide_args = tuple(widen(i, value) for i, value in enumerate(args))
        wide_kwargs = {key: widen(key, value) for key, value in kwargs.items()}
        if not first:
            raise TypeError("wrap: truncate_args must select a floating tensor, got none")
        (lead,) = first
        with torch.autocast(lead.device.type, enabled=False):
            if module is None:
                result = box(*wide_args, **wide_kwargs)
            else:
                result = self._call_module(module, enter, wide_args, wide_kwargs)
        return _leave(result, lead.dtype, call, entered)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int | str]:
        """The positions and keywords of this call that truncate_args selects."""
        chosen: set[int | str] = set()
        position: int | str
        name: int | str
        for item in self.selected:
            position, name = item, item
            if isinstance(item, str) and item in self.names:
                position = self.names.index(item)
            elif isinstance(item, int) and item < len(self.names):
                name = self.names[item]
            if isinstance(position, int) and position < len(args):
                chosen.add(position)
            elif name in kwargs:
                chosen.add(name)
            elif item not in self.names and name == item:
                raise ValueError(
                    f"wrap: truncate_args must name arguments of the call, got {item!r} for "
                    f"{len(args)} positional ones and keywords {sorted(kwargs)}"
                )
        return chosen

    def _call_module(
        self, module: nn.Module, enter: Callable[[Tensor], Tensor], args: Any, kwargs: Any
    ) -> Any:
        wide: dict[int, Tensor] = {}  # by identity: tied tensors stay one
        state, updates = {}, []
        # A module registered twice is visited once, a tensor under each of its names. Left to
        # tie_weights, such a module's tensors are swapped twice and not all put back.
        for prefix, part in module.named_modules():
            every = {"prefix": prefix, "recurse": False, "remove_duplicate": False}
            for name, parameter in part.named_parameters(**every):
                if id(parameter) not in wide:
                    wide[id(parameter)] = enter(parameter)
                state[name] = wide[id(parameter)]
            for name, buffer in part.named_buffers(**every):
                if id(buffer) not in wide:
                    copied = buffer.to(self.dtype) if buffer.is_floating_point() else buffer
                    wide[id(buffer)] = copied
                    if copied is not buffer:
                        updates.append((part, buffer, copied, _version(copied)))
                state[name] = wide[id(buffer)]
        result = torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
        with torch.no_grad():
            for part, buffer, copied, version in updates:
                # Written back where it may have been updated in place. The version alone does
                # not tell: batch_norm leaves that of its running statistics as it was.
                if part.training or version is None or _version(copied) != version:
                    buffer.copy_(copied)
        return result


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _leave(result: Any, dtype: torch.dtype, call: Call | None, entered: list[Tensor]) -> Any:
    outputs: list[Tensor] = []
    map_tensors(result, lambda t: outputs.append(t) if t.is_floating_point() else None)
    if call is None or not entered or not outputs:
        return map_tensors(result, lambda t: t.to(dtype) if t.is_floating_point() else t)
    narrow = iter(Leave.apply(call, dtype, len(entered), *entered, *outputs))
    return map_tensors(result, lambda t: next(narrow) if t.is_floating_point() else t)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Applies `fn` to every tensor in nested lists, tuples, named tuples and dicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps OrderedDict and the like
        mapped.update({key: map_tensors(item, fn) for key, item in value.items()})
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, fn) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, fn) for item in value)
    return value


def _parameter_names(box: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters, as far as the callable tells them."""
    try:
        parameters = inspect.signature(box).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


def _check_rounding(value: object, argument: str) -> Rounding:
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        return check_literal(value, "wrap", argument)
    return check_bits(value, "wrap", argument)


def _check_selected(items: object) -> tuple[int | str, ...]:
    def fits(item: object) -> bool:
        return isinstance(item, str) or (type(item) is int and item >= 0)

    if not isinstance(items, (tuple, list)) or not items or not all(map(fits, items)):
        raise ValueError(
            "wrap: truncate_args must be a non-empty tuple of positions and keyword names, "
            f"got {items!r}"
        )
    return tuple(items)
