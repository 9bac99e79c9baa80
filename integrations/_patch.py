"""Scoped patches of other packages: stated target and versions, all or nothing, undone exactly.

A `Patch` knows a package, the version range it was tested with, and how to plan one mode: which
attributes of modules and classes become what, and which dispatcher kernels are overridden. Patches
are global to the process, like the modules they change; the lock only keeps concurrent calls from
interleaving.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from truncdet.integrations._sites import Applied, execute, revert
from truncdet.integrations._sites import Kernel as Kernel
from truncdet.integrations._sites import Plan as Plan
from truncdet.integrations._sites import Site as Site
from truncdet.integrations._sites import sites_of as sites_of

from truncdet._errors import TruncdetError

Version = tuple[int, ...]
Mode = TypeVar("Mode")

_ENV = "TRUNCDET_ALLOW_UNTESTED"


def parse_version(text: str) -> Version:
    """Returns the leading numbers of a version: '0.29.1+cu130' is (0, 29, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise ValueError(f"parse_version: text must start with a number, got {text!r}")
    return tuple(int(part) for part in match.group().split("."))


def _within(version: str | None, low: Version, high: Version) -> bool:
    """Returns whether a version is in a range; one that has no numbers is not."""
    try:
        return version is not None and low <= parse_version(version) < high
    except ValueError:
        return False


def untested_allowed(argument: bool) -> bool:
    """Returns whether untested versions may be patched: by argument or TRUNCDET_ALLOW_UNTESTED."""
    value = os.environ.get(_ENV, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_ENV} must be 0 or 1, got {value!r}")
    return argument or value == "1"


class Patch(Generic[Mode]):
    """The patch of one package; `mode` equals `off` while nothing is changed.

    Args:
        name: who speaks in messages, for example `truncdet.integrations.torchvision`.
        package: the package to import and patch.
        tested: first tested version and first version beyond the tested ones.
        plan: called with a mode that is not `off` once the package is imported.
        off: the mode that changes nothing.
    """

    def __init__(
        self,
        name: str,
        package: str,
        tested: tuple[Version, Version],
        plan: Callable[[Mode], Plan],
        off: Mode = "off",  # type: ignore[assignment]
    ) -> None:
        self.name, self.package, self.tested = name, package, tested
        self.off = self.mode = off
        self._plan = plan
        self._applied = Applied()
        self.lock = threading.RLock()

    def version(self) -> str | None:
        """Returns the version of the package, imported if it is not yet; None if it has none."""
        module = importlib.import_module(self.package)
        found = getattr(module, "__version__", None)
        if found:
            return str(found)
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def check_version(self, allow_untested: bool = False) -> None:
        """Raises TruncdetError outside the tested range, unless that is allowed."""
        allowed = untested_allowed(allow_untested)
        found = self.version()
        low, high = self.tested
        if not _within(found, low, high) and not allowed:
            low_text, high_text = (".".join(map(str, v)) for v in self.tested)
            raise TruncdetError(
                f"{self.name}: {self.package} must be >= {low_text} and < {high_text}, the tested "
                f"range, got {found or 'no version'}; allow_untested=True or {_ENV}=1 patches it "
                "all the same"
            )

    def apply(self, mode: Mode, *, allow_untested: bool = False) -> None:
        """Switches to `mode`: all of its changes or, after an exception, the previous mode's."""
        with self.lock:
            if mode == self.mode:
                return
            if mode != self.off:
                self.check_version(allow_untested)
            # Undone before planning: a plan finds its sites by the functions they hold.
            undone, lost = revert(self._applied)
            self._applied = Applied()
            try:
                try:
                    plan = Plan() if mode == self.off else self._plan(mode)
                    self._applied = execute(plan, self.name)
                except BaseException:
                    self._applied = execute(undone, self.name)
                    raise
                self.mode = mode
            finally:
                self._warn(lost)

    def _warn(self, lost: list[Site]) -> None:
        """Comes last, since a warning may be an exception: the state is then what `mode` says."""
        for site in lost:
            warnings.warn(
                f"{self.name}: {site.module}.{site.name} was replaced by someone else since it was "
                "patched and is left as it is",
                RuntimeWarning,
                stacklevel=4,
            )

    def undo(self) -> bool:
        """Puts everything back; returns False if nothing was patched."""
        with self.lock:
            if self.mode == self.off:
                return False
            self.apply(self.off)
            return True

    @contextmanager
    def scope(self, mode: Mode, *, allow_untested: bool = False) -> Iterator[None]:
        """Patches within a block; afterwards the mode before it holds again."""
        with self.lock:
            previous = self.mode
            self.apply(mode, allow_untested=allow_untested)
        try:
            yield
        finally:
            # The previous mode was allowed when it was first applied.
            self.apply(previous, allow_untested=True)
