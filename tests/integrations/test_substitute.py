"""Substitutes on a small framework of their own: sites, errors, what is missing, names rebound."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from truncdet.integrations._patch import Patch, Plan
from truncdet.integrations._rebound import rebound
from truncdet.integrations._roi import Notices
from truncdet.integrations._substitute import Substitute, Substitution

import truncdet

SOURCE = """
import functools
import torch

SCALE = 10

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

double = Double.apply

def triple(x):
    return 3 * x

def decorated(method):
    @functools.wraps(method)
    def wrapper(self, *args):
        return method(self, *args) + 100
    return wrapper

class Layer:
    def forward(self, x, *, more=1):
        return SCALE * double(x) + Double.apply(x) + triple(x) * more

    @decorated
    def wrapped(self, x):
        return triple(x)

    def calls_nothing(self, x):
        return self.forward(x)
"""
IN_PLACE_OF_DOUBLE = Substitute("some.ops", "double", lambda x: x + 1000, "Double", part="Double")
IN_PLACE_OF_TRIPLE = Substitute(
    "some.ops", "triple", lambda x: None if x.dim() == 0 else x + 2000, part="triple"
)
TABLE = (IN_PLACE_OF_DOUBLE, IN_PLACE_OF_TRIPLE)
X = torch.ones(2)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, module = types.ModuleType("some"), types.ModuleType("some.ops")
    package.__version__ = "1.0"  # type: ignore[attr-defined]
    for name, made in (("some", package), ("some.ops", module)):
        monkeypatch.setitem(sys.modules, name, made)
    exec(SOURCE, vars(module))
    for name in ("double", "triple"):
        setattr(package, name, vars(module)[name])
    return module


class Switch:
    """A patch of the framework with a table of substitutes."""

    def __init__(self, table: tuple[Substitute, ...] = TABLE) -> None:
        self.on = True
        self.substitution = Substitution("me", "some", table, lambda: self.on)
        self.patch: Patch[str] = Patch(
            "me", "some", ((1,), (2,)), lambda mode: Plan(self.substitution.sites())
        )


@pytest.fixture
def switch(ops: Any) -> Iterator[Switch]:
    made = Switch()
    yield made
    made.patch.undo()


def value(x: Tensor) -> float:
    return float(x.flatten()[0])


def test_all_names_and_apply_are_ours_and_the_very_originals_again(
    ops: Any, switch: Switch
) -> None:
    before = ops.double, ops.triple, dict(vars(ops.Double))
    switch.patch.apply("on")
    package = sys.modules["some"]
    for double in (ops.double, package.double, ops.Double.apply):
        assert value(double(X)) == 1001
    assert value(ops.triple(X)) == value(package.triple(X)) == 2001
    switch.patch.undo()
    assert (ops.double, ops.triple) == before[:2] and dict(vars(ops.Double)) == before[2]
    assert value(ops.double(X)) == 2 and value(ops.triple(X)) == 3


def test_a_call_that_ours_does_not_take_goes_to_the_original(ops: Any, switch: Switch) -> None:
    switch.patch.apply("on")
    assert value(ops.triple(torch.tensor(1.0))) == 3
    assert ops.triple(5) == 15  # no tensor: the original, or its error


def test_it_obeys_what_is_in_force_at_the_call(ops: Any, switch: Switch) -> None:
    switch.patch.apply("on")
    ours = ops.double
    switch.on = False
    assert value(ours(X)) == value(ops.Double.apply(X)) == 2


def test_pickles_of_ours_load_as_the_original(ops: Any, switch: Switch) -> None:
    switch.patch.apply("on")
    assert (ops.double.__module__, ops.double.__qualname__) == ("some.ops", "double")
    assert switch.substitution.replacement(IN_PLACE_OF_DOUBLE) is ops.double


def test_our_own_wrapped_by_somebody_may_stand(ops: Any, switch: Switch) -> None:
    switch.patch.apply("on")
    inner = ops.triple
    ops.triple = functools.wraps(inner)(lambda x: inner(x) + 1)
    with pytest.warns(RuntimeWarning, match="replaced by someone else"):
        switch.patch.undo()
    switch.patch.apply("on")
    assert value(ops.triple(X)) == 2002


def test_a_foreign_function_is_refused_and_nothing_changes(ops: Any, switch: Switch) -> None:
    original = ops.double
    for name in ("double", "triple"):
        held = vars(ops)[name]
        setattr(ops, name, lambda x: x)
        said = f"me: some.ops.{name} must be some's own {name} to be patched"
        with pytest.raises(truncdet.TruncdetError, match=said):
            switch.patch.apply("on")
        setattr(ops, name, held)
        assert ops.double is original and switch.patch.mode == "off"


def test_what_the_framework_lacks(ops: Any) -> None:
    lacking = Switch(
        (
            Substitute("some.missing", "f", lambda x: x),
            Substitute("some.ops", "triple", lambda x: x, needs="_C"),
        )
    )
    triple = ops.triple
    lacking.patch.apply("on")
    assert ops.triple is triple
    lacking.patch.undo()
    renamed = Switch((Substitute("some.ops", "double", lambda x: x, "Doubled"),))
    with pytest.raises(truncdet.TruncdetError, match=r"some\.ops\.Doubled must be some's own"):
        renamed.patch.apply("on")
    assert renamed.patch.mode == "off"


def test_a_foreign_device_is_said_once_by_name(ops: Any, switch: Switch) -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    switch.patch.apply("on")
    x = X.as_subclass(Elsewhere)
    with pytest.warns(RuntimeWarning, match="me: triple with device mps uses the origi") as caught:
        assert value(ops.triple(x)) == 3 and value(ops.triple(x)) == 3
    assert len(caught) == 1


def copied(method: Callable[..., Any]) -> Any:
    return rebound(method, TABLE, Notices("{reason}"))


def test_a_rebound_method_calls_ours_and_the_module_stays(ops: Any) -> None:
    layer, before = ops.Layer(), dict(vars(ops))
    method = copied(ops.Layer.forward)
    assert value(method(layer, X)) == 10 * 1001 + 1001 + 2001
    assert value(method(layer, X, more=2)) == 10 * 1001 + 1001 + 2 * 2001
    assert vars(ops) == before and value(layer.forward(X)) == 20 + 2 + 3
    assert method.__qualname__ == ops.Layer.forward.__qualname__
    assert method.__module__ == ops.Layer.forward.__module__


def test_decorators_stay_around_it(ops: Any) -> None:
    layer, method = ops.Layer(), copied(ops.Layer.wrapped)
    assert value(method(layer, X)) == 2101 and value(layer.wrapped(X)) == 103
    assert value(method.__wrapped__(layer, X)) == 2001


def test_a_method_without_operators_is_not_rebound(ops: Any) -> None:
    assert copied(ops.Layer.calls_nothing) is None
    assert copied(ops.decorated(ops.Layer.calls_nothing)) is None


def test_what_ours_does_not_take_goes_to_what_the_module_has_then(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = copied(ops.Layer.wrapped)
    monkeypatch.setattr(ops, "triple", lambda x: x * 7)
    assert value(method(ops.Layer(), torch.tensor(1.0))) == 107
