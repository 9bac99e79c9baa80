"""The frameworks that the switch patches: which of them are installed, and entering their patches.

What is not installed is never imported, and neither is anything for mode 'off'. What is installed
but cannot be imported, such as mmcv without its operators, becomes a note and a row of the status
table: the program may well not use it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from truncdet._seed import saved_host_states

# The modules of each that must import, and what they must define, for there to be something to
# patch. mmdet's patch claims mmcv's, which both may hold.
_TORCHVISION = {"torchvision.ops": (), "torchvision.ops.roi_align": ("roi_align",)}
_MMCV = {
    "mmcv.ops": (),
    "mmcv.ops.roi_align": ("roi_align", "RoIAlign", "RoIAlignFunction"),
}
_EXTRACTORS = "mmdet.models.roi_heads.roi_extractors"
_MMDET = {_EXTRACTORS: ("BaseRoIExtractor", "SingleRoIExtractor")}
_PROBES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"torch": ()},
    "torchvision": _TORCHVISION,
    "mmdet": {"mmdet.models": (), **_MMDET, "mmengine": (), **_MMCV},
    "mmcv": _MMCV,
    "detectron2": {
        **_TORCHVISION,
        "detectron2.layers": (),
        "detectron2.layers.roi_align": ("roi_align", "ROIAlign"),
    },
}
FRAMEWORKS = tuple(_PROBES)
# mmdet's public module also registers a config key and a hook, which nobody asked the switch for.
_PATCHES = {"mmdet": "_mmdet_patch", "torch": "aten"}


def installed(name: str) -> bool:
    """Returns whether a top-level package can be found, without importing it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def integration(name: str) -> Any:
    """Returns our module for a framework if it has been imported, else None."""
    return sys.modules.get(integration_name(name))


def integration_name(name: str) -> str:
    """Returns the name of the module that patches a framework."""
    return f"truncdet.integrations.{_PATCHES.get(name, name)}"


def mode_of(name: str) -> str:
    """Returns the mode in which a framework is patched; imports nothing."""
    module = integration(name)
    return "off" if module is None else str(module.mode())


def _mode_for(name: str, mode: str) -> str:
    """Returns the mode of a framework's patch: aten's operators know nothing between both ends."""
    return "off" if (name, mode) == ("torch", "truncate") else mode


def check_frameworks(frameworks: Iterable[str] | None, where: str) -> tuple[str, ...] | None:
    """Returns the names in the order of `FRAMEWORKS`; None, for all installed ones, stays None."""
    if frameworks is None:
        return None
    if isinstance(frameworks, str) or not isinstance(frameworks, Iterable):
        raise TypeError(f"{where}: frameworks must be None or a list of names, got {frameworks!r}")
    names = tuple(frameworks)
    for name in names:
        if name not in FRAMEWORKS:
            raise ValueError(
                f"{where}: frameworks must be among {', '.join(FRAMEWORKS)}, got {name!r}"
            )
        if not installed(name):
            raise ValueError(f"{where}: frameworks must be installed, got {name!r}, which is not")
    return tuple(name for name in FRAMEWORKS if name in names)


def enter_patches(undo: ExitStack, mode: str, names: tuple[str, ...] | None) -> dict[str, str]:
    """Patches until `undo` unwinds; returns what could not be imported and why."""
    failures = {}
    for name in FRAMEWORKS if names is None else names:
        wanted = _mode_for(name, mode)
        if wanted == "off":
            module = integration(name)
        elif names is not None or installed(name):
            error = _import_error(_PROBES[name])
            if error is not None:
                failures[name] = error
                continue
            module = importlib.import_module(integration_name(name))
        else:
            module = None
        if module is not None:
            undo.enter_context(module.patched(wanted))
    return failures


def _import_error(probes: dict[str, tuple[str, ...]]) -> str | None:
    """Imports a framework's modules; returns the first error in one line if there is one."""
    for module, names in probes.items():
        error = _module_error(module)
        if error is not None:
            return error
        for name in names:
            if name not in vars(sys.modules[module]):
                return f"ImportError: {module} does not define {name}"
    return None


def _module_error(module: str) -> str | None:
    """Imports one module; returns its error.

    Any exception counts: frameworks raise AssertionError for the versions of each other, OSError
    for a library that does not load, AttributeError where a newer NumPy has dropped a name, and
    some call sys.exit().
    """
    if sys.modules.get(module) is not None:
        return None
    # Some frameworks draw from `random` while they are imported.
    restore = saved_host_states()
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text}"
    finally:
        restore()
    return None
