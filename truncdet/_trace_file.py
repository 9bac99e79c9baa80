"""The file of a trace: a line of JSON for the head, one for every step, and one for the end.

Each line carries a checksum and is written in one piece, so that what a crash leaves can be read up
to the last whole step. A step's line lists the keys that are new in it, and for every observation
the number of its key and 64 bits.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from truncdet._atomic import write_text

SCHEMA = 1


class Key(NamedTuple):
    """What was observed: `kind` is 'in', 'out' or 'state', `slot` the argument or its path."""

    phase: str
    module: str
    op: str
    kind: str
    slot: str
    layout: str
    source: str = ""


@dataclass
class Step:
    """The observations of one step, in the order of time, and its losses (None: not finite)."""

    number: int
    keys: list[Key] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    losses: dict[str, float | None] = field(default_factory=dict)

    def join(self, later: Step) -> None:
        """Appends observations of the same step."""
        self.keys += later.keys
        self.digests += later.digests
        self.losses |= later.losses


@dataclass
class Trace:
    """What a recording saw.

    Attributes:
        head: schema, level, every, versions.
        steps: the recorded steps, in order.
        complete: False where the recording did not end as it should, as after a crash.
        kept: values of one observation, where the recording was told to keep them.
    """

    head: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    complete: bool = False
    kept: dict[str, Any] | None = None

    def append(self, step: Step) -> None:
        """Adds a step, or a further part of the last one."""
        if self.steps and self.steps[-1].number == step.number:
            self.steps[-1].join(step)
        else:
            self.steps.append(step)

    def save(self, path: str | Path) -> None:
        """Writes the trace, all or nothing.

        Args:
            path: file to write; an existing one is replaced.
        """
        known: dict[Key, int] = {}
        lines = [encode_head(self.head), *(encode_step(step, known) for step in self.steps)]
        if self.complete:
            lines.append(encode_end(len(self.steps)))
        write_text(Path(path), "".join(lines))


def encode_head(head: dict[str, Any]) -> str:
    return _line({"truncdet_trace": SCHEMA, **head})


def encode_step(step: Step, known: dict[Key, int]) -> str:
    """The line of a step; `known` are the keys of earlier lines and grows."""
    new, ids = [], []
    for key in step.keys:
        if key not in known:
            known[key] = len(known)
            new.append(list(key))
        ids.append(known[key])
    content = {"step": step.number, "keys": new}
    content |= {"ids": _pack("I", ids), "digests": _pack("q", step.digests)}
    content |= {"losses": step.losses}
    return _line(content)


def encode_end(steps: int) -> str:
    return _line({"end": steps})


def read(path: str | Path) -> Trace:
    """Reads a trace, also one that a crash cut off: `complete` is False then.

    Raises:
        ValueError: the file is no trace, or one of another schema.
        OSError: it cannot be read.
    """
    where = f"read: trace {Path(path).name!r}"
    lines = Path(path).read_bytes().split(b"\n")
    head = _content(lines[0])
    if head is None or "truncdet_trace" not in head:
        raise ValueError(f"{where} must be a file that truncdet.record wrote")
    if head["truncdet_trace"] != SCHEMA:
        raise ValueError(f"{where} must have schema {SCHEMA}, got {head['truncdet_trace']}")
    del head["truncdet_trace"]
    trace, keys = Trace(head), list[Key]()
    for line in lines[1:]:
        content = _content(line)
        if content is None:
            break
        if "end" in content:
            trace.complete = content["end"] == len({step.number for step in trace.steps})
            break
        try:
            keys += (Key(*key) for key in content["keys"])
            ids = _unpack("I", content["ids"])
            digests = _unpack("q", content["digests"])
            step = Step(content["step"], [keys[i] for i in ids], digests, content["losses"])
        except (LookupError, TypeError, ValueError, struct.error):
            break  # a whole line whose like we do not write, or that needs one that is lost
        trace.append(step)
    return trace


class Writer:
    """Appends to a trace file step by step, each line in one piece."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        write_text(path, encode_head(head))
        self._known: dict[Key, int] = {}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def step(self, step: Step) -> None:
        self._write(encode_step(step, self._known))

    def end(self, steps: int) -> None:
        self._write(encode_end(steps))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: str) -> None:
        data = line.encode("utf-8")
        while data:
            data = data[os.write(self._file, data) :]


def _line(content: dict[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _content(line: bytes) -> dict[str, Any] | None:
    """The content of a line, or None if it is not whole."""
    mark, _, text = line.partition(b" ")
    if mark != b"%08x" % zlib.crc32(text):
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _pack(kind: str, values: Sequence[int]) -> str:
    packed = zlib.compress(struct.pack(f"<{len(values)}{kind}", *values), 1)
    return base64.b85encode(packed).decode("ascii")


def _unpack(kind: str, text: str) -> list[int]:
    packed = zlib.decompress(base64.b85decode(text))
    return list(struct.unpack(f"<{len(packed) // struct.calcsize('<' + kind)}{kind}", packed))
