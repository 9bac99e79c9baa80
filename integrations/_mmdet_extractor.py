"""The key `deterministic` in the config of an mmdet RoI extractor, whatever its class.

Extractors have fixed constructors, so the key is taken out before a constructor sees it: by
wrapping the `__init__` of every class, of its own or inherited from elsewhere, those made later
included. Whichever class is outermost takes the key, and acts once its constructor is done and the
layers are final. A constructor that gets past this (assigned to a class later, for example) may
replace the layers afterwards; so an extractor built with the key checks them in each forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from truncdet.integrations._convert import check_layers, convert
from truncdet.integrations._mmdet_options import check_keys, check_recipe

from truncdet._errors import TruncdetError

KEY = "deterministic"
_KEYS = ("mode", "literal")
_MARK = "_truncdet_takes_key"


def install(base: Any) -> None:
    """Lets `base` and all its subclasses, present and future, take the key; twice does no harm.

    Without the key a constructor gets its arguments as they are.
    """
    if hasattr(base.__init__, _MARK):
        return
    for cls in (base, *_subclasses(base)):
        _wrap(cls)

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807
        super(base, cls).__init_subclass__(**kwargs)
        _wrap(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [deeper for child in direct for deeper in _subclasses(child)]


def _wrap(cls: Any) -> None:
    # Through the MRO: it may come from a class beside the base, which runs ours and goes on.
    resolved = cls.__init__
    if hasattr(resolved, _MARK) or _has_key(resolved):
        return  # a class with a parameter of that name means something by it
    own = vars(cls).get("__init__")

    @functools.wraps(resolved)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original = super(cls, type(self)).__init__ if own is None else own
        wish = kwargs.pop(KEY, None)
        if wish is None:
            original(self, *args, **kwargs)
            return
        mode, literal = _read(wish, type(self).__name__)
        original(self, *args, **kwargs)
        _apply(self, mode, literal)

    setattr(__init__, _MARK, True)
    cls.__init__ = __init__


def _has_key(constructor: Any) -> bool:
    try:
        return KEY in inspect.signature(constructor).parameters
    except ValueError:  # one that is written in C
        return False


def _read(wish: object, who: str) -> tuple[str, bool]:
    where = f"{who}: {KEY}"
    if not isinstance(wish, Mapping):
        raise TypeError(f"{where} must be a dict with keys among {', '.join(_KEYS)}, got {wish!r}")
    check_keys(wish, _KEYS, where)
    return check_recipe(wish.get("mode", "fixed_point"), wish.get("literal", False), where)


def _apply(extractor: Any, mode: str, literal: bool) -> None:
    if mode == "off":
        return
    conversion = convert(extractor, mode, literal=literal)
    if not conversion.changed:
        # Whoever writes the key must not train on believing that it did something.
        raise TruncdetError(
            f"{type(extractor).__name__}: {KEY} needs roi_layer to be one that it can swap for "
            f"{mode!r}, got {_classes(extractor)}"
        )
    if check_layers not in extractor._forward_pre_hooks.values():
        extractor.register_forward_pre_hook(check_layers)


def _classes(extractor: Any) -> str:
    layers = getattr(extractor, "roi_layers", None) or ()
    return ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
