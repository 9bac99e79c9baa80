"""What a recording is made of: observations in the order of time, closed step by step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truncdet._trace_file import Key, Step, Trace, Writer
from truncdet._trace_ring import Pending, Ring, layout
from truncdet._trace_scalars import Scalars

_MOST = 100_000  # observations after which an unusually long step is written in parts


class Place(NamedTuple):
    """One observation of a run: its step, its key, and the how-manieth of that key in the step."""

    step: int
    key: Key
    occurrence: int


class _Open(NamedTuple):
    """A step whose digests are on their way."""

    number: int
    keys: list[Key]
    where: list[tuple[torch.device, int]]
    digests: Pending
    losses: Scalars


class Recorder:
    """Collects observations; hooks call `see`, and `close_step` when a step is over.

    Args:
        head: of the trace.
        path: file that each step is appended to as soon as it is over, or None.
        every: record each so manieth step, from step 0.
        keep: the observation whose values are kept.
    """

    def __init__(
        self, head: dict[str, Any], path: Path | None, every: int, keep: Place | None
    ) -> None:
        self.trace = Trace(head)
        self.every, self.keep = every, keep
        self.number = 0
        self.opened = False
        self.inside: list[str] = []  # paths of the modules whose forward is running
        self._writer = None if path is None else Writer(path, head)
        self._ring = Ring()
        self._lock = threading.RLock()
        self._keys: list[Key] = []
        self._where: list[tuple[torch.device, int]] = []
        self._losses = Scalars()
        self._flying: _Open | None = None
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._busy = threading.local()

    @property
    def on(self) -> bool:
        """Whether this step is recorded, and the recorder is not at work itself in this thread."""
        return self.number % self.every == 0 and not getattr(self._busy, "now", False)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While the recorder's own operators run, which are not to be observed."""
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = False

    def see(self, key: Key, tensor: Tensor, *, known: bool = False) -> None:
        """Observes a tensor; `known`: it may be one that has just been observed, unchanged."""
        if not self.on:
            return
        with self._lock, self.working(), torch.no_grad():
            number = self._known(tensor) if known else None
            if number is None:
                number = self._ring.add(tensor)
                self._remember(tensor, number)
            self._keys.append(key)
            self._where.append((tensor.device, number))
            if self.keep is not None and self.keep.step == self.number and self.keep.key == key:
                self._keep(key, tensor)
            if len(self._keys) >= _MOST:
                self._send()

    def see_tensor(
        self, phase: str, module: str, op: str, kind: str, slot: str, tensor: Tensor,
        *, known: bool = False, source: str = "",
    ) -> None:  # fmt: skip
        """`see` with the key made here."""
        if self.on:
            key = Key(phase, module, op, kind, slot, layout(tensor), source)
            self.see(key, tensor, known=known)

    def see_loss(self, name: str, value: Tensor) -> None:
        """Keeps the value of a scalar, for the curves of a report."""
        if self.on and value.numel() == 1 and value.is_floating_point():
            with self._lock, self.working(), torch.no_grad():
                self._losses.add(name, value)

    def close_step(self) -> None:
        """Ends the step: its digests travel to the host while the next step runs."""
        with self._lock:
            if self._keys:
                self._send()
            self._seen.clear()
            self.number += 1
            self.opened = False

    def finish(self, complete: bool) -> None:
        """Ends the recording; an unfinished step is kept, too."""
        with self._lock:
            if self._keys:
                self._send()
            self._land()
            self._seen.clear()
            self.trace.complete = complete
            if self._writer is not None:
                if complete:
                    self._writer.end(len({step.number for step in self.trace.steps}))
                self._writer.close()

    def _send(self) -> None:
        self._land()
        with self.working():
            self._losses.send()
            self._flying = _Open(
                self.number, self._keys, self._where, self._ring.take(), self._losses
            )
        self._keys, self._where, self._losses = [], [], Scalars()
        self._seen.clear()  # slots begin at 0 again

    def _land(self) -> None:
        if self._flying is None:
            return
        flying, self._flying = self._flying, None
        sums = flying.digests.read()
        digests = [sums[device][slot] for device, slot in flying.where]
        step = Step(flying.number, flying.keys, digests, flying.losses.read())
        if self._writer is not None:
            self._writer.step(step)
        self.trace.append(step)

    def _known(self, tensor: Tensor) -> int | None:
        found = self._seen.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != _version(tensor):
            return None
        return found[2]

    def _remember(self, tensor: Tensor, number: int) -> None:
        version = _version(tensor)
        if version is not None:
            self._seen[id(tensor)] = (weakref.ref(tensor), version, number)

    def _keep(self, key: Key, tensor: Tensor) -> None:
        assert self.keep is not None
        # The observation itself is in the list already.
        if self._keys.count(key) - 1 == self.keep.occurrence and self.trace.kept is None:
            self.trace.kept = {"place": self.keep, "values": tensor.detach().cpu().clone()}


def _version(tensor: Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # tensors of inference mode have none
        return None
