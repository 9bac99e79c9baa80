"""One switch: what it sets, and that every bit of it is put back."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from truncdet.integrations import _alive, _patch, aten
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet import _frameworks, _scopes, _switch


def everything() -> dict[str, object]:
    """All global state that a scope may touch, in comparable form."""
    import numpy

    return {
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "flag": torch.are_deterministic_algorithms_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "modes": [_frameworks.mode_of(name) for name in _frameworks.FRAMEWORKS],
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "open": len(_scopes.stack),
    }


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = everything()
    yield
    while truncdet.disable():
        pass
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert everything() == before


def test_a_block_sets_flags_and_patches_and_puts_them_back() -> None:
    before = everything()
    with truncdet.deterministic(seed=3):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert not torch.are_deterministic_algorithms_enabled()
        assert (tv.mode(), aten.mode()) == ("fixed_point", "fixed_point")
    assert everything() == before


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("fill", [False, True])
def test_flags_return_to_what_the_user_had(
    deterministic: bool, benchmark: bool, fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    old = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    try:
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
        memory.fill_uninitialized_memory = fill
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        before = everything()
        with truncdet.deterministic():
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
            assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
            assert not memory.fill_uninitialized_memory
        assert everything() == before
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = old


def test_an_exception_in_a_block_puts_everything_back() -> None:
    before = everything()
    with pytest.raises(KeyError), truncdet.deterministic(seed=3, strict="warn"):
        random.random(), torch.rand(2)
        raise KeyError
    assert everything() == before


def test_blocks_nest_and_each_puts_the_one_before_it_back() -> None:
    with truncdet.deterministic(mode="truncate"):
        with truncdet.deterministic(mode="off", seed=1):
            assert tv.mode() == "off"
            torch.rand(1)
            inner = everything()
            with truncdet.deterministic(strict=True):
                assert tv.mode() == "fixed_point"
                assert torch._C._len_torch_dispatch_stack() == 1
            assert everything() == inner
        assert tv.mode() == "truncate"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("step", ["seed_all", "patched", "strict"])
def test_a_step_that_fails_leaves_nothing_behind(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(step)

    before = everything()
    if step == "seed_all":
        monkeypatch.setattr(_switch._seed, "seed_all", fail)
    elif step == "patched":
        monkeypatch.setattr(tv, "patched", fail)
    else:
        monkeypatch.setattr(_switch._strict, "StrictMode", fail)
    with pytest.raises(OSError, match=step):
        truncdet.enable(seed=1, strict=True)
    with pytest.raises(OSError, match=step), truncdet.deterministic(seed=1, strict=True):
        pass
    assert everything() == before


def test_a_seed_makes_draws_repeat_and_its_effect_ends_with_the_block() -> None:
    import numpy

    def draws() -> tuple[object, ...]:
        return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()

    before = everything()
    with truncdet.deterministic(seed=5):
        first = draws()
    with truncdet.deterministic(seed=5):
        assert draws() == first
    with truncdet.deterministic(seed=6):
        assert draws() != first
    assert everything() == before


def test_without_a_seed_the_generators_run_on() -> None:
    state = torch.get_rng_state()
    with truncdet.deterministic():
        inside = torch.rand(3)
    after = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), inside)
    assert torch.equal(torch.rand(3), after)
    torch.set_rng_state(state)


def test_enable_holds_until_disable() -> None:
    before = everything()
    table = truncdet.enable(seed=2)
    assert str(table) == str(truncdet.status())
    assert tv.mode() == "fixed_point"
    assert truncdet.disable() is True
    assert everything() == before
    assert truncdet.disable() is False


def test_a_second_enable_replaces_the_first() -> None:
    before = everything()
    truncdet.enable(seed=2)
    truncdet.enable(seed=2, mode="truncate", strict=True)
    assert tv.mode() == "truncate"
    assert torch._C._len_torch_dispatch_stack() == 1
    assert truncdet.disable()
    assert everything() == before


def test_disable_is_refused_inside_a_later_block() -> None:
    truncdet.enable()
    with truncdet.deterministic():
        with pytest.raises(truncdet.TruncdetError, match=r"disable: enable\(\) must be the inner"):
            truncdet.disable()
        assert tv.mode() == "fixed_point"
    assert truncdet.disable()


def test_a_block_ends_an_enable_that_was_left_open_in_it() -> None:
    before = everything()
    with truncdet.deterministic(mode="off"):
        truncdet.enable(seed=1, mode="truncate", strict=True)
    assert everything() == before
    assert not truncdet.disable()


def test_disable_is_refused_inside_another_dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    truncdet.enable(strict=True)
    with TorchDispatchMode():
        with pytest.raises(truncdet.TruncdetError, match="innermost dispatch mode"):
            truncdet.disable()
        assert tv.mode() == "fixed_point"
        assert torch._C._len_torch_dispatch_stack() == 2
    assert truncdet.disable()


def test_off_seeds_and_sets_flags_but_leaves_operators_alone() -> None:
    with truncdet.deterministic(seed=1, mode="off"):
        assert torch.backends.cudnn.deterministic
        assert not tv.is_patched()


def test_a_patch_of_the_user_survives_a_block() -> None:
    with tv.patched("truncate"):
        with truncdet.deterministic():
            assert tv.mode() == "fixed_point"
        assert tv.mode() == "truncate"


def test_tf32_stays_as_the_user_set_it() -> None:
    old = torch.backends.cuda.matmul.allow_tf32
    try:
        for value in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = value
            with truncdet.deterministic():
                assert torch.backends.cuda.matmul.allow_tf32 is value
    finally:
        torch.backends.cuda.matmul.allow_tf32 = old


def test_it_decorates_functions() -> None:
    @truncdet.deterministic(seed=1)
    def draw() -> float:
        return float(torch.rand(1))

    assert draw() == draw()
    assert not tv.is_patched()


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    before = everything()
    with pytest.raises(ValueError, match="enable: mode must be one of fixed_point, truncate, off"):
        truncdet.enable(mode="fast")
    with pytest.raises(ValueError, match="enable: mode must not be 'snap'"):
        truncdet.enable(mode="snap")
    with pytest.raises(ValueError, match="enable: strict must be False, 'warn' or True, got 'no'"):
        truncdet.enable(strict="no")
    with pytest.raises(ValueError, match=r"deterministic: seed must be in \[0, 2\^63\), got -1"):
        truncdet.deterministic(seed=-1).__enter__()
    with pytest.raises(TypeError, match="enable: seed must be an int, got True"):
        truncdet.enable(seed=True)
    assert everything() == before


def test_an_untested_version_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torchvision

    before = everything()
    monkeypatch.setattr(torchvision, "__version__", "0.99.0")
    with pytest.raises(truncdet.TruncdetError, match="tested range"):
        truncdet.enable(seed=1, strict=True)
    assert everything() == before
    monkeypatch.setenv(_patch._ENV, "1")
    truncdet.enable()
    assert tv.is_patched()
    truncdet.disable()


def test_notes_say_what_cannot_be_set_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_alive, "_converted", {})  # of other tests
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    with truncdet.deterministic() as table:
        assert any("PYTHONHASHSEED is not set" in note for note in table.notes)
        assert any("too late" in note for note in table.notes)
        with truncdet.deterministic() as again:
            assert len(set(again.notes)) == len(again.notes)
    assert truncdet.status().notes == ()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with truncdet.deterministic() as table:
        assert table.notes == (
            "CUBLAS_WORKSPACE_CONFIG is :0:0, not :4096:8 or :16:8, and is left as set",
        )


def test_verbose_prints_the_table_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("rich", "rich.console"):  # its import draws from `random`
        monkeypatch.setitem(sys.modules, name, None)
    with truncdet.deterministic(verbose=True):
        pass
    assert capsys.readouterr().out.count("covered by") == 1
    with truncdet.deterministic():
        pass
    assert capsys.readouterr().out == ""


def test_a_plain_program_gets_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with truncdet.deterministic(seed=1, strict=True):
            torch.rand(3).sum()
