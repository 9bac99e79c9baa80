"""Scopes of hooks: nothing that was opened after one goes with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet._scopes import stack
from truncdet._switch import Hold


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    yield
    assert not stack and not tv.is_patched()
    assert torch.backends.cudnn.deterministic == before


def test_a_forgotten_hold_takes_nothing_with_it() -> None:
    hold = Hold(frameworks=["torchvision"])
    scope = hold._scope
    truncdet.enable()
    del hold
    gc.collect()
    assert tv.mode() == "fixed_point" and torch.backends.cudnn.deterministic
    assert truncdet.disable()
    assert stack == [scope] and tv.mode() == "fixed_point"
    with truncdet.deterministic(mode="off"):
        assert tv.mode() == "off"
    truncdet._switch._release(scope)


def test_what_was_opened_inside_a_hold_outlives_it_and_puts_its_state_back() -> None:
    hold = Hold(mode="truncate", frameworks=["torchvision"])
    truncdet.enable()
    hold.close()
    assert tv.mode() == "fixed_point" and torch.backends.cudnn.deterministic
    assert truncdet.disable()


def test_holds_may_end_in_any_order() -> None:
    order: list[str] = []
    holds = {name: Hold(frameworks=()) for name in "abc"}
    for name, hold in holds.items():
        hold.callback(order.append, name)
    holds["b"].close()
    holds["a"].close()
    assert order == []
    holds["c"].close()
    assert order == ["c", "b", "a"]
    holds["c"].close()
    assert order == ["c", "b", "a"]


def test_the_innermost_hold_ends_at_once() -> None:
    with truncdet.deterministic(frameworks=()):
        hold = Hold(frameworks=["torchvision"])
        assert tv.is_patched()
        hold.close()
        assert not tv.is_patched()


def test_a_hold_that_cannot_open_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="mode"):
        Hold(mode="snap")
