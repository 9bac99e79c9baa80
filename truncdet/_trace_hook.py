"""What a recording registers with modules and optimizers, in a form that can be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook of a recording; in copies and pickles of the module it does nothing."""

    __slots__ = ("_see",)

    def __init__(self, see: Callable[..., None] | None = None) -> None:
        self._see = see

    def __call__(self, *arguments: Any) -> None:
        if self._see is not None:
            self._see(*arguments)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
