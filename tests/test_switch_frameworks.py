"""Which frameworks the switch patches: installed ones, named ones, broken ones, none for 'off'."""

from __future__ import annotations

import importlib
import importlib.metadata
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from truncdet.integrations import aten
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet import _frameworks

Make = Callable[..., None]
# What the patch of mmcv needs, and no operator.
WHOLE = """
import torch

class RoIAlignFunction(torch.autograd.Function):
    pass

class RoIAlign(torch.nn.Module):
    def forward(self, input, rois):
        return roi_align(input, rois)

roi_align = RoIAlignFunction.apply
"""


@pytest.fixture
def mmcv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Installs an mmcv whose operators are the given code; the real one is back afterwards."""

    def taken() -> dict[str, object]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if is_mmcv(name)}

    def is_mmcv(name: str) -> bool:
        return name.split(".")[0] == "mmcv"

    def make(code: str, roi_align: str | None = None, version: str = "2.1.0") -> None:
        ops = tmp_path / "mmcv" / "ops"
        ops.mkdir(parents=True)
        first = f"__version__ = {version!r}" if version else ""
        (tmp_path / "mmcv" / "__init__.py").write_text(first)
        (ops / "__init__.py").write_text(code)
        if roi_align is not None:
            (ops / "roi_align.py").write_text(roi_align)

    monkeypatch.syspath_prepend(str(tmp_path))
    real = taken()
    yield make
    taken()
    sys.modules.update(real)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    while truncdet.disable():
        pass
    assert {_frameworks.mode_of(name) for name in _frameworks.FRAMEWORKS} == {"off"}


BOTH = ("torchvision", "mmcv")
ERRORS = {
    "raise ImportError('no module\\n named mmcv._ext')": "ImportError: no module named mmcv._ext",
    "assert False, 'mmcv is too old'": "AssertionError: mmcv is too old",
    "import numpy; numpy.no_such_name": "AttributeError: module 'numpy' has no attribute",
}


@pytest.mark.parametrize("code", ERRORS)
def test_one_that_cannot_be_imported_becomes_a_note_and_a_row(mmcv: Make, code: str) -> None:
    mmcv(code)
    with truncdet.deterministic(frameworks=BOTH) as table:
        assert tv.mode() == "fixed_point"
        row = next(row for row in table.rows if row.framework == "mmcv")
        assert row.covered_by.startswith(f"not covered: {ERRORS[code]}")
        assert (row.tier, row.mode) == ("-", "off")
        (note,) = [note for note in table.notes if "mmcv" in note]
        assert note.startswith(
            f"mmcv is installed, cannot be imported and is not covered: {ERRORS[code]}"
        )
    row = next(row for row in truncdet.status().rows if row.framework == "mmcv")
    assert row.covered_by == "not covered"


@pytest.mark.parametrize(
    ("code", "roi_align", "error"),
    [
        ("", None, "ModuleNotFoundError: No module named 'mmcv.ops.roi_align'"),
        ("", "", "ImportError: mmcv.ops.roi_align does not define roi_align"),
        ("", WHOLE.replace("RoIAlign(", "Other("), "ImportError: mmcv.ops.roi_align does not def"),
        ("import sys; sys.exit('no operators')", WHOLE, "SystemExit: no operators"),
        ("", "raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_so_does_one_that_is_half_there(
    mmcv: Make, code: str, roi_align: str | None, error: str
) -> None:
    mmcv(code, roi_align)
    with truncdet.deterministic(frameworks=BOTH) as table:
        assert tv.mode() == "fixed_point"
        rows = [row for row in table.rows if row.framework == "mmcv"]
        assert rows[0].covered_by.startswith(f"not covered: {error}")
        assert any(error in note and note.startswith("mmcv is inst") for note in table.notes)


@pytest.mark.framework("detectron2")
@pytest.mark.parametrize("name", ["roi_align", "ROIAlign"])
def test_so_does_a_detectron2_without_its_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("detectron2.layers")
    monkeypatch.delattr(sys.modules["detectron2.layers.roi_align"], name)
    with truncdet.deterministic(frameworks=["detectron2"]) as table:
        assert _frameworks.mode_of("detectron2") == "off"
        assert any(f"detectron2.layers.roi_align does not define {name}" in n for n in table.notes)


@pytest.mark.framework("mmdet")
def test_mmdet_needs_what_its_patch_of_mmcv_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("mmdet.models")
    monkeypatch.delattr(sys.modules["mmcv.ops.roi_align"], "RoIAlignFunction")
    with truncdet.deterministic(frameworks=["mmdet"]) as table:
        assert _frameworks.mode_of("mmdet") == "off"
        assert any(note.startswith("mmdet is installed, cannot") for note in table.notes)


@pytest.mark.parametrize("version", ["main", ""])
def test_a_version_that_says_nothing_is_refused(
    version: str, mmcv: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    mmcv("", WHOLE, version)
    said = f"got {version or 'no version'}; allow_untested=True or TRUNCDET_ALLOW_UNTESTED=1"
    with pytest.raises(truncdet.TruncdetError, match=f"mmcv must be >= 2.1 and < 2.2, .*, {said}"):
        truncdet.enable(frameworks=BOTH)
    assert not tv.is_patched()


def test_an_error_of_ours_is_not_taken_for_one_of_the_framework(
    mmcv: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmcv("", WHOLE)
    monkeypatch.setitem(sys.modules, "truncdet.integrations.mmcv", None)
    with pytest.raises(ImportError, match=r"truncdet\.integrations\.mmcv"):
        truncdet.enable(frameworks=BOTH)
    assert not tv.is_patched()


def test_importing_a_framework_draws_nothing_that_the_program_sees(mmcv: Make) -> None:
    mmcv("import random, numpy, torch; random.random(); numpy.random.rand(); torch.rand(1); 1 / 0")
    states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
    with truncdet.deterministic(frameworks=BOTH) as table:
        assert any("ZeroDivisionError" in note for note in table.notes)
        found = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        assert found == states


def test_only_named_frameworks_are_patched() -> None:
    with truncdet.deterministic(frameworks=()):
        assert not tv.is_patched()
    with truncdet.deterministic(frameworks=["torchvision", "torchvision"]):
        assert tv.is_patched()
    truncdet.enable(frameworks=())
    assert not tv.is_patched()


def test_wrong_names_are_errors_that_list_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "torch, torchvision, mmdet, mmcv, detectron2"
    with pytest.raises(ValueError, match=f"enable: frameworks must be among {names}, got 'keras'"):
        truncdet.enable(frameworks=("torchvision", "keras"))
    with pytest.raises(TypeError, match="frameworks must be None or a list of names, got 'mmcv'"):
        truncdet.enable(frameworks="mmcv")
    with pytest.raises(TypeError, match="deterministic: frameworks must be None or a list"):
        truncdet.deterministic(frameworks=3).__enter__()  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "detectron2", None)
    with pytest.raises(ValueError, match="enable: frameworks must be installed, got 'detectron2'"):
        truncdet.enable(frameworks=["detectron2"])
    assert not tv.is_patched()


def test_off_imports_nothing() -> None:
    code = (
        "import sys, truncdet; truncdet.enable(mode='off', seed=1); truncdet.disable();"
        "print([m for m in ('torchvision', 'mmcv', 'mmdet', 'detectron2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_operators_of_torch_are_left_alone_by_every_other_mode() -> None:
    assert aten.mode() == "off"
    with truncdet.deterministic(frameworks=["torch"]):
        assert (aten.mode(), tv.mode()) == ("fixed_point", "off")
        for inside in ("truncate", "off"):
            with truncdet.deterministic(mode=inside):
                assert aten.mode() == "off"
                with truncdet.deterministic():
                    assert aten.mode() == "fixed_point"
                assert aten.mode() == "off"
            assert aten.mode() == "fixed_point"
    assert aten.mode() == "off"


@pytest.mark.framework("mmdet")
@pytest.mark.framework("detectron2")
def test_all_installed_ones_are_patched_and_each_block_puts_its_modes_back() -> None:
    def modes() -> set[str]:
        return {_frameworks.mode_of(name) for name in others}

    # torch's own operators have no mode 'truncate'.
    others = set(_frameworks.FRAMEWORKS) - {"torch"}
    with truncdet.deterministic(mode="truncate") as table:
        assert modes() == {"truncate"}
        covered = {row.framework for row in table.rows if row.covered_by == "patch: truncdet.wrap"}
        assert covered == others
        for inside in ("off", "fixed_point", "off"):
            with truncdet.deterministic(mode=inside):
                assert modes() == {inside}
                with truncdet.deterministic(mode="fixed_point"):
                    assert modes() == {"fixed_point"}
                assert modes() == {inside}
            assert modes() == {"truncate"}
    assert modes() == {"off"}


@pytest.mark.framework("mmdet")
@pytest.mark.parametrize("name", ["mmcv", "mmdet", "detectron2"])
def test_an_untested_version_is_refused_and_nothing_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    module = __import__(name)
    monkeypatch.setattr(module, "__version__", "99.0")
    with pytest.raises(truncdet.TruncdetError, match=rf"{name} must be >= .*, the tested range"):
        truncdet.enable()
    assert not tv.is_patched()
    monkeypatch.setenv("TRUNCDET_ALLOW_UNTESTED", "1")
    truncdet.enable()
    assert _frameworks.mode_of(name) == "fixed_point"
