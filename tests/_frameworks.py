"""Tests on the real frameworks: skipped where one is absent, failed where it was promised.

framework("mmdet")              # at the top of a module, before the module imports it itself
@requires("mmdet")              # on one test or class
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import pytest

EXPECT = "TRUNCDET_EXPECT_FRAMEWORKS"
NAMES = ("torchvision", "mmcv", "mmengine", "mmdet", "detectron2")


def installed(name: str) -> bool:
    """Returns whether a framework is there, importable or not; nothing is imported."""
    if name not in NAMES:
        raise ValueError(f"framework: name must be one of {', '.join(NAMES)}, got {name!r}")
    return importlib.util.find_spec(name) is not None


def expected() -> bool:
    """Returns whether TRUNCDET_EXPECT_FRAMEWORKS promises that all of them are installed."""
    value = os.environ.get(EXPECT, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{EXPECT} must be 0 or 1, got {value!r}")
    return value == "1"


def framework(name: str) -> ModuleType:
    """Returns the imported framework; skips the calling module or test where it is absent.

    One that is installed and cannot be imported is an error, never a skip.
    """
    if not installed(name):
        if expected():
            pytest.fail(f"{name} is not installed, and {EXPECT}=1 promises it", pytrace=False)
        pytest.skip(f"{name} is not installed: `make frameworks`", allow_module_level=True)
    return importlib.import_module(name)


def requires(name: str) -> pytest.MarkDecorator:
    """Marks one test or class as `framework(name)` does a module."""
    installed(name)  # a misspelt name is an error here, not a test that never runs
    return pytest.mark.framework(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The hook behind `requires`; conftest.py has it under this name."""
    for mark in item.iter_markers("framework"):
        framework(*mark.args)
