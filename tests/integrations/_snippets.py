"""Runs the Python snippets of a page, in order and in one namespace: `python _snippets.py PAGE`.

A page may prepare or check out of sight, in an HTML comment whose first line is `<!-- test`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LANGUAGES = ("python", "sh", "text", "toml", "yaml")
_BLOCK = re.compile(
    r"^(?:```python\n(?P<shown>.*?)^```|<!-- test\n(?P<hidden>.*?)^-->)$", re.M | re.S
)
_FENCES = re.compile(r"^[ >]*(?:```|~~~)[ ]*([^\s`]*)", re.M)


def snippets(page: str) -> list[tuple[int, str]]:
    """Returns the snippets of a page's text with the number of lines above each.

    A block that would be missed (indented, unfinished, of an unknown language) is a ValueError.
    """
    found = []
    for match in _BLOCK.finditer(page):
        group = match.lastgroup
        assert group is not None
        found.append((page.count("\n", 0, match.start(group)), match[group]))
    opened = _FENCES.findall(page)[::2]
    if unknown := set(opened) - set(LANGUAGES):
        raise ValueError(f"a block's language must be one of {LANGUAGES}, got {sorted(unknown)}")
    expected = opened.count("python") + page.count("<!-- test")
    if len(found) != expected:
        raise ValueError(
            "the page must open and close all of its snippets at line starts, "
            f"{expected} of them, got {len(found)}"
        )
    return found


def run(path: Path) -> int:
    """Runs a page's snippets; returns how many there were. Tracebacks have the page's lines."""
    found = snippets(path.read_text(encoding="utf-8"))
    names = {"__name__": "__page__"}
    for above, code in found:
        exec(compile("\n" * above + code, str(path), "exec"), names)
    return len(found)


if __name__ == "__main__":
    print(f"snippets run: {run(Path(sys.argv[1]))}")
