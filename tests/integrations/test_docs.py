"""Every Python snippet of docs/ runs, and README repeats none of them wrongly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import _snippets
import pytest
from _frameworks import NAMES, framework

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a page in a process of its own: what it patches and registers ends with it."""
    return subprocess.run(
        [sys.executable, _snippets.__file__, str(page)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def write(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in NAMES:
        framework(page.stem)
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].removeprefix("snippets run: ")) > 0


def test_there_is_a_page_for_each_framework() -> None:
    assert {page.stem for page in PAGES} >= {"torchvision", "mmcv", "mmdet", "detectron2"}


def test_a_failing_snippet_fails_with_its_line(tmp_path: Path) -> None:
    page = write(tmp_path, "# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    done = run(page, tmp_path)
    assert done.returncode != 0
    assert f'File "{page}", line 8' in done.stderr


def test_a_failing_hidden_check_fails(tmp_path: Path) -> None:
    page = write(tmp_path, "```python\nx = 1\n```\n<!-- test\nassert x == 2\n-->\n")
    assert run(page, tmp_path).returncode != 0


def test_hidden_and_shown_snippets_share_one_namespace() -> None:
    page = (
        "<!-- test\nx = 1\n-->\n```python\ny = x\n```\n```sh\nnot python\n```\n<!-- a remark -->\n"
    )
    assert _snippets.snippets(page) == [(1, "x = 1\n"), (4, "y = x\n")]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("- item\n  ```python\n  x = 1\n  ```\n", "line starts"),
        ("```python\nx = 1\n", "line starts"),
        (" <!-- test\nx = 1\n-->\n", "line starts"),
        ("```py\nx = 1\n```\n", "got ['py']"),
        ("```\nx = 1\n```\n", "got ['']"),
        ("~~~python\nx = 1\n~~~\n", "line starts"),
    ],
)
def test_a_snippet_that_would_be_missed_is_an_error(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _snippets.snippets(page)


def readme_section(title: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert match, f"README.md has no section {title!r}"
    return match[1]


@pytest.mark.parametrize("title", ["torchvision", "mmdet, detectron2, mmcv"])
def test_readme_shows_what_the_pages_run(title: str) -> None:
    """README's lines are held against the pages', so that those of an absent framework are too."""
    pages = "\n".join(code for page in PAGES for _, code in _snippets.snippets(page.read_text()))
    known = {bare(line) for line in pages.splitlines()}
    lines = [
        bare(line)
        for _, code in _snippets.snippets(readme_section(title))
        for line in code.splitlines()
    ]
    assert lines
    assert not [line for line in lines if line not in known]


def bare(line: str) -> str:
    return line.split("#")[0].strip()
