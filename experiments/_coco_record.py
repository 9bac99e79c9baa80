"""What a run leaves behind: losses and digests of every step, times, peak memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _coco_spec import Spec
from _train_run import SETTLE, StepClock
from torch import Tensor, nn

import truncdet
from truncdet._demo_memory import peak_bytes, reset_peak

PROGRESS = "progress.json"
PROGRESS_EVERY = 10  # steps
WEIGHTS_EVERY = 50  # steps between two digests of all weights, outside of the clock


class InterruptedRunError(Exception):
    """The run is to end, and has no checkpoint to write."""


class Recorder:
    """Called around every step; nothing in here takes part in the training."""

    def __init__(self, spec: Spec, folder: Path, keep_going: Callable[[], bool]) -> None:
        self.device = spec.torch_device()
        self.keep_going = keep_going
        self._spec, self._folder = spec, folder
        self._rows: list[Tensor] = []
        self._ms: list[float] = []  # of earlier processes
        self._weights: dict[str, str] = {}
        self._initial = ""
        self.went_on_from: list[int] = []
        self._clock = StepClock(self.device)

    @property
    def steps(self) -> int:
        return len(self._rows)

    def start(self, model: nn.Module) -> None:
        """Call it with the model as it is before the first step."""
        self._initial = truncdet.digest(model.state_dict()).hex
        self.say("trains")

    def before_step(self) -> None:
        if not self._rows:
            reset_peak(self.device)
        self._clock.mark()

    def after_step(self, losses: Tensor | Mapping[str, Tensor | float], model: nn.Module) -> None:
        """`losses` by name, or in the order of their names."""
        self._clock.mark()
        if isinstance(losses, Mapping):
            losses = torch.stack([torch.as_tensor(losses[name]).float() for name in sorted(losses)])
        self._rows.append(losses.detach())
        if self.steps % WEIGHTS_EVERY == 0:
            self._weights[str(self.steps)] = truncdet.digest(model.state_dict()).hex
        if self.steps % PROGRESS_EVERY == 0:
            self.say("trains")

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "rows": torch.stack(self._rows).cpu(),
            "ms": self._ms + self._clock.milliseconds()[::2],
            "weights": dict(self._weights),
            "initial": self._initial,
            "went_on_from": list(self.went_on_from),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the recorder of a checkpoint was."""
        self._rows = list(state["rows"].to(self.device))
        self._ms, self._weights = list(state["ms"]), dict(state["weights"])
        self._initial = state["initial"]
        self.went_on_from = [*state["went_on_from"], self.steps]
        reset_peak(self.device)

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The training as the result file has it; call it before anything is evaluated."""
        peak = peak_bytes(self.device)
        ms = self._ms + self._clock.milliseconds()[::2]
        losses = torch.stack(self._rows).cpu()
        settled = ms[min(SETTLE, len(ms) // 2) :]
        weights = truncdet.digest(model.state_dict()).hex
        return {
            "finite": bool(losses.isfinite().all()),
            # JSON has no NaN.
            "losses": [x if x - x == 0 else None for x in losses.sum(1).tolist()],
            "loss_digests": [truncdet.digest(row).hex for row in losses],
            "initial_digest": self._initial,
            "weights_digests": self._weights,
            "weights_digest": weights,
            "optimizer_digest": truncdet.digest(optimizer.state_dict()).hex,
            "ms_per_step": statistics.median(settled),
            "ms_per_step_range": [round(min(settled), 3), round(max(settled), 3)],
            "peak_bytes": peak,
            "went_on_from": self.went_on_from,
        }

    def say(self, phase: str) -> None:
        """Leaves a note for the command that waits; one that is torn by a race is passed over."""
        total = float(self._rows[-1].sum()) if self._rows else None
        note = {"phase": phase, "step": self.steps, "loss": total}
        (self._folder / PROGRESS).write_text(json.dumps(note))
