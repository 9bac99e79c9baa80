"""The status table says what is in force, and imports nothing to say it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
from truncdet.integrations import _aten_table, _detectron2_table, _mmcv_table, aten
from truncdet.integrations import torchvision as tv
from truncdet.integrations._aten_table import BY_NAME, OPERATORS

import truncdet
from truncdet import _operators, _status, _status_rows
from truncdet._frameworks import integration_name
from truncdet._strict_table import TABLE

PATCHED = ("RoIAlign, roi_align", "MultiScaleRoIAlign", "detection models: box and mask heads")


def rows() -> dict[str, _status.Row]:
    return {row.operator: row for row in truncdet.status().rows}


def test_own_operators_are_always_covered() -> None:
    own = [row for row in truncdet.status().rows if row.framework == "truncdet"]
    assert {"truncdet.roi_align", "truncdet.index_add"} < {row.operator for row in own}
    assert {row.covered_by for row in own} == {"own kernel"}
    modes = {row.operator: row.mode for row in own if row.mode != "fixed_point"}
    assert modes == {"truncdet.wrap": "truncate", "truncdet.snap": "snap"}


@pytest.mark.parametrize(
    ("mode", "tier", "covered_by"),
    [
        ("fixed_point", "T1 T2 T3o T3c", "patch: truncdet.roi_align"),
        ("truncate", "T0", "patch: truncdet.wrap"),
        ("off", "-", "not covered"),
    ],
)
def test_torchvision_rows_follow_the_patch(mode: str, tier: str, covered_by: str) -> None:
    with tv.patched(mode):
        for name in PATCHED:
            row = rows()[name]
            assert (row.tier, row.covered_by, row.mode) == (tier, covered_by, mode)
    assert rows()["RoIAlign, roi_align"].covered_by == "not covered"


def test_rows_of_torch_follow_its_patch() -> None:
    covered = {operator.part: operator for operator in OPERATORS.values()}
    assert len(covered) == len(OPERATORS)
    with aten.patched():
        for name, row in rows().items():
            if row.framework == "torch" and name in covered:
                expected = covered[name].tier, f"patch: {covered[name].by}", "fixed_point"
                assert (row.tier, row.covered_by, row.mode) == expected
                assert hasattr(truncdet, covered[name].by.removeprefix("truncdet."))
    assert set(covered) < {name for name, row in rows().items() if row.framework == "torch"}
    found = {(row.tier, row.covered_by) for row in rows().values() if row.framework == "torch"}
    assert found == {("-", "not covered")}


def test_holes_are_what_the_strict_checker_knows_and_no_patch_covers() -> None:
    with aten.patched():
        holes = {name for name, row in rows().items() if row.tier == "-"}
    assert {
        "reflection_pad1d, reflection_pad2d, reflection_pad3d: backward",
        "max_pool3d_with_indices: backward",
        "median with indices",
        "scatter_reduce with 'prod'",
        "put without accumulate",
        "cumsum",
    } <= holes
    words = {
        kernel.partition("::")[2].removesuffix("_backward").removesuffix("_forward").strip("_")
        for kernel in TABLE
        if kernel not in BY_NAME and kernel != "torchvision::_roi_align_backward"
    }
    named = {
        word
        for hole in holes
        for word in re.split(r", | |: ", hole.partition(" with")[0].partition(": ")[0])
    }
    assert words <= named
    assert not named & {"grid_sampler_2d", "upsample_bilinear2d", "scatter_add", "index_put"}


def test_a_hole_is_gone_once_an_operator_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    covered = dict(_aten_table.BY_NAME)
    assert "cumsum" in rows()
    monkeypatch.setattr(
        _aten_table, "BY_NAME", {**covered, "aten::cumsum": covered["aten::index_add"]}
    )
    assert "cumsum" not in rows()


def test_torchvisions_other_operators_follow_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, name = "torchvision::_roi_pool_backward", "roi_pool: backward"
    row = _operators.ROWS[0]._replace(name="roi_pool")
    monkeypatch.setattr(_status_rows, "BY_KERNEL", {**_operators.BY_KERNEL, kernel: row})
    monkeypatch.setattr(tv, "covers", lambda op, dtype: op == kernel)
    assert rows()[name].covered_by == "not covered"
    with tv.patched():
        found = rows()[name]
        assert rows()["deform_conv2d: backward"].covered_by == "not covered"
    assert (found.tier, found.covered_by, found.mode) == (
        row.tier,
        "patch: truncdet.roi_pool",
        "fixed_point",
    )
    assert "roi_align: backward" not in rows()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes exactly the named frameworks look installed, in the given modes, none of them real."""
    find = importlib.util.find_spec

    def install(*names: str, **modes: str) -> None:
        def pretended(name: str, package: str | None = None) -> object:
            if name in (*names, *modes):
                return importlib.machinery.ModuleSpec(name, None)
            return None if name in _status_rows.PARTS else find(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", pretended)
        for name in _status_rows.PARTS:
            monkeypatch.delitem(sys.modules, name, raising=False)
            ours = types.SimpleNamespace(mode=lambda name=name: modes.get(name, "off"))
            monkeypatch.setitem(sys.modules, integration_name(name), ours)

    return install


def test_installed_frameworks_are_found_without_importing_them(
    pretend: Callable[..., None],
) -> None:
    pretend("mmcv", "nvdiffrast")
    always = ("truncdet", "torch")
    found = [row for row in truncdet.status().rows if row.framework not in always]
    assert {row.framework for row in found} == {"mmcv", "nvdiffrast"}
    assert {row.covered_by for row in found} == {"not covered"}
    assert "mmcv" not in sys.modules


def test_an_absent_torchvision_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "torchvision" not in {row.framework for row in truncdet.status().rows}


TABLES = {"mmcv": _mmcv_table.TABLE, "detectron2": _detectron2_table.TABLE}
COVERED = {
    "mmcv": {"RoIAlign, roi_align (avg and max)"},
    "mmdet": {"RoI extractors: box, mask and keypoint heads", "mask targets"},
    "detectron2": {
        "ROIAlign, roi_align",
        "ROIPooler: box, mask and keypoint heads",
        "mask targets",
    },
}


@pytest.mark.parametrize("framework", COVERED)
@pytest.mark.parametrize(("mode", "tier"), [("fixed_point", "T1 T2 T3o T3c"), ("truncate", "T0")])
def test_rows_of_the_other_frameworks_follow_their_patches(
    framework: str, mode: str, tier: str, pretend: Callable[..., None]
) -> None:
    pretend(*COVERED, **{framework: mode})
    table = {row.part: row for row in TABLES.get(framework, ())}
    rows = [row for row in truncdet.status().rows if row.framework == framework]
    covered = {row.operator: row for row in rows if row.mode == mode}
    whole = mode == "fixed_point"
    # What the installed framework has no kernels for is not listed.
    ours = {name for name, row in table.items() if not row.lacking}
    assert covered.keys() == COVERED[framework] | (ours if whole else set())
    assert {covered[name].tier for name in COVERED[framework]} == {tier}
    for name, row in table.items():
        if whole and row.lacking:
            assert name not in {row.operator for row in rows}
            continue
        (found,) = (row for row in rows if row.operator == name)
        expected = (row.tier, f"patch: {row.by}") if whole else ("-", "not covered")
        assert (found.tier, found.covered_by) == expected
    holes = [row for row in rows if row.mode == "off"]
    # mmdet has no kernels of its own.
    assert {row.covered_by for row in holes} == (set() if framework == "mmdet" else {"not covered"})
    others = [row for row in truncdet.status().rows if row.framework not in COVERED]
    assert {row.covered_by for row in others if row.framework == "truncdet"} == {"own kernel"}
    assert {row.covered_by for row in others if row.framework == "torch"} == {"not covered"}


def test_a_patch_of_mmcv_alone_covers_mmdet_but_for_its_boxes(pretend: Callable[..., None]) -> None:
    pretend("mmdet", mmcv="fixed_point")
    row = next(row for row in truncdet.status().rows if row.framework == "mmdet")
    assert (row.mode, row.covered_by) == (
        "fixed_point",
        "patch: mmcv; boxes rounded under autocast",
    )


def test_a_fresh_process_imports_no_framework() -> None:
    code = (
        "import sys, truncdet; truncdet.status();"
        "print([m for m in ('torchvision', 'mmcv', 'mmdet', 'detectron2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_dict_is_ready_for_json() -> None:
    table = truncdet.status()
    assert json.loads(json.dumps(table.as_dict())) == table.as_dict()
    assert table.as_dict()["rows"][0]["operator"] == "truncdet.roi_align"


def test_text_has_aligned_columns_and_the_notes() -> None:
    row = _status.Row("op", "framework", "T1", "own kernel", "off")
    text = str(_status.Status((row,), ("a sentence",)))
    assert text.splitlines() == [
        "operator  framework  tier  covered by  mode",
        "--------  ---------  ----  ----------  ----",
        "op        framework  T1    own kernel  off",
        "note: a sentence",
    ]
    assert repr(_status.Status((row,))) == str(_status.Status((row,)))


@pytest.mark.parametrize("rich", [True, False])
def test_printing_works_with_and_without_rich(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "200")
    row = _status.Row("some_op [x]", "framework", "T1", "own kernel", "off")
    _status.Status((row,), ("a [b] sentence",)).print()
    out = capsys.readouterr().out
    assert all(text in out for text in ("some_op [x]", "own kernel", "note: a [b] sentence"))
    assert ("│" in out) is rich
