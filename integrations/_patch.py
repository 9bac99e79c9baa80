"""Scoped patches of other packages: stated target and versions, all or nothing, undone exactly.

A `Patch` knows a package, the version range it was tested with, and how to plan one mode: which
module attributes become what, and which dispatcher kernels are overridden. Patches are global to
the process, like the modules they change; the lock only keeps concurrent calls from interleaving.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from truncdet._errors import TruncdetError

Version = tuple[int, ...]

_ENV = "TRUNCDET_ALLOW_UNTESTED"
# torch says this once per process for the first overridden kernel of all; it is what we are after.
_OVERRIDE_WARNING = r"(?s).*other operators may also be overridden"


@dataclass(frozen=True)
class Site:
    """One attribute to replace. `module` is a key of sys.modules, never an attribute path: a
    package often hides a submodule behind a function of the same name."""

    module: str
    name: str
    new: object


@dataclass(frozen=True)
class Kernel:
    """One dispatcher kernel to override, for example `torchvision::_roi_align_backward` on CPU."""

    op: str
    key: str
    fn: Callable[..., Any]


@dataclass(frozen=True)
class Plan:
    """What one mode changes."""

    sites: tuple[Site, ...] = ()
    kernels: tuple[Kernel, ...] = ()


@dataclass
class _Applied:
    sites: list[tuple[ModuleType, Site, object]] = field(default_factory=list)
    kernels: list[tuple[Any, Kernel]] = field(default_factory=list)


def parse_version(text: str) -> Version:
    """Returns the leading numbers of a version: '0.29.1+cu130' is (0, 29, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise ValueError(f"parse_version: text must start with a number, got {text!r}")
    return tuple(int(part) for part in match.group().split("."))


def untested_allowed(argument: bool) -> bool:
    """Returns whether untested versions may be patched: by argument or TRUNCDET_ALLOW_UNTESTED."""
    value = os.environ.get(_ENV, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_ENV} must be 0 or 1, got {value!r}")
    return argument or value == "1"


class Patch:
    """The patch of one package; `mode` is 'off' while nothing is changed.

    Args:
        name: who speaks in messages, for example `truncdet.integrations.torchvision`.
        package: the package to import and patch.
        tested: first tested version and first version beyond the tested ones.
        plan: called with a mode that is not 'off' once the package is imported.
    """

    def __init__(
        self, name: str, package: str, tested: tuple[Version, Version], plan: Callable[[str], Plan]
    ) -> None:
        self.name, self.package, self.tested = name, package, tested
        self.mode = "off"
        self._plan = plan
        self._applied = _Applied()
        self._lock = threading.RLock()

    def version(self) -> str:
        """Returns the version of the package, imported if it is not yet."""
        module = importlib.import_module(self.package)
        found = getattr(module, "__version__", None)
        return str(found) if found else importlib.metadata.version(self.package)

    def check_version(self, allow_untested: bool = False) -> None:
        """Raises TruncdetError outside the tested range, unless that is allowed."""
        allowed = untested_allowed(allow_untested)
        found = self.version()
        low, high = self.tested
        if not low <= parse_version(found) < high and not allowed:
            low_text, high_text = (".".join(map(str, v)) for v in self.tested)
            raise TruncdetError(
                f"{self.name}: {self.package} must be >= {low_text} and < {high_text}, the tested "
                f"range, got {found}; allow_untested=True or {_ENV}=1 patches it all the same"
            )

    def apply(self, mode: str, *, allow_untested: bool = False) -> None:
        """Switches to `mode`: all of its changes or, after an exception, the previous mode's."""
        with self._lock:
            if mode == self.mode:
                return
            if mode != "off":
                self.check_version(allow_untested)
            # Undone before planning: a plan finds its sites by the functions they hold.
            undone, lost = _revert(self._applied)
            self._applied = _Applied()
            try:
                try:
                    plan = Plan() if mode == "off" else self._plan(mode)
                    self._applied = _execute(plan, self.name)
                except BaseException:
                    self._applied = _execute(undone, self.name)
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
        with self._lock:
            if self.mode == "off":
                return False
            self.apply("off")
            return True

    @contextmanager
    def scope(self, mode: str, *, allow_untested: bool = False) -> Iterator[None]:
        """Patches within a block; afterwards the mode before it holds again."""
        with self._lock:
            previous = self.mode
            self.apply(mode, allow_untested=allow_untested)
        try:
            yield
        finally:
            # The previous mode was allowed when it was first applied.
            self.apply(previous, allow_untested=True)


def _execute(plan: Plan, who: str) -> _Applied:
    done = _Applied()
    try:
        for site in plan.sites:
            module = sys.modules.get(site.module)
            if module is None or site.name not in vars(module):
                raise TruncdetError(f"{who}: {site.module} must define {site.name} to be patched")
            old = vars(module)[site.name]
            setattr(module, site.name, site.new)
            done.sites.append((module, site, old))
        for kernel in plan.kernels:
            done.kernels.append((_override(kernel), kernel))
    except BaseException:
        _revert(done)
        raise
    return done


def _override(kernel: Kernel) -> Any:
    namespace, name = kernel.op.split("::")
    library: Any = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_OVERRIDE_WARNING, category=UserWarning)
        library.impl(name, kernel.fn, kernel.key)
    return library


def _revert(applied: _Applied) -> tuple[Plan, list[Site]]:
    """Undoes what still is ours.

    Returns it as a plan, so that it can be done again, and the sites that others have replaced.
    """
    # Destroying now, not when the object is collected: "undone" must hold on return.
    for library, _ in reversed(applied.kernels):
        library._destroy()
    undone, lost = [], []
    for module, site, old in reversed(applied.sites):
        if vars(module).get(site.name) is site.new:
            setattr(module, site.name, old)
            undone.append(site)
        else:
            lost.append(site)
    return Plan(tuple(reversed(undone)), tuple(kernel for _, kernel in applied.kernels)), lost
