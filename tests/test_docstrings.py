"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch
import torchvision
import truncdet.integrations
from _frameworks import framework, installed

import truncdet

MODULES = [
    module.name
    for package in (truncdet, truncdet.integrations)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__") and "_C" not in module.name
]


def needed(name):
    """The framework without which a module's examples cannot run, if there is one."""
    return next((known for known in ("detectron2", "mmdet", "mmcv") if known in name), "torch")


RUNNABLE = [name for name in MODULES if needed(name) == "torch" or installed(needed(name))]


def run(module):
    """Failures and examples of one module, its names and the two packages at hand."""
    names = {**vars(module), "truncdet": truncdet, "torch": torch, "torchvision": torchvision}
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, extraglobs=names, optionflags=options)
    return result.failed, result.attempted


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    if name not in RUNNABLE:
        framework(needed(name))
    failed, _ = run(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    """A search that found nothing would pass too."""
    assert sum(run(importlib.import_module(name))[1] for name in RUNNABLE) > 30


def test_a_wrong_example_fails():
    module = type(truncdet)("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n"
    assert run(module) == (1, 1)
