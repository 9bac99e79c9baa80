"""Claims: several owners of one patch, each of whom gives back only its own.

mmdet's layers are mmcv's, so two integrations switch mmcv's patch. If each put back the mode it
found, leaving in another order than entering would strand the patch in a mode that nobody wants.
Instead the patch has the mode of the latest claim that is still held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from truncdet.integrations._patch import Patch
from truncdet.integrations._roi import OFF, Recipe


@dataclass(frozen=True, eq=False)
class _Token:
    owner: str
    block: bool  # of a `with` block; otherwise from a call of `patch`


class Claims:
    """Who holds which recipe for one patch.

    Args:
        patch: is switched by nobody else.
    """

    def __init__(self, patch: Patch[Recipe]) -> None:
        self._patch = patch
        self.lock = patch.lock
        self._held: dict[_Token, Recipe] = {}  # the latest last

    def of(self, owner: str) -> Recipe:
        """Returns the recipe of the owner's latest claim; `OFF` if there is none."""
        token = self._latest(owner)
        return OFF if token is None else self._held[token]

    def set(self, owner: str, recipe: Recipe, *, allow_untested: bool = False) -> None:
        """Makes a recipe the owner's claim: that of its innermost open block, if there is one.

        After an exception every claim is what it was.
        """
        with self.lock:
            before = dict(self._held)
            token = self._latest(owner) or _Token(owner, block=False)
            self._held.pop(token, None)
            if token.block or recipe != OFF:
                self._held[token] = recipe
            self._settle(before, allow_untested)

    @contextmanager
    def scope(self, owner: str, recipe: Recipe, *, allow_untested: bool = False) -> Iterator[None]:
        """Holds a claim within a block; 'off' is a claim too, so it counts inside other blocks."""
        token = _Token(owner, block=True)
        with self.lock:
            before = dict(self._held)
            self._held[token] = recipe
            self._settle(before, allow_untested)
        try:
            yield
        finally:
            with self.lock:
                before = dict(self._held)
                del self._held[token]
                self._settle(before, True)  # it was allowed when it was claimed

    def _latest(self, owner: str) -> _Token | None:
        return next((token for token in reversed(self._held) if token.owner == owner), None)

    def _settle(self, before: dict[_Token, Recipe], allow_untested: bool) -> None:
        wanted = next(reversed(self._held.values()), OFF)
        try:
            self._patch.apply(wanted, allow_untested=allow_untested)
        except BaseException:
            # A warning that was turned into an exception comes after the switch.
            if self._patch.mode != wanted:
                self._held = before
            raise
