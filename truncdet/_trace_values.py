"""The tensors inside whatever a model takes and returns, each with the path to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 8
_WITHOUT = (str, bytes, int, float, complex, nn.Module, type)  # hold none, or none of a batch
# Types of their own that no tracer has.
_ORDINARY = (Tensor, nn.Parameter)


def tensors(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Tensors of mappings, sequences, dataclasses, arrays, and objects that list their fields.

    Objects of frameworks are asked for their fields the way these offer them (detectron2's
    `get_fields`, mmengine's `all_items`); others give the tensors among their attributes. What is
    too deep, or refers to itself, ends there.
    """
    found: list[tuple[str, Tensor]] = []
    _walk(value, path, _DEEPEST, set(), found)
    return found


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """`tensors((args, kwargs))`, fast for the usual call: one tensor or a few."""
    found: list[tuple[str, Tensor]] = []
    for number, value in enumerate(args):
        if type(value) not in _ORDINARY:
            _walk(value, f"[0][{number}]", _DEEPEST - 2, set(), found)
        elif readable(value):
            found.append((f"[0][{number}]", value))
    for name, value in kwargs.items():
        _walk(value, f"[1][{name!r}]", _DEEPEST - 2, set(), found)
    return found


def _walk(
    value: Any, path: str, depth: int, above: set[int], found: list[tuple[str, Tensor]]
) -> None:
    if isinstance(value, Tensor):
        if readable(value):
            found.append((path, value))
        return
    if value is None or isinstance(value, _WITHOUT):
        return
    if depth == 0 or id(value) in above:
        return
    above.add(id(value))
    for name, item in _items(value):
        _walk(item, f"{path}{name}", depth - 1, above, found)
    above.discard(id(value))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif (array := _array(value)) is not None:
        yield "", array
    elif callable(getattr(value, "get_fields", None)):
        yield from ((f".{key}", item) for key, item in value.get_fields().items())
    elif callable(getattr(value, "all_items", None)):
        yield from ((f".{key}", item) for key, item in value.all_items())
    elif dataclasses.is_dataclass(value):
        names = (part.name for part in dataclasses.fields(value))
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())


def _array(value: Any) -> Tensor | None:
    """A NumPy array as a tensor, where torch has its type."""
    if type(value).__module__ != "numpy" or not hasattr(value, "__array_interface__"):
        return None
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        return None


def readable(tensor: Tensor) -> bool:
    """Whether it has words to read: dense, with data, and no stand-in of a tracer or transform."""
    return (
        tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        and not (tensor._is_zerotensor() or torch.nn.parameter.is_lazy(tensor))
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and (type(tensor) in _ORDINARY or not isinstance(tensor, torch._subclasses.FakeTensor))
    )
