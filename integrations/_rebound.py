"""A layer's own methods with the names of operators bound to ours, for converted layers.

The code that runs stays the framework's, so whatever else a forward does, checks, paddings, casts,
stays as well. Only the copy of the method sees other names; the module that it is from does not.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

from truncdet.integrations._roi import Function, Notices
from truncdet.integrations._substitute import Substitute, either


def rebound(method: Any, table: Sequence[Substitute], notices: Notices) -> Any:
    """Returns a copy of a method that calls our operators, or None if it calls none of the table.

    Args:
        method: as its class defines it; decorators may surround it.
        table: the operators of the framework; its names for them are unique in it.
        notices: say why a call goes to the original all the same.
    """
    inner = getattr(method, "__wrapped__", None)
    scope, closure = method.__globals__, method.__closure__
    changed = {}
    if inner is None:
        # Without its name, by which the compiler would look names up in the module instead.
        scope = {name: value for name, value in scope.items() if name != "__name__"}
        bindings = _bindings(scope, table, notices)
        if not bindings.keys() & set(method.__code__.co_names):
            return None
        scope.update(bindings)
    else:
        changed["__wrapped__"] = copy = rebound(inner, table, notices)
        if copy is None:
            return None
        closure = tuple(types.CellType(copy) if c.cell_contents is inner else c for c in closure)
    result = types.FunctionType(
        method.__code__, scope, method.__name__, method.__defaults__, closure
    )
    result.__kwdefaults__, result.__doc__ = method.__kwdefaults__, method.__doc__
    result.__module__, result.__qualname__ = method.__module__, method.__qualname__
    vars(result).update(vars(method), **changed)
    return result


class _AutogradFunction:
    """Stands for one whose `apply` a forward calls."""

    def __init__(self, apply: Function) -> None:
        self.apply = apply


def _bindings(
    scope: dict[str, Any], table: Sequence[Substitute], notices: Notices
) -> dict[str, Any]:
    bindings: dict[str, Any] = {}
    for substitute in table:
        ours = either(substitute, _Current(substitute), _always, notices)
        if substitute.name in scope:
            bindings[substitute.name] = ours
        if substitute.function in scope:
            bindings[substitute.function] = _AutogradFunction(ours)
    return bindings


def _always() -> bool:
    return True


class _Current:
    """What the module has under the name when it is called: a symbolic trace puts its own there."""

    def __init__(self, substitute: Substitute) -> None:
        self.substitute = substitute

    def __call__(self) -> Any:
        names = vars(sys.modules[self.substitute.module])
        if self.substitute.name:
            return names[self.substitute.name]
        return names[self.substitute.function].apply
