"""Classes for converted layers: subclasses of a framework's own class, made on demand.

Converting a layer changes the class of the object and nothing else. So whoever holds the layer has
the converted one (parents, hooks, lists), its attributes, hooks and state_dict keys are what they
were, `isinstance` holds, and the way back gives the very object. The subclasses cannot be written
down as classes, since no framework may be imported here; pickles name the framework's class.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truncdet.integrations._roi import (
    Function,
    Notices,
    Recipe,
    from_mmcv,
    from_torchvision,
    make_function,
)

NOTICES = Notices(
    "truncdet.convert: {reason} uses the framework's own RoIAlign, as if nothing were converted"
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

    if TYPE_CHECKING:
        _function: Function

    @classmethod
    def _members(cls) -> dict[str, Any]:
        """Returns what else the class needs, once the framework is imported."""
        return {}

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
    mixin: type  # of Converted
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


@functools.cache
def make_swap(original: type, mixin: Any, recipe: Recipe, source: str) -> Swap:
    """Returns the swap of a RoI layer's class, the same one for the same arguments."""
    converted = _subclass(_PREFIX[recipe.mode] + original.__name__, mixin, original)
    exporting = _subclass(original.__name__, _Exporting, original)
    # What is exported says nothing of us: TorchScript writes the class's name down.
    exporting.__module__, exporting.__qualname__ = original.__module__, original.__qualname__
    swap = Swap(original, mixin, recipe, source, converted, exporting)
    function = staticmethod(make_function(_original(source), recipe))
    for name, value in {"_function": function, **mixin._members()}.items():
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


def _original(source: str) -> Function:
    """The framework's own function in the common form, from under any patch of ours."""
    importlib.import_module(f"{source}.ops.roi_align")
    integration = importlib.import_module(f"truncdet.integrations.{source}")
    function = integration._replacement().__wrapped__
    return from_mmcv(function) if source == "mmcv" else from_torchvision(function)


def _restore(original: type, mixin: type, recipe: Recipe, source: str, *arguments: Any) -> Any:
    """What a pickle calls to make an empty converted layer."""
    converted: Any = make_swap(original, mixin, recipe, source).converted
    return converted.__new__(converted, *arguments)
