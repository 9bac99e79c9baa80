"""A polite stop: the first Ctrl-C (or SIGTERM) ends the demo after the step at hand."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Context manager in which a signal sets `requested` to its number instead of raising.

    A second signal acts as it did outside, so an impatient user is not held up.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def keep_going(self) -> bool:
        return self.requested is None

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None stands for a handler that was not set from Python and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
