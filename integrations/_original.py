"""What stands where a framework's own function should: the function itself, or somebody's wrapper.

A patch finds its places by the function that they hold. Where a wrapper stands in for the function
it would find none, and cover nothing while it says that it does; so that is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from truncdet._errors import TruncdetError


def check_original(
    module: str,
    is_original: Callable[[Any], bool],
    ours: object,
    who: str,
    name: str = "roi_align",
) -> None:
    """Raises unless a framework's own module holds its function.

    Args:
        module: the key of the module in sys.modules.
        is_original: whether something is the framework's function.
        ours: our replacement; what wraps that, by `__wrapped__`, obeys our modes and may stand.
        who: speaks in the message.
        name: the name that the module has the function under.

    Raises:
        TruncdetError: if something else stands there.
    """
    found = vars(importlib.import_module(module)).get(name)
    if not is_original(found) and not _wraps(found, ours):
        raise not_original(module, found, who, name)


def not_original(module: str, found: object, who: str, name: str = "roi_align") -> TruncdetError:
    """Returns the error for something else than the framework's function."""
    framework = module.partition(".")[0]
    return TruncdetError(
        f"{who}: {module}.{name} must be {framework}'s own {name} to be patched, got {found!r}"
    )


def _wraps(found: Any, ours: object) -> bool:
    while found is not None:
        if found is ours:
            return True
        found = getattr(found, "__wrapped__", None)
    return False
