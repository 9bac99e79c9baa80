"""Where recorded steps end: with an optimizer's `step`, or at the model's next forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from truncdet._trace_backward import Owners
from truncdet._trace_hook import Hook
from truncdet._trace_recorder import Recorder
from truncdet._trace_state import State


def attach_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    recorder: Recorder,
    owners: Owners,
    state: State,
) -> list[Callable[[], object]]:
    """Registers the hooks and returns what removes them."""
    if optimizer is None:

        def close(*_: Any) -> None:
            if recorder.opened:
                recorder.close_step()
                owners.forget()

        return [model.register_forward_pre_hook(Hook(close), prepend=True).remove]
    steps = _Steps(optimizer, recorder, owners, state)
    return [
        optimizer.register_step_pre_hook(Hook(steps.before)).remove,
        optimizer.register_step_post_hook(Hook(steps.after)).remove,
        model.register_forward_pre_hook(Hook(steps.settle), prepend=True).remove,
        steps.running.clear,
    ]


class _Steps:
    """A class whose `step` calls that of its base runs the hooks once more inside, and one that
    raises never runs those behind it: `running` has the calls of `step`, which say if they are."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, recorder: Recorder, owners: Owners, state: State
    ) -> None:
        self._optimizer, self._recorder = optimizer, recorder
        self._owners, self._state = owners, state
        self.running: list[FrameType] = []

    def before(self, *_: Any) -> None:
        self.settle()
        self.running.append(sys._getframe(2))  # past Hook's
        if len(self.running) == 1:
            self._state.refresh()  # a closure may call the model for the first time
            self._state.see("gradient")

    def after(self, *_: Any) -> None:
        if self.running:
            self.running.pop()
            if not self.running:
                self._end()

    def settle(self, *_: Any) -> None:
        """Ends a step that an exception has ended."""
        if not self.running:
            return
        alive = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            alive.add(id(frame))
            frame = frame.f_back
        self.running[:] = [frame for frame in self.running if id(frame) in alive]
        if not self.running:
            self._end()

    def _end(self) -> None:
        self._state.see("parameter")
        self._state.see_optimizer(self._optimizer)
        self._recorder.close_step()
        self._owners.forget()
