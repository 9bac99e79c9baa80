"""Operators that a framework calls by a name of its own, and what computes them instead.

Two uses of one table. A patch replaces every module global that is the function, and `apply` of the
autograd function that it comes from. A converted layer runs its own forward with those names bound
to ours, and nothing outside the layer changes (see _rebound.py).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import Tensor
from truncdet.integrations._original import check_original, not_original
from truncdet.integrations._patch import Site
from truncdet.integrations._roi import Function, Notices, declined
from truncdet.integrations._sites import sites_becoming

SUMMED = "T1 T2 T3o"
BY_IMAGE = "T1 T2 T3o T3c"
CONVOLVED = "T1"  # its matrix products are the vendor library's


@dataclass(frozen=True)
class Substitute:
    """One function of a framework, and what computes it instead.

    Args:
        module: the module that defines it, a key of sys.modules.
        name: the global that is the function; empty if there is none.
        compute: takes the function's arguments; returns None for a call that it leaves to it.
        function: the autograd function whose `apply` the function is, if it is one.
        needs: a global without which the framework was built without the operator.
        part: what a user calls it, and which of its passes were not reproducible.
        tier: what it promises instead.
        by: the function of truncdet that has the same bits.
    """

    module: str
    name: str
    compute: Function
    function: str = ""
    needs: str = ""
    part: str = ""
    tier: str = BY_IMAGE
    by: str = ""

    @property
    def there(self) -> bool:
        """Whether the framework has it: builds without operators and other versions may not."""
        try:
            names = vars(importlib.import_module(self.module))
        except ModuleNotFoundError:
            return False
        return not self.needs or self.needs in names

    @property
    def lacking(self) -> bool:
        """Whether the framework was built without it, as far as that is known without an import."""
        module = sys.modules.get(self.module)
        return bool(self.needs) and module is not None and self.needs not in vars(module)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or self.function

    def original(self) -> Any:
        """The framework's own function, from under any patch of ours."""
        names = vars(importlib.import_module(self.module))
        if self.function:
            return _inherited_apply(names[self.function])
        found = names[self.name]
        while not self.is_original(found) and hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        return found

    def is_original(self, found: Any) -> bool:
        """Whether something is the framework's own function."""
        names = vars(sys.modules[self.module])
        if self.function:
            methods = (types.MethodType, types.BuiltinMethodType)
            return isinstance(found, methods) and found == _inherited_apply(names[self.function])
        # By its globals, which no wrapper can copy, as `functools.wraps` copies names.
        return isinstance(found, types.FunctionType) and found.__globals__ is names


def _inherited_apply(function: Any) -> Any:
    # Past a patched `apply`, which is an attribute of that class alone.
    base: Any = super(function, function)
    return base.apply


class Substitution:
    """The table of one framework, and whether it is in force.

    Args:
        who: speaks in messages.
        package: the package whose `__init__` has the functions too.
        table: its functions.
        active: whether a call is to be computed by ours; otherwise the original computes it.
    """

    def __init__(
        self, who: str, package: str, table: Sequence[Substitute], active: Callable[[], bool]
    ) -> None:
        self.who, self.package, self.table, self.active = who, package, table, active
        self.notices = Notices(
            f"{who}: {{reason}} uses the original kernel, whose gradient may vary from run to run"
        )
        self._replacements: dict[Substitute, Any] = {}

    def sites(self) -> tuple[Site, ...]:
        """What a patch changes.

        Raises:
            TruncdetError: if something else stands in the place of a function.
        """
        self.notices.forget()
        table = [substitute for substitute in self.table if substitute.there]
        held = []
        applies = []
        for substitute in table:
            module, name, function = substitute.module, substitute.name, substitute.function
            owner = vars(sys.modules[module]).get(function)
            if function and owner is None:
                raise not_original(module, None, self.who, function)
            ours = self.replacement(substitute)
            if name:
                check_original(module, substitute.is_original, ours, self.who, name)
                held += [(value, ours) for value in self._held(substitute)]
            if function:
                applies.append(Site(module, f"{function}.apply", apply_of(owner, ours)))
        return (*sites_becoming(held), *applies)

    def replacement(self, substitute: Substitute) -> Any:
        """The one function that takes the place of a substitute's; it obeys what is in force when
        it is called, so a reference taken while patched turns into the original afterwards."""
        found = self._replacements.get(substitute)
        if found is None:
            original = substitute.original()
            found = either(substitute, lambda: original, self.active, self.notices)
            found.__wrapped__ = original
            # By this name it is found again: what is pickled while patched loads without us.
            found.__module__ = substitute.module
            found.__qualname__ = substitute.name or f"{substitute.function}.apply"
            self._replacements[substitute] = found
        return found

    def _held(self, substitute: Substitute) -> list[Any]:
        """The function as module globals hold it; every look-up of a bound method makes a new
        object. One object as a rule; two where somebody has put another one in its place."""
        names = (substitute.module, self.package)
        found = [vars(sys.modules[name]).get(substitute.name) for name in names]
        values = {id(value): value for value in found if substitute.is_original(value)}
        return list(values.values())


def apply_of(owner: Any, replacement: Function) -> object:
    """Returns what replaces `apply` of an autograd function; its subclasses keep theirs."""

    def apply(cls: Any, *args: Any) -> Any:
        if cls is owner:
            return replacement(*args)
        # A subclass has a forward or backward of its own.
        return super(owner, cls).apply(*args)

    return classmethod(apply)


def either(
    substitute: Substitute,
    original: Callable[[], Function],
    active: Callable[[], bool],
    notices: Notices,
) -> Any:
    """Returns the function that computes calls by the substitute where that is possible."""
    compute, label = substitute.compute, substitute.label

    def function(*args: Any, **kwargs: Any) -> Any:
        if active():
            reason = _declined((*args, *kwargs.values()))
            if reason is None:
                result = compute(*args, **kwargs)
                if result is not None:
                    return result
            elif reason:
                notices.say(f"{label} with {reason}")
        return original()(*args, **kwargs)

    return function


def _declined(arguments: tuple[Any, ...]) -> str | None:
    # Lists of boxes as well as tensors; what has neither gets the original's own error.
    for argument in arguments:
        if isinstance(argument, (Tensor, torch.fx.Proxy)):
            return declined(argument, None)
    return ""
