"""The keys of what is observed at one place, made once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from truncdet._trace_file import Key
from truncdet._trace_ring import layout, plain

_LAYOUTS = 256  # of one site that are remembered: a batch's sizes may differ in every step


class Site:
    """Where something is observed again and again: makes keys, and remembers those it made."""

    __slots__ = ("_names", "known")

    def __init__(self, phase: str, module: str, op: str, kind: str, source: str = "") -> None:
        self._names = phase, module, op, kind, source
        # By slot, dtype, shape, strides and device: the key, and whether tensors are plain.
        self.known: dict[Any, tuple[Key, bool]] = {}

    def learn(self, about: Any, tensor: Tensor) -> tuple[Key, bool]:
        """Makes the key of a tensor that `about` is said of."""
        if len(self.known) >= _LAYOUTS:
            self.known.clear()
        phase, module, op, kind, source = self._names
        key = Key(phase, module, op, kind, about[0], layout(tensor), source)
        found = self.known[about] = key, plain(tensor)
        return found
