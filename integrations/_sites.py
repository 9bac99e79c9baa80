"""What a patch changes: attributes of modules and classes, and dispatcher kernels; done and undone.

A `Plan` is data; `execute` does it and `revert` undoes what still is ours.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from truncdet._errors import TruncdetError

# torch says this once per process for the first overridden kernel of all; it is what we are after.
_OVERRIDE_WARNING = r"(?s).*other operators may also be overridden"

# In place of the old value where a class only inherited the attribute.
_INHERITED = object()


@dataclass(frozen=True)
class Site:
    """One attribute to replace. `module` is a key of sys.modules, never an attribute path: a
    package often hides a submodule behind a function of the same name. `name` may lead through
    classes: 'RoIAlign.forward'. An attribute that the class only inherits becomes its own, and is
    deleted again on undo."""

    module: str
    name: str
    new: object


@dataclass(frozen=True)
class Kernel:
    """One dispatcher kernel to override, for example `torchvision::_roi_align_backward` on CPU.

    With `around`, `fn` gets two arguments before the operator's own: the kernel that it overrides
    and the dispatch keys, and leaves a call to it by `original.call_boxed(keys, *args, **kwargs)`.
    """

    op: str
    key: str
    fn: Callable[..., Any]
    around: bool = False


@dataclass(frozen=True)
class Plan:
    """What one mode changes."""

    sites: tuple[Site, ...] = ()
    kernels: tuple[Kernel, ...] = ()


@dataclass(eq=False)
class Applied:
    """What was changed: owner, site and old value; library that overrides, and kernel."""

    sites: list[tuple[Any, Site, object]] = field(default_factory=list)
    kernels: list[tuple[Any, Kernel]] = field(default_factory=list)


_in_force: list[Applied] = []


def sites_of(value: object, new: object, *packages: str) -> tuple[Site, ...]:
    """Returns a site for every module global that is `value`, under whatever name it was imported.

    Args:
        value: what is looked for, by identity.
        new: what it becomes.
        packages: look only in these packages and what is below them; default: everywhere.
    """
    return sites_becoming(((value, new),), *packages)


def sites_becoming(changes: Iterable[tuple[object, object]], *packages: str) -> tuple[Site, ...]:
    """As `sites_of`, for several pairs of a value and what it becomes, in one walk."""
    # The values are kept by the pairs, so no other object can have the identity of one.
    pairs = list(changes)
    becoming = {id(value): new for value, new in pairs}
    return tuple(
        Site(module_name, name, becoming[id(held)])
        for module_name, _, names in _module_globals()
        if not packages
        or any(module_name == p or module_name.startswith(f"{p}.") for p in packages)
        for name, held in names
        if id(held) in becoming
    )


def _module_globals() -> Iterator[tuple[str, ModuleType, list[tuple[str, object]]]]:
    for module_name, module in list(sys.modules.items()):
        # By type and past __getattribute__: looking at a lazy module must not import it.
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")
            yield module_name, module, list(names.items())


def execute(plan: Plan, who: str) -> Applied:
    """Does all of the plan or, after an exception, nothing of it; `who` speaks in messages."""
    done = Applied()
    _in_force.append(done)
    try:
        for site in plan.sites:
            owner, name, old = _find(site, who)
            setattr(owner, name, site.new)
            done.sites.append((owner, site, old))
        for kernel in plan.kernels:
            done.kernels.append((_override(kernel), kernel))
    except BaseException:
        revert(done)
        raise
    return done


def _find(site: Site, who: str) -> tuple[Any, str, object]:
    """Returns the owner of the attribute, the attribute's name and what the owner has there."""
    owner: Any = sys.modules.get(site.module)
    *path, name = site.name.split(".")
    for part in path:
        owner = None if owner is None else vars(owner).get(part)
    if owner is not None and name in vars(owner):
        # Not getattr, which would bind static and class methods.
        return owner, name, vars(owner)[name]
    if isinstance(owner, type) and hasattr(owner, name):
        return owner, name, _INHERITED
    raise TruncdetError(f"{who}: {site.module} must define {site.name} to be patched")


def _override(kernel: Kernel) -> Any:
    namespace, name = kernel.op.split("::")
    library: Any = torch.library.Library(namespace, "IMPL")
    fn = kernel.fn
    if kernel.around:
        fn = functools.partial(fn, torch.library.get_kernel(kernel.op, kernel.key))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_OVERRIDE_WARNING, category=UserWarning)
        # Over somebody else's Python kernel too, which torch 2.11 refuses unless told.
        library.impl(name, fn, kernel.key, with_keyset=kernel.around, allow_override=True)
    return library


def revert(applied: Applied) -> tuple[Plan, list[Site]]:
    """Undoes what still is ours.

    Returns it as a plan, so that it can be done again, and the sites that others have replaced.
    """
    if applied in _in_force:  # a patch that never was applied has an empty record
        _in_force.remove(applied)
    # Destroying now, not when the object is collected: "undone" must hold on return.
    for library, _ in reversed(applied.kernels):
        library._destroy()
    undone, lost = [], []
    for owner, site, old in reversed(applied.sites):
        name = site.name.rpartition(".")[2]
        if vars(owner).get(name) is not site.new:
            lost.append(site)
            continue
        if old is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
        undone.append(site)
    # Functions alone: another module may well hold an equal constant for reasons of its own.
    olds = {
        id(site.new): old
        for owner, site, old in applied.sites
        if isinstance(owner, ModuleType) and callable(site.new)
    }
    if olds:
        undone += _revert_later_imports(olds)
        _hand_on(olds)
    return Plan(tuple(reversed(undone)), tuple(kernel for _, kernel in applied.kernels)), lost


def _revert_later_imports(olds: dict[int, object]) -> list[Site]:
    """Puts the originals into modules that imported ours while it was in their place."""
    late = []
    for module_name, module, names in _module_globals():
        for name, held in names:
            if id(held) in olds:
                setattr(module, name, olds[id(held)])
                late.append(Site(module_name, name, held))
    return late


def _hand_on(olds: dict[int, object]) -> None:
    """Other patches that found ours in a module and will put it back put the original there."""
    for other in _in_force:
        other.sites = [(owner, site, olds.get(id(old), old)) for owner, site, old in other.sites]
