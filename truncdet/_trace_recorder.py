"""What a recording is made of: observations in the order of time, closed step by step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from truncdet._trace_file import Key, Step, Trace, Writer
from truncdet._trace_ring import Pending, Ring, made_plain
from truncdet._trace_scalars import Scalars
from truncdet._trace_site import Site
from truncdet._trace_values import readable

_MOST = 100_000  # observations after which an unusually long step is written in parts
Where = tuple[torch.device, int]  # a device and the number of a slot there


class Place(NamedTuple):
    """One observation of a run: its step, its key, and the how-manieth of that key in the step."""

    step: int
    key: Key
    occurrence: int


class _Open(NamedTuple):
    """A step whose digests are on their way."""

    number: int
    keys: list[Key]
    where: list[Where]
    digests: Pending
    losses: Scalars


class _Busy(threading.local):
    now = False


class Recorder:
    """Collects observations; hooks call `see` if `on`, and `close_step` when a step is over.

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
        self._ring = Ring(self.working)
        self._lock = threading.RLock()
        self._keys: list[Key] = []
        self._where: list[Where] = []
        self._losses = Scalars()
        self._flying: _Open | None = None
        # By identity: version, memory and layout of what was observed in this step, and its slot.
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int, str, Where]] = {}
        self._busy = _Busy()
        self._wanted = True

    @property
    def on(self) -> bool:
        """Whether this step is recorded, and the recorder is not at work itself in this thread."""
        return self._wanted and not self._busy.now

    @contextmanager
    def working(self) -> Iterator[None]:
        """While the recorder's own operators run, which are not to be observed."""
        before, self._busy.now = self._busy.now, True
        try:
            yield
        finally:
            self._busy.now = before

    def see(self, observed: Iterable[tuple[Site, str, Tensor]], *, known: bool = False) -> None:
        """Observes tensors of one moment: sites, slots and values, digested before it returns.

        `known`: they may have been observed before in this step. One that is the same object and
        has not been written since has the same digest and is not read again.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # Inside torch.func, whose transforms would have our operators too.
            observed = list(observed)
            with temporarily_clear_interpreter_stack():
                self.see(observed, known=known)
            return
        # The hottest loop of a recording: it calls nothing that it can do itself.
        with self._lock:
            ring, keys, where = self._ring, self._keys, self._where
            seen, keep = self._seen, self.keep
            for site, slot, tensor in observed:
                device = tensor.device
                about = slot, tensor.dtype, tensor.shape, tensor.stride(), device
                key, is_plain = site.known.get(about) or site.learn(about, tensor)
                place, version = None, -1
                if known:
                    try:
                        version, memory = tensor._version, tensor.data_ptr()
                    except RuntimeError:  # tensors of inference mode have no version
                        pass
                    else:
                        old = seen.get(id(tensor))
                        if (
                            old is not None
                            and old[0]() is tensor
                            and old[1] == version
                            and old[2] == memory
                            and old[3] == key.layout
                        ):
                            place = old[4]
                if place is None:
                    if is_plain and not tensor.is_neg():
                        place = device, ring.put(tensor, device)
                    else:
                        with self.working(), torch.no_grad():
                            place = device, ring.put(made_plain(tensor), device)
                    if version >= 0:
                        seen[id(tensor)] = weakref.ref(tensor), version, memory, key.layout, place
                keys.append(key)
                where.append(place)
                if keep is not None and keep.step == self.number and keep.key == key:
                    self._keep(key, tensor)
            ring.flush()
            if len(keys) >= _MOST:
                self._send()

    def see_same(self, keys: list[Key], values: list[Tensor], device: torch.device) -> None:
        """`see` for plain tensors of one device whose keys are known."""
        with self._lock:
            put = self._ring.put
            self._where += [(device, put(value, device)) for value in values]
            self._keys += keys
            self._ring.flush()

    def see_loss(self, name: str, value: Tensor) -> None:
        """Keeps the value of a scalar, for the curves of a report."""
        if self.on and readable(value) and value.numel() == 1 and value.is_floating_point():
            with self._lock, self.working(), torch.no_grad():
                self._losses.add(name, value)

    def close_step(self) -> None:
        """Ends the step: its digests travel to the host while the next step runs."""
        with self._lock:
            if self._keys:
                self._send()
            self._seen.clear()
            self.number += 1
            self._wanted = self.number % self.every == 0
            self.opened = False

    def finish(self, complete: bool) -> None:
        """Ends the recording; an unfinished step is kept, too."""
        with self._lock:
            if self._keys:
                self._send()
            self._land()
            self._seen.clear()
            self._wanted = False
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
        if len(sums) == 1:
            (one,) = sums.values()
            digests = [one[slot] for _, slot in flying.where]
        else:
            digests = [sums[device][slot] for device, slot in flying.where]
        step = Step(flying.number, flying.keys, digests, flying.losses.read())
        if self._writer is not None:
            self._writer.step(step)
        self.trace.append(step)

    def _keep(self, key: Key, tensor: Tensor) -> None:
        assert self.keep is not None
        # The observation itself is in the list already.
        if self._keys.count(key) - 1 == self.keep.occurrence and self.trace.kept is None:
            with self.working(), torch.no_grad():
                values = tensor.detach().cpu().clone()
            self.trace.kept = {"place": self.keep, "values": values}
