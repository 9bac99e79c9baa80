"""Values of a few scalars of a step, copied to the host without waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Scalars:
    """Collects scalars by name, sends them off once, and reads them later."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._copy: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Takes the value of now: the tensor may change afterwards."""
        self._values[name] = value.detach().reshape(()).to(torch.float64, copy=True)

    def send(self) -> None:
        """Starts the copy."""
        if not self._values:
            return
        stacked = torch.stack([v.to(next(iter(self._values.values())).device, non_blocking=True)
                               for v in self._values.values()])  # fmt: skip
        if stacked.device.type != "cuda":
            self._copy = stacked.cpu()
            return
        # Only into pinned memory does a copy not wait.
        self._copy = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        self._copy.copy_(stacked, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(stacked.device))

    def read(self) -> dict[str, float | None]:
        """The values by name, None where not finite; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        numbers = [] if self._copy is None else self._copy.tolist()
        pairs = zip(self._values, numbers, strict=True) if numbers else ()
        return {name: number if number - number == 0 else None for name, number in pairs}
