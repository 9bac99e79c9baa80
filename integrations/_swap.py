"""Classes for converted layers: subclasses of a framework's own class, made on demand.

Converting a layer changes the class of the object and nothing else. So whoever holds the layer has
the converted one (parents, hooks, lists), its attributes, hooks and state_dict keys are what they
were, `isinstance` holds, and the way back gives the very object. The subclasses cannot be written
down as classes, since no framework may be imported here; pickles name the framework's class.
"""

from __future__ import annotations

import copyreg
import functools
from dataclasses import dataclass
from typing import Any

from truncdet.integrations._roi import Notices, Recipe

NOTICES = Notices(
    "truncdet.convert: {reason} uses the framework's own operator, as if nothing were converted"
)
_PREFIX = {"fixed_point": "FixedPoint", "truncate": "Truncate"}


class SubclassError(TypeError):
    """A layer's class refuses subclasses, so its layers cannot be converted."""


class _Convertible:
    """What all classes made here share; stands before the framework's class in their bases.

    Without __slots__, not even empty ones: an object's class can only change to one of its layout.
    Without annotations at run time: TorchScript, which looks for the types of a layer's attributes
    base by base, must find those of the framework's class.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Used by copy.deepcopy as well. A class with a way of its own keeps it.
        reduced: Any = super().__reduce_ex__(protocol)
        swap = swap_of(self)
        if swap is None or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, arguments, *rest = reduced
        return (_restore, (*swap.made_of, *arguments[1:]), *rest)


class _Exporting(_Convertible):
    """A layer while torch.jit.script compiles it: the original, until somebody calls it.

    torch.jit.script puts what `__prepare_scriptable__` returns into the model it was given, for
    good. So that is the layer itself, whose inherited forward it compiles; it never looks at
    `__call__`, through which the model's next eager step finds the converted layer again.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        swap = swap_of(self)
        assert swap is not None
        self.__class__ = swap.converted
        return self(*args, **kwargs)

    def __prepare_scriptable__(self) -> Any:
        return self


class Converted(_Convertible):
    """What stands before the framework's class in a converted layer; subclasses have a forward."""

    # Whether its operator takes float32 boxes beside features of half types.
    _precise = False

    @classmethod
    def _made_from(cls, original: type) -> object:
        """Returns what of the class the members are made from, which somebody may replace."""
        return None

    @classmethod
    def _members(cls, original: type, recipe: Recipe, source: str) -> dict[str, Any]:
        """Returns what a class under `recipe` needs, once the framework is imported."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> Any:
        NOTICES.say("torch.jit.script", stacklevel=3)
        swap = swap_of(self)
        assert swap is not None
        self.__class__ = swap.exporting
        return self


@dataclass(frozen=True, eq=False)
class Swap:
    """One original class under one recipe, and the two classes that its layers change to.

    `source` is the framework whose function 'truncate' runs: not always the layer's own.
    """

    original: type
    mixin: Any  # a subclass of Converted
    recipe: Recipe
    source: str
    converted: type
    exporting: type

    @property
    def made_of(self) -> tuple[Any, ...]:
        """The arguments with which `make_swap` gives this swap."""
        return self.original, self.mixin, self.recipe, self.source


def swap_of(layer: object) -> Swap | None:
    """Returns how a layer is converted; None if it is not, or if its class was changed since."""
    swap = getattr(type(layer), "_swap", None)
    if isinstance(swap, Swap) and type(layer) in (swap.converted, swap.exporting):
        return swap
    return None


_truncating: set[type] = set()


def truncating() -> bool:
    """Returns whether a layer has been converted to 'truncate' in this process."""
    return bool(_truncating)


def make_swap(original: type, mixin: Any, recipe: Recipe, source: str) -> Swap:
    """Returns the swap of a layer's class, the same one for the same arguments."""
    return _make_swap(original, mixin, recipe, source, mixin._made_from(original))


@functools.cache
def _make_swap(original: type, mixin: Any, recipe: Recipe, source: str, _from: object) -> Swap:
    converted = _subclass(_PREFIX[recipe.mode] + original.__name__, mixin, original)
    exporting = _subclass(original.__name__, _Exporting, original)
    # What is exported says nothing of us: TorchScript writes the class's name down.
    exporting.__module__, exporting.__qualname__ = original.__module__, original.__qualname__
    swap = Swap(original, mixin, recipe, source, converted, exporting)
    for name, value in mixin._members(original, recipe, source).items():
        setattr(converted, name, value)
    for cls in (converted, exporting):
        cls._swap = swap  # type: ignore[attr-defined]
    if recipe.mode == "truncate":
        _truncating.add(converted)
    return swap


def _subclass(name: str, mixin: type, original: type) -> type:
    members = {"__module__": __name__, "__doc__": original.__doc__}
    try:
        return type(original)(name, (mixin, original), members)
    except Exception as error:  # an __init_subclass__ or a metaclass may raise anything
        raise SubclassError(
            f"its class cannot be subclassed: {type(error).__name__}: {error}"
        ) from error


def _restore(original: type, mixin: type, recipe: Recipe, source: str, *arguments: Any) -> Any:
    """What a pickle calls to make an empty converted layer."""
    converted: Any = make_swap(original, mixin, recipe, source).converted
    return converted.__new__(converted, *arguments)
