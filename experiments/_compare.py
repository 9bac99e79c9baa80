"""Training runs compared: repeats with each other, the patched mode with the plain one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _checks import Check, holds
from _train_run import MODES, SETTLE


def first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """The first step (from 0) whose digests differ; None if there is none.

    Raises:
        ValueError: the runs are of different length.
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Repeats with each other and modes with each other; all runs train the same thing."""
    by_mode = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    found: dict[str, Any] = {"repeats": {}, "ms_per_step": {}, "peak_bytes": {}}
    for mode, (first, *others) in by_mode.items():
        found["repeats"][mode] = None
        for other in others:
            found["repeats"][mode] = {
                "first_difference": first_difference(first["loss_digests"], other["loss_digests"]),
                "weights_equal": first["weights_digest"] == other["weights_digest"],
            }
        times = [ms for run in by_mode[mode] for ms in run["step_ms"][_settled(run) :]]
        found["ms_per_step"][mode] = statistics.median(times)
        peaks = [run["peak_bytes"] for run in by_mode[mode]]
        found["peak_bytes"][mode] = None if None in peaks else max(peaks)
    for key in ("ms_per_step", "peak_bytes"):
        plain, ours = (found[key][mode] for mode in MODES)
        found[f"{key}_ratio"] = ours / plain if plain else None
    return found


def check_repeats(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Check]:
    """What holds of equal trainings on any device: finite, and the patched ones repeat."""
    repeats = compare(runs)["repeats"]["fixed_point"]
    return [
        holds(f"{name}: all losses finite", all(run["finite"] for run in runs)),
        holds(f"{name}: patched losses repeat", repeats["first_difference"] is None),
        holds(f"{name}: patched weights repeat", repeats["weights_equal"]),
    ]


def _settled(run: Mapping[str, Any]) -> int:
    return min(SETTLE, len(run["step_ms"]) // 2)
