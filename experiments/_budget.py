"""How many steps fit into the seconds that a run may take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from _train_run import SETTLE

PROBE_STEPS = 6
FEWEST_STEPS = 2 * SETTLE
MARGIN = 0.95  # of the time that is left; the rest is for what the probe could not see


def affordable(
    wanted: Mapping[str, int],
    runs: Mapping[str, int],
    step_s: Mapping[str, float],
    fixed_s: float,
    left_s: float,
) -> dict[str, int]:
    """Steps by name that fit into the time left; all are cut in the same proportion.

    `runs` are the number of runs by name, `fixed_s` what all of them take beside their steps.
    """
    needed = sum(runs[name] * wanted[name] * step_s[name] for name in wanted)
    time_for_steps = MARGIN * left_s - fixed_s
    share = min(1.0, max(0.0, time_for_steps / needed)) if needed > 0 else 1.0
    return {n: max(min(wanted[n], FEWEST_STEPS), int(wanted[n] * share)) for n in wanted}


def probe(run: Callable[[int], Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of one step, and those of a run beside its steps; `run` trains so many steps."""
    before = time.monotonic()
    ms = run(PROBE_STEPS)["step_ms"]
    step_s = statistics.median(ms[PROBE_STEPS // 2 :]) / 1000
    return step_s, time.monotonic() - before - sum(ms) / 1000
