"""The patch of detectron2 put on and taken off: names, order, exceptions, versions."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import _detectron2_needed  # noqa: F401
import detectron2
import pytest
import torch
from detectron2.layers import ROIAlign
from torch import nn
from truncdet.integrations import detectron2 as d2
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet.testing import assert_bitwise_equal

LAYER: Any = sys.modules["detectron2.layers.roi_align"]
LAYERS: Any = sys.modules["detectron2.layers"]
ORIGINAL = LAYER.roi_align


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    names = {name: dict(vars(module)) for name, module in detectron2_modules()}
    attributes = dict(vars(ROIAlign))
    yield
    assert not d2.is_patched() and not tv.is_patched()
    for name, module in detectron2_modules():
        for key, value in names.get(name, {}).items():
            assert vars(module)[key] is value, f"{name}.{key}"
    assert dict(vars(ROIAlign)) == attributes and ROIAlign.__call__ is nn.Module.__call__


def detectron2_modules() -> list[tuple[str, types.ModuleType]]:
    return [(name, m) for name, m in list(sys.modules.items()) if name.startswith("detectron2")]


def test_patch_and_unpatch() -> None:
    assert (d2.is_patched(), d2.mode()) == (False, "off")
    d2.patch()
    assert (d2.is_patched(), d2.mode()) == (True, "fixed_point")
    assert LAYER.roi_align is LAYERS.roi_align is not ORIGINAL
    assert d2.unpatch() is True
    assert LAYER.roi_align is LAYERS.roi_align is ORIGINAL
    assert d2.unpatch() is False


def test_two_patches_in_a_row_need_one_unpatch() -> None:
    d2.patch()
    first = LAYER.roi_align
    d2.patch()
    assert LAYER.roi_align is first
    d2.patch("truncate")
    assert d2.mode() == "truncate"
    with pytest.warns(UserWarning, match="literal=True"):
        d2.patch("truncate", literal=True)
    assert d2.unpatch() is True
    assert LAYER.roi_align is ORIGINAL


def test_patch_off_is_unpatch() -> None:
    d2.patch()
    d2.patch("off")
    assert not d2.is_patched() and LAYER.roi_align is ORIGINAL


def test_scopes_nest_and_end_with_an_exception() -> None:
    with pytest.raises(RuntimeError, match="stop"), d2.patched():
        with d2.patched("truncate"):
            assert d2.mode() == "truncate"
        assert d2.mode() == "fixed_point"
        raise RuntimeError("stop")
    assert LAYER.roi_align is ORIGINAL


def test_patch_an_exception_in_the_layer_and_unpatch() -> None:
    d2.patch()
    try:
        with pytest.raises(AssertionError):  # detectron2's own check of the boxes
            ROIAlign(3, 1.0, 2)(torch.rand(1, 1, 4, 4), torch.zeros(2, 4))
        with pytest.raises((TypeError, ValueError)):
            ROIAlign((0, 3), 1.0, 2)(torch.rand(1, 1, 4, 4), torch.zeros(2, 5))
    finally:
        assert d2.unpatch()


def test_a_reference_from_inside_turns_into_the_original_outside() -> None:
    features, boxes = torch.rand(1, 2, 8, 8), torch.tensor([[0.0, 1.0, 1.3, 6.0, 5.0]])
    with d2.patched("truncate"):
        ours = LAYER.roi_align
        inside = ours(features, boxes, 3)
    assert ours is not ORIGINAL
    expected = ORIGINAL(features, boxes, 3)
    assert_bitwise_equal(ours(features, boxes, 3), expected)
    assert not torch.equal(inside, expected)


def test_a_module_imported_while_patched_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    late: Any = types.ModuleType("detectron2_project")
    monkeypatch.setitem(sys.modules, "detectron2_project", late)
    with d2.patched():
        late.roi_align = LAYER.roi_align
        assert late.roi_align is not ORIGINAL
    assert late.roi_align is ORIGINAL


@pytest.mark.parametrize("first", ["torchvision", "detectron2"])
def test_with_torchvision_patched_too_in_any_order(first: str) -> None:
    features, boxes = torch.rand(1, 2, 8, 8), torch.tensor([[0.0, 1.0, 1.3, 6.0, 5.0]])
    parts: list[Any] = [tv, d2] if first == "torchvision" else [d2, tv]
    for part in parts:
        part.patch("fixed_point")
    expected = truncdet.roi_align(features, boxes, 3, 1.0, 2, True)
    assert_bitwise_equal(ROIAlign(3, 1.0, 2)(features, boxes), expected)
    for part in parts:  # the first first: not the order of a stack
        assert part.unpatch()


def test_modes_are_checked_and_nothing_is_changed() -> None:
    for call in (d2.patch, lambda *a, **k: d2.patched(*a, **k).__enter__()):
        with pytest.raises(ValueError, match="mode must not be 'snap' for RoIAlign"):
            call("snap")
        with pytest.raises(ValueError, match="mode must be one of fixed_point, truncate, off, go"):
            call("x")
        with pytest.raises(ValueError, match="literal must be False unless mode is 'truncate'"):
            call("fixed_point", literal=True)


@pytest.mark.parametrize("version", ["0.5", "0.5.9", "0.8", "1.0"])
def test_untested_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(detectron2, "__version__", version)
    with pytest.raises(truncdet.TruncdetError, match=r">= 0\.6 and < 0\.8, the tested range"):
        d2.patch()
    assert LAYER.roi_align is ORIGINAL
    with d2.patched(allow_untested=True):
        assert d2.is_patched()


def test_a_function_of_somebody_else_is_not_silently_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    monkeypatch.setattr(LAYER, "roi_align", theirs)
    with pytest.raises(truncdet.TruncdetError, match=r"must be torchvision's roi_align to be pat"):
        d2.patch()
    assert LAYER.roi_align is theirs and LAYERS.roi_align is ORIGINAL
    monkeypatch.undo()


def test_what_somebody_else_replaced_since_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def theirs() -> None: ...

    d2.patch()
    with monkeypatch.context() as change:
        change.setattr(LAYER, "roi_align", theirs)
        with pytest.warns(RuntimeWarning, match="was replaced by someone else since"):
            d2.unpatch()
        assert LAYER.roi_align is theirs
    LAYER.roi_align = ORIGINAL  # monkeypatch put our replacement back


def test_patching_prints_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with d2.patched():
            ROIAlign(3, 1.0, 2)(torch.rand(1, 1, 4, 4).bfloat16(), torch.zeros(2, 5))


def run(script: str) -> None:
    """Runs a program in a fresh Python, where nothing has been imported yet."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_ours_does_not_import_detectron2() -> None:
    run(
        "import sys\n"
        "import truncdet.integrations.detectron2 as d2\n"
        "assert d2.mode() == 'off' and not d2.unpatch()\n"
        "found = [n for n in sys.modules if n.split('.')[0] in ('detectron2', 'torchvision')]\n"
        "assert not found, found\n"
    )


def test_detectron2_imported_while_torchvision_is_patched_is_covered_and_put_back() -> None:
    run(
        "import sys\n"
        "import torchvision\n"
        "original = torchvision.ops.roi_align\n"
        "from truncdet.integrations import torchvision as tv, detectron2 as d2\n"
        "with tv.patched():\n"
        "    import detectron2.layers\n"
        "    layer = sys.modules['detectron2.layers.roi_align']\n"
        "    theirs = layer.roi_align\n"
        "    assert theirs is not original\n"
        "    with d2.patched('truncate'):\n"
        "        assert layer.roi_align not in (original, theirs)\n"
        "        assert detectron2.layers.roi_align is layer.roi_align\n"
        "    assert layer.roi_align is theirs\n"
        "assert layer.roi_align is detectron2.layers.roi_align is original\n"
    )
