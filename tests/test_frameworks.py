"""How tests ask for a framework: where it is absent they are skipped, where promised they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import _frameworks
import pytest
from _frameworks import EXPECT, expected, framework, installed, requires

MODULE = """
from _frameworks import framework
framework("mmdet")

def test_that_needs_it():
    pass
"""
MARK = """
from _frameworks import requires

@requires("mmdet")
def test_that_needs_it():
    pass

def test_that_does_not():
    pass
"""


def run_pytest(folder: Path, test: str, promised: str) -> tuple[int, str]:
    """Runs one test file in a Python from which mmdet is absent."""
    shutil.copy(_frameworks.__file__, folder)
    (folder / "conftest.py").write_text("from _frameworks import pytest_runtest_setup\n")
    hidden = "import sys\nsys.modules['mmdet'] = None\n"
    (folder / "test_it.py").write_text(hidden + test)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda\n    ci\n    framework\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "--strict-markers", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, EXPECT: promised},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("test", "counts"),
    [(MODULE, "1 skipped"), (MARK, "1 passed, 1 skipped")],
    ids=["module", "mark"],
)
def test_absence_skips_with_the_reason(tmp_path: Path, test: str, counts: str) -> None:
    code, output = run_pytest(tmp_path, test, "0")
    assert counts in output
    assert "mmdet is not installed: `make frameworks`" in output
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.mark.parametrize(
    ("test", "counts"),
    [(MODULE, "1 error"), (MARK, "1 passed, 1 error")],
    ids=["module", "mark"],
)
def test_absence_fails_where_the_framework_is_promised(
    tmp_path: Path, test: str, counts: str
) -> None:
    code, output = run_pytest(tmp_path, test, "1")
    assert counts in output
    assert f"mmdet is not installed, and {EXPECT}=1 promises it" in output
    assert code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


def test_the_suite_has_the_hook_behind_the_mark(request: pytest.FixtureRequest) -> None:
    (conftest,) = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(Path(__file__).with_name("conftest.py"))
    ]
    assert conftest.pytest_runtest_setup is _frameworks.pytest_runtest_setup


def test_a_framework_that_is_there_is_imported() -> None:
    assert installed("torchvision")
    assert framework("torchvision") is sys.modules["torchvision"]


def test_a_framework_that_cannot_be_imported_is_an_error_and_no_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenframework.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_frameworks, "NAMES", ("brokenframework",))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        framework("brokenframework")


def test_a_misspelt_framework_is_named() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'mmdetection'"):
        requires("mmdetection")


def test_a_promise_that_is_neither_0_nor_1_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPECT, "yes")
    with pytest.raises(ValueError, match=f"{EXPECT} must be 0 or 1, got 'yes'"):
        expected()
