"""Records which commit a result was measured at, for a run on a machine without git.

    python experiments/record_commit.py COMMIT experiments/results/FILE.json ...

Refuses a file that names a commit already, and marks that the commit was recorded afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from _environment import write_result


def record(path: Path, commit: str) -> None:
    """Fills the null commit of one result file.

    Raises:
        ValueError: if `commit` is no full hash, or the file has a commit.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"record_commit: COMMIT must be 40 hex digits, got {commit!r}")
    result = json.loads(path.read_text())
    if result["commit"] is not None:
        raise ValueError(f"record_commit: {path.name} already names commit {result['commit']}")
    recorded = {**result, "commit": commit, "commit_recorded": "after the run"}
    write_result(path.parent, recorded, path.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.files:
        record(path, options.commit)


if __name__ == "__main__":
    main()
