"""Finished parts of an experiment, kept in a file: an interruption costs only the one it meets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _environment import slug

from truncdet._atomic import write_text

# What must be the same for a kept part to belong to this run; the date may differ.
_SAME = ("schema", "experiment", "command", "commit", "dirty", "device", "versions")


class Parts:
    """Finished parts by name, in `.<experiment>_<device>.partial.json` of `folder`.

    A file of another command, commit, device or version is not continued. Without a folder nothing
    is kept.
    """

    def __init__(self, folder: Path | None, head: Mapping[str, Any]) -> None:
        self._head = {key: head[key] for key in _SAME}
        self._path: Path | None = None
        self.found: dict[str, Any] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f".{head['experiment']}_{slug(head['device'])}.partial.json"
            self.found = self._read(self._path)

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part of this name: as kept, else computed and kept. Parts are JSON's types."""
        if name in self.found:
            print(f"{name}: kept from the run before", flush=True)
            return self.found[name]
        self.found[name] = compute()
        if self._path is not None:
            content = {"head": self._head, "parts": self.found}
            write_text(self._path, json.dumps(content, allow_nan=False))
        return self.found[name]

    def forget(self) -> None:
        """Removes the file: the result holds all parts now."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            parts = content["parts"] if content["head"] == self._head else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return parts if isinstance(parts, dict) else {}
