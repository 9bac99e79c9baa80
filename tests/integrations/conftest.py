"""What the tests of more than one integration need."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch


@pytest.fixture
def fresh_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.jit compiles a function and a class of modules once in a process, and asks us then."""
    cached = weakref.WeakKeyDictionary[Any, Any]()
    monkeypatch.setattr(torch.jit._state, "_jit_caching_layer", cached)
    store = torch.jit._recursive.ConcreteTypeStore()
    monkeypatch.setattr(torch.jit._recursive, "concrete_type_store", store)
