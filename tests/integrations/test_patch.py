"""The patch machinery: all or nothing, exact undo, nesting, versions, other people's patches."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from truncdet.integrations._patch import (
    Kernel,
    Patch,
    Plan,
    Site,
    parse_version,
    untested_allowed,
)

import truncdet

OP = "truncdet_patchtest::twice"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("somepackage")
    module.__version__ = "1.4.2+local"  # type: ignore[attr-defined]
    module.f, module.g = "f", "g"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somepackage", module)
    return module


@pytest.fixture
def operator() -> Iterator[None]:
    library = torch.library.Library("truncdet_patchtest", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    yield
    library._destroy()


def plan(mode: str) -> Plan:
    return Plan((Site("somepackage", "f", f"f {mode}"), Site("somepackage", "g", f"g {mode}")))


def make(how: Callable[[str], Plan] = plan) -> Patch[str]:
    return Patch("me", "somepackage", ((1, 2), (1, 10)), how)


def names(package: types.ModuleType) -> tuple[object, object]:
    return package.f, package.g


def test_apply_and_undo(package: types.ModuleType) -> None:
    patch = make()
    assert patch.undo() is False
    patch.apply("a")
    assert (patch.mode, names(package)) == ("a", ("f a", "g a"))
    assert patch.undo() is True
    assert (patch.mode, names(package)) == ("off", ("f", "g"))
    assert patch.undo() is False


def test_the_same_mode_again_changes_nothing_and_another_switches(
    package: types.ModuleType,
) -> None:
    patch = make()
    patch.apply("a")
    patch.apply("a")
    patch.apply("b")
    assert names(package) == ("f b", "g b")
    assert patch.undo() is True
    assert names(package) == ("f", "g")


def test_the_same_mode_again_leaves_a_later_patch_by_someone_else_alone(
    package: types.ModuleType,
) -> None:
    patch = make()
    patch.apply("a")
    package.f = "theirs"  # type: ignore[attr-defined]
    patch.apply("a")
    assert names(package) == ("theirs", "g a")


def test_scopes_nest_and_put_the_previous_mode_back(package: types.ModuleType) -> None:
    patch = make()
    with patch.scope("a"):
        with patch.scope("off"):
            assert names(package) == ("f", "g")
            with patch.scope("b"):
                assert names(package) == ("f b", "g b")
            assert names(package) == ("f", "g")
        assert names(package) == ("f a", "g a")
    assert names(package) == ("f", "g")


def test_an_exception_in_a_scope_puts_the_previous_mode_back(package: types.ModuleType) -> None:
    patch = make()
    with pytest.raises(KeyError), patch.scope("a"):
        raise KeyError
    assert (patch.mode, names(package)) == ("off", ("f", "g"))


@pytest.mark.parametrize("before", ["off", "a"])
def test_a_failure_half_way_leaves_the_mode_before_it(
    before: str, package: types.ModuleType
) -> None:
    def half(mode: str) -> Plan:
        if mode != "bad":
            return plan(mode)
        return Plan((*plan(mode).sites, Site("somepackage", "missing", 0)))

    patch = make(half)
    patch.apply(before)
    state = patch.mode, names(package)
    with pytest.raises(truncdet.TruncdetError, match="somepackage must define missing to be pat"):
        patch.apply("bad")
    assert (patch.mode, names(package)) == state
    patch.undo()
    assert names(package) == ("f", "g")


@pytest.mark.usefixtures("operator")
def test_a_kernel_that_cannot_be_registered_leaves_no_trace(package: types.ModuleType) -> None:
    def bad(mode: str) -> Plan:
        kernels = (Kernel(OP, "CPU", lambda x: 3 * x), Kernel(OP, "NoSuchKey", lambda x: x))
        return Plan(plan(mode).sites, kernels)

    patch, one = make(bad), torch.ones(1)
    with pytest.raises(RuntimeError, match="NoSuchKey"):
        patch.apply("a")
    assert (patch.mode, names(package)) == ("off", ("f", "g"))
    assert torch.ops.truncdet_patchtest.twice(one) == 2


@pytest.mark.usefixtures("operator")
def test_kernels_are_overridden_and_put_back(package: types.ModuleType) -> None:
    def kernels(mode: str) -> Plan:
        factor = {"three": 3, "four": 4}[mode]
        return Plan(kernels=(Kernel(OP, "CPU", lambda x: factor * x),))

    patch, one, twice = make(kernels), torch.ones(1), torch.ops.truncdet_patchtest.twice
    for _ in range(3):
        with patch.scope("three"):
            assert twice(one) == 3
            with patch.scope("four"):
                assert twice(one) == 4
            assert twice(one) == 3
        assert twice(one) == 2
    # At once, not when the garbage collector comes around.
    with patch.scope("three"):
        held = patch._applied
    assert held.kernels and twice(one) == 2


@pytest.mark.usefixtures("operator", "package")
def test_a_kernel_around_another_may_call_it() -> None:
    def around(original: Any, keys: Any, x: torch.Tensor) -> Any:
        return 10 * x if x > 1 else original.call_boxed(keys, x)

    def kernels(mode: str) -> Plan:
        return Plan(kernels=(Kernel(OP, "CPU", around, around=True),))

    patch, one, twice = make(kernels), torch.ones(1), torch.ops.truncdet_patchtest.twice
    before = torch._C._dispatch_dump(OP)
    with patch.scope("a"):
        assert (twice(one), twice(2 * one)) == (2, 20)
        with patch.scope("off"):
            assert twice(2 * one) == 4
        assert twice(2 * one) == 20
    assert twice(2 * one) == 4
    assert torch._C._dispatch_dump(OP) == before


@pytest.mark.usefixtures("package")
def test_only_the_notice_of_an_override_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = (
        "Warning only once for all operators,  other operators may also be overridden.\n"
        "  Overriding a previously registered kernel"
    )

    class Library:
        def __init__(self, *args: str) -> None: ...

        def impl(self, *args: object, **options: bool) -> None:
            warnings.warn(notice, UserWarning, stacklevel=2)
            warnings.warn("something else", UserWarning, stacklevel=2)

        def _destroy(self) -> None: ...

    monkeypatch.setattr(torch.library, "Library", Library)
    patch = make(lambda mode: Plan(kernels=(Kernel(OP, "CPU", len),)))
    with pytest.warns(UserWarning) as caught:
        patch.apply("a")
    assert [str(warning.message) for warning in caught] == ["something else"]


def test_a_later_patch_by_someone_else_is_not_undone(package: types.ModuleType) -> None:
    patch = make()
    patch.apply("a")
    package.f = "theirs"  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=r"me: somepackage\.f was replaced by someone else"):
        assert patch.undo() is True
    assert names(package) == ("theirs", "g")


def test_a_failed_switch_does_not_undo_someone_else_either(package: types.ModuleType) -> None:
    def failing(mode: str) -> Plan:
        if mode == "bad":
            raise OSError
        return plan(mode)

    patch = make(failing)
    patch.apply("a")
    package.f = "theirs"  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="replaced"), pytest.raises(OSError):
        patch.apply("bad")
    assert (patch.mode, names(package)) == ("a", ("theirs", "g a"))


@pytest.mark.parametrize("version", ["1.1.9", "1.10", "2.0", "0.9"])
def test_outside_the_tested_range_it_refuses(
    version: str, package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    package.__version__ = version  # type: ignore[attr-defined]
    patch = make()
    with pytest.raises(truncdet.TruncdetError) as caught:
        patch.apply("a")
    assert str(caught.value) == (
        f"me: somepackage must be >= 1.2 and < 1.10, the tested range, got {version}; "
        "allow_untested=True or TRUNCDET_ALLOW_UNTESTED=1 patches it all the same"
    )
    assert (patch.mode, names(package)) == ("off", ("f", "g"))
    patch.apply("a", allow_untested=True)
    patch.undo()
    monkeypatch.setenv("TRUNCDET_ALLOW_UNTESTED", "1")
    with patch.scope("a"):
        assert names(package) == ("f a", "g a")


@pytest.mark.parametrize(("version", "said"), [("main", "main"), ("", "no version"), (None, None)])
def test_versions_without_numbers_are_refused_too(
    version: str | None,
    said: str | None,
    package: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    if version is None:
        del package.__version__  # type: ignore[attr-defined]
    else:
        package.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(truncdet.TruncdetError) as caught:
        make().apply("a")
    assert str(caught.value) == (
        "me: somepackage must be >= 1.2 and < 1.10, the tested range, got "
        f"{said or 'no version'}; allow_untested=True or TRUNCDET_ALLOW_UNTESTED=1 patches it all "
        "the same"
    )
    with make().scope("a", allow_untested=True):
        assert names(package) == ("f a", "g a")


@pytest.mark.parametrize("version", ["1.2", "1.2.0", "1.9.9", "1.4.0a0+git"])
def test_inside_the_tested_range_it_does_not(version: str, package: types.ModuleType) -> None:
    package.__version__ = version  # type: ignore[attr-defined]
    with make().scope("a"):
        assert names(package) == ("f a", "g a")


def test_versions_are_numbers() -> None:
    assert parse_version("0.29.1+cu130") == (0, 29, 1)
    assert parse_version("0.9") < parse_version("0.10")
    with pytest.raises(ValueError, match="text must start with a number, got 'main'"):
        parse_version("main")


def test_bad_values_of_the_environment_variable_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRUNCDET_ALLOW_UNTESTED", "yes")
    with pytest.raises(ValueError, match="TRUNCDET_ALLOW_UNTESTED must be 0 or 1, got 'yes'"):
        untested_allowed(False)
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("TRUNCDET_ALLOW_UNTESTED", value)
        assert untested_allowed(False) is expected
        assert untested_allowed(True)


def test_threads_do_not_interleave(package: types.ModuleType) -> None:
    patch = make()
    torn: list[object] = []

    def work(mode: str) -> None:
        for _ in range(200):
            with patch.lock:
                patch.apply(mode)
                if names(package) != (f"f {mode}", f"g {mode}"):
                    torn.append(names(package))
            patch.undo()

    threads = [threading.Thread(target=work, args=(mode,)) for mode in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    patch.undo()
    assert not torn
    assert names(package) == ("f", "g")
