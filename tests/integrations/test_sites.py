"""What a patch changes: attributes of classes, and every global that is one function; and back."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
from truncdet.integrations._patch import Patch, Plan, Site, sites_of

import truncdet


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return imports(monkeypatch, "somepackage", __version__="1.4", f="f", g="g")


def plan(mode: str) -> Plan:
    return Plan((Site("somepackage", "f", f"f {mode}"), Site("somepackage", "g", f"g {mode}")))


def make(how: Callable[[str], Plan] = plan) -> Patch[str]:
    return Patch("me", "somepackage", ((1, 2), (1, 10)), how)


def names(package: types.ModuleType) -> tuple[object, object]:
    return package.f, package.g


def imports(monkeypatch: pytest.MonkeyPatch, name: str, **values: object) -> types.ModuleType:
    """A module of that name that holds these globals."""
    module = types.ModuleType(name)
    vars(module).update(values)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Base:
    def __call__(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"


class Layer(Base):
    def forward(self) -> str:
        return "forward"

    class Inner:
        value = "inner"


def in_class(name: str, new: object) -> Patch[str]:
    return make(lambda mode: Plan((Site(__name__, f"Layer.{name}", new),)))


def test_a_class_is_patched_for_the_objects_that_exist(package: types.ModuleType) -> None:
    layer, before = Layer(), vars(Layer)["forward"]
    with in_class("forward", lambda self: "new").scope("a"):
        assert layer.forward() == Layer().forward() == "new"
    assert layer.forward() == "forward"
    assert vars(Layer)["forward"] is before


def test_what_a_class_inherits_becomes_its_own_and_is_deleted_again(
    package: types.ModuleType,
) -> None:
    layer = Layer()
    for name in ("__call__", "static"):
        patch = in_class(name, staticmethod(lambda *_: "new"))
        for _ in range(2):
            with patch.scope("a"):
                assert name in vars(Layer)
                assert (layer() if name == "__call__" else layer.static()) == "new"
                assert Base()() == "base" and Base.static() == "static"
            assert name not in vars(Layer)
    assert layer() == "base" and layer.static() == "static"


def test_static_and_class_methods_come_back_as_they_were(package: types.ModuleType) -> None:
    before = vars(Base)["static"]
    with make(lambda mode: Plan((Site(__name__, "Base.static", len),))).scope("a"):
        assert vars(Base)["static"] is len
    assert vars(Base)["static"] is before and isinstance(before, staticmethod)


def test_classes_nest(package: types.ModuleType) -> None:
    with in_class("Inner.value", "new").scope("a"):
        assert Layer.Inner.value == "new"
    assert Layer.Inner.value == "inner"


@pytest.mark.parametrize("name", ["Layer.missing", "Missing.forward", "Layer.Missing.forward"])
def test_classes_must_define_what_is_patched(name: str, package: types.ModuleType) -> None:
    patch = make(lambda mode: Plan((*plan(mode).sites, Site(__name__, name, 0))))
    with pytest.raises(truncdet.TruncdetError, match=f"must define {name} to be patched"):
        patch.apply("a")
    assert (patch.mode, names(package)) == ("off", ("f", "g"))


def test_an_inherited_attribute_that_someone_else_replaced_since_is_left(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs(self: Layer) -> str:
        return "theirs"

    patch = in_class("__call__", lambda self: "new")
    patch.apply("a")
    monkeypatch.setattr(Layer, "__call__", theirs)
    with pytest.warns(RuntimeWarning, match=r"Layer\.__call__ was replaced by someone else"):
        patch.undo()
    assert Layer()() == "theirs"
    monkeypatch.undo()  # puts back what it found, which was ours
    del Layer.__call__
    assert Layer()() == "base"


# Out of module globals, where undoing puts the original in the place of ours.
held = types.SimpleNamespace(original=lambda: "original", ours=lambda: "ours")


def by_identity(mode: str) -> Plan:
    return Plan(sites_of(held.original, held.ours, "somepackage"))


def test_every_global_that_is_the_function_is_a_site(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports(monkeypatch, "somepackage.below", under_another_name=held.original, other=len)
    imports(monkeypatch, "somepackage2", f=held.original)
    monkeypatch.setitem(sys.modules, "somepackage.none", None)  # type: ignore[arg-type]
    package.f = held.original  # type: ignore[attr-defined]
    expected = {("somepackage", "f"), ("somepackage.below", "under_another_name")}
    found = sites_of(held.original, held.ours, "somepackage")
    assert {(site.module, site.name) for site in found} == expected
    assert all(site.new is held.ours for site in found)
    everywhere = {(site.module, site.name) for site in sites_of(held.original, held.ours)}
    assert everywhere == {*expected, ("somepackage2", "f")}


def test_looking_for_sites_imports_no_lazy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert sites_of(len, held.ours, "lazy") == ()
    monkeypatch.delitem(sys.modules, "lazy")


def test_modules_imported_while_patched_get_the_original_back(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.f = held.original  # type: ignore[attr-defined]
    patch = make(by_identity)
    patch.apply("a")
    late = imports(monkeypatch, "elsewhere", f=package.f, theirs=len)
    assert late.f is held.ours
    patch.undo()
    assert package.f is late.f is held.original and late.theirs is len


def test_a_failed_switch_patches_modules_imported_since_again(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(mode: str) -> Plan:
        if mode == "bad":
            raise OSError
        return by_identity(mode)

    package.f = held.original  # type: ignore[attr-defined]
    patch = make(failing)
    patch.apply("a")
    late = imports(monkeypatch, "elsewhere", f=package.f)
    with pytest.raises(OSError):
        patch.apply("bad")
    assert package.f is late.f is held.ours
    patch.undo()
    assert package.f is late.f is held.original


def test_equal_constants_elsewhere_are_left_alone(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = "a constant"
    patch = make(lambda mode: Plan((Site("somepackage", "f", constant),)))
    patch.apply("a")
    late = imports(monkeypatch, "elsewhere", f=constant)
    patch.undo()
    assert late.f is constant and package.f == "f"


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_two_patches_one_of_which_found_the_other_are_undone_in_any_order(
    first: str, package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outermost() -> str:
        return "outermost"

    package.f = held.original  # type: ignore[attr-defined]
    inner = make(by_identity)
    inner.apply("a")
    late = imports(monkeypatch, "elsewhere", f=package.f)
    outer = make(lambda mode: Plan(sites_of(held.ours, outermost, "elsewhere")))
    outer.apply("a")
    assert (package.f, late.f) == (held.ours, outermost)
    (inner if first == "inner" else outer).undo()
    assert (package.f, late.f) == (
        (held.original, outermost) if first == "inner" else (held.ours, held.ours)
    )
    (outer if first == "inner" else inner).undo()
    assert package.f is late.f is held.original


def test_what_a_module_only_computes_is_not_patched(package: types.ModuleType) -> None:
    package.__getattr__ = lambda name: "computed"  # type: ignore[attr-defined]
    patch = make(lambda mode: Plan((Site("somepackage", "lazy", 0),)))
    with pytest.raises(truncdet.TruncdetError, match="somepackage must define lazy to be patched"):
        patch.apply("a")
    assert package.lazy == "computed" and "lazy" not in vars(package)
