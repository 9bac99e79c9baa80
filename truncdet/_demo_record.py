"""What one training run leaves behind, and how two runs compare; no torch, no screen."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunRecord:
    """One run, filled in step by step, so that it is valid whenever it is read.

    `losses[i]` is the loss of step i, `loss_digests[i]` the digest of that loss,
    `weights_digests[i]` the digest of all weights after step i, `step_ms[i]` its wall time.
    """

    mode: str
    repeat: int
    losses: list[float] = field(default_factory=list)
    loss_digests: list[str] = field(default_factory=list)
    weights_digests: list[str] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    ap: float | None = None
    ap50: float | None = None
    peak_bytes: int | None = None
    complete: bool = False

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def name(self) -> str:
        """Mode and A for the first run, B for the second."""
        return f"{self.mode} {'AB'[self.repeat]}"

    @property
    def ms_per_step(self) -> float | None:
        # The median: the first steps, which warm up caches and kernels, do not move it.
        return statistics.median(self.step_ms) if self.step_ms else None

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "repeat": self.repeat,
            "complete": self.complete,
            "losses": list(self.losses),
            "loss_digests": list(self.loss_digests),
            "weights_digest": self.weights_digests[-1] if self.weights_digests else None,
            "weights_digests": list(self.weights_digests),
            "mAP": self.ap,
            "AP50": self.ap50,
            "ms_per_step": self.ms_per_step,
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True)
class Comparison:
    """Run A against run B of one mode, over the steps that both have."""

    steps: int
    loss_step: int | None
    weights_step: int | None
    largest: float

    @property
    def first(self) -> int | None:
        """The first step whose loss differs; if only weights differ, the step that made them so."""
        return self.loss_step if self.loss_step is not None else self.weights_step


def compare(a: RunRecord, b: RunRecord) -> Comparison:
    """Compares digests, hence bits; `largest` is the largest |loss A - loss B|."""
    steps = min(a.steps, b.steps)
    gaps = [abs(x - y) for x, y in zip(a.losses[:steps], b.losses[:steps], strict=True)]
    return Comparison(
        steps,
        _first(a.loss_digests[:steps], b.loss_digests[:steps]),
        _first(a.weights_digests[:steps], b.weights_digests[:steps]),
        max(gaps, default=0.0),
    )


def compare_modes(runs: list[RunRecord], modes: tuple[str, ...]) -> dict[str, Comparison]:
    """One comparison per mode; a mode without two runs is compared over no steps."""
    result = {}
    for mode in modes:
        pair = [run for run in runs if run.mode == mode]
        result[mode] = compare(*pair) if len(pair) == 2 else Comparison(0, None, None, 0.0)
    return result


def is_usable(loss: float) -> bool:
    """False once the training has diverged; JSON has no NaN and no infinity either."""
    return math.isfinite(loss)


def _first(a: list[str], b: list[str]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
