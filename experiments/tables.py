"""Fills the tables of README.md and experiments/README.md from experiments/results.

    python experiments/tables.py --write
    python experiments/tables.py --check    # exits with 1 if a table is not what the results say

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; the names are in _render.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _render import CLAIMS, region

from truncdet._atomic import write_text

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
_REGION = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The result files of the experiments shown here, by name, in order of their names.

    Raises:
        ValueError: a file is of another schema, of a trial run, or was cut off.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("experiment") not in CLAIMS:
            continue
        if result.get("schema") != SCHEMA:
            raise ValueError(
                f"tables: {path.name} must have schema {SCHEMA}, got {result['schema']}"
            )
        if result["size"] != "full" or not result.get("complete", True):
            raise ValueError(f"tables: {path.name} must be a complete run at full size")
        results[path.name] = result
    return results


def filled(text: str, results: dict[str, dict[str, Any]]) -> str:
    """`text` with every region as the results say.

    Raises:
        ValueError: a marker has no end or an unknown name.
    """
    new, found = _REGION.subn(lambda m: f"{m[1]}\n{region(m[2], results)}\n\n{m[4]}", text)
    if found != text.count("<!-- table:"):
        raise ValueError("tables: every `<!-- table: NAME -->` must have its `<!-- end -->`")
    return new


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="the clone to work on")
    options = parser.parse_args(arguments)
    stale = []
    try:
        results = read_results(options.root / "experiments" / "results")
        for name in ("README.md", "experiments/README.md"):
            path = options.root / name
            if not path.exists():
                continue
            text = path.read_text(encoding="utf-8")
            new = filled(text, results)
            if new != text:
                stale.append(name)
                if options.write:
                    write_text(path, new)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name in stale:
        say = "written" if options.write else "is not what experiments/results says; run --write"
        print(f"{name}: {say}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
