"""What the runs of coco_map.py say, mode by mode, and the conditions that they must meet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _checks import Check, at_most, holds
from _compare import first_difference

Run = Mapping[str, Any]

CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # for an interval that says anything
LEARNT = 0.05  # AP below which equal figures say little
# Beside ours stands the framework's own figure, which mmdet rounds to three decimals.
OWN_ROUNDING = 0.0006


def summarize(
    runs: Sequence[Run], modes: Sequence[str], iou_types: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By mode: repeats of each seed compared, AP at full precision, mean over the seeds."""
    found = {}
    for mode in modes:
        by_seed: dict[str, list[Run]] = {}
        for run in sorted((r for r in runs if r["mode"] == mode), key=lambda r: r["repeat"]):
            by_seed.setdefault(str(run["seed"]), []).append(run)
        found[mode] = {
            "seeds": {seed: _compare(repeats, iou_types) for seed, repeats in by_seed.items()},
            "mean_ap": {kind: _mean(by_seed, kind) for kind in iou_types},
            "peak_bytes": max((r["peak_bytes"] for rs in by_seed.values() for r in rs), default=0),
        }
    return found


def _compare(repeats: list[Run], iou_types: Sequence[str]) -> dict[str, Any]:
    """The repeats of one seed; comparisons are None if there is nothing to compare with."""
    first, others = repeats[0], repeats[1:]
    ap = {kind: [run["stats"][kind]["AP"] for run in repeats] for kind in iou_types}
    compared: dict[str, Any] = {"ap": ap, "spread": {}, "first_difference": None, "equal": None}
    for kind, values in ap.items():
        known = [value for value in values if value is not None]
        compared["spread"][kind] = max(known) - min(known) if len(known) > 1 else None
    if others:
        steps = [first_difference(first["loss_digests"], o["loss_digests"]) for o in others]
        compared["first_difference"] = min((s for s in steps if s is not None), default=None)
        compared["equal"] = {
            name: all(first[key] == other[key] for other in others)
            for name, key in (
                ("losses", "loss_digests"),
                ("weights", "weights_digest"),
                ("optimizer", "optimizer_digest"),
                ("detections", "detections_sha256"),
            )
        }
    return compared


def _mean(by_seed: Mapping[str, list[Run]], kind: str) -> dict[str, Any] | None:
    """Mean AP over the seeds; each seed counts once, by the mean of its repeats."""
    values = [[run["stats"][kind]["AP"] for run in repeats] for repeats in by_seed.values()]
    if not values or any(value is None for repeats in values for value in repeats):
        return None
    return {"confidence": CONFIDENCE, **interval([statistics.fmean(v) for v in values])}


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and Student's confidence interval, None for both ends of a single value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return {"n": n, "mean": mean, "low": None, "high": None}
    half = student_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return {"n": n, "mean": mean, "low": mean - half, "high": mean + half}


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t for which Student's distribution has `confidence` of its mass in [-t, t]."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)

    def mass(t: float) -> float:
        # x = sqrt(freedom) tan(a) turns the density into a power of a cosine; Simpson's rule.
        end, n = math.atan(t / math.sqrt(freedom)), 2000
        heights = [math.cos(end * i / n) ** (freedom - 1) for i in range(n + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        integral = (heights[0] + inner + heights[-1]) * end / (3 * n)
        return 2 * scale * math.sqrt(freedom) * integral

    low, high = 0.0, 1.0
    while mass(high) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < confidence else (low, middle)
    return high


def overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two intervals have a value in common."""
    return bool(a["low"] <= b["high"] and b["low"] <= a["high"])


def check(
    runs: Sequence[Run], modes: Mapping[str, Mapping[str, Any]], with_limits: bool
) -> list[Check]:
    """The conditions; `with_limits`: also those of full size on a GPU."""
    checks = [
        holds("all losses finite", all(run["finite"] for run in runs)),
        holds("weights change", all(r["weights_digest"] != r["initial_digest"] for r in runs)),
        holds("equal seeds start with equal weights", _start_equal(runs)),
    ]
    checks += _check_own(runs)
    for seed, found in modes.get("fixed_point", {"seeds": {}})["seeds"].items():
        if found["equal"] is not None:
            for name, equal in found["equal"].items():
                checks.append(holds(f"fixed_point, seed {seed}: {name} repeat", equal))
            for kind, spread in found["spread"].items():
                checks.append(
                    holds(f"fixed_point, seed {seed}: {kind} AP spread is 0", spread == 0)
                )
    if not with_limits:
        return checks
    for seed, found in modes.get("off", {"seeds": {}})["seeds"].items():
        if found["equal"] is not None:
            differ = not found["equal"]["losses"] and not found["equal"]["weights"]
            checks.append(holds(f"off, seed {seed}: runs differ", differ))
            spread = max(value or 0 for value in found["spread"].values())
            checks.append(holds(f"off, seed {seed}: AP differs", spread > 0))
    lowest = min((s["AP"] or 0 for run in runs for s in run["stats"].values()), default=0)
    checks.append(holds(f"all AP above {LEARNT}", lowest > LEARNT))
    return checks + _check_means(modes)


def _check_own(runs: Sequence[Run]) -> list[Check]:
    """Whether the framework's own evaluator says what ours does."""
    gaps = [
        abs(own - (run["stats"][kind]["AP"] or 0))
        for run in runs
        for kind, own in run["own_ap"].items()
    ]
    return [at_most("AP from the framework's evaluator", max(gaps), OWN_ROUNDING)] if gaps else []


def _check_means(modes: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """No accuracy is lost: intervals of the means over the seeds overlap with that of `off`."""
    checks = []
    plain = modes["off"]["mean_ap"] if "off" in modes else {}
    for mode, found in modes.items():
        for kind, mean in found["mean_ap"].items():
            other = plain.get(kind)
            if mode == "off" or not mean or not other:
                continue
            if min(mean["n"], other["n"]) >= FEWEST_SEEDS:
                name = f"{mode}: mean {kind} AP overlaps with off"
                checks.append(holds(name, overlap(mean, other)))
    return checks


def _start_equal(runs: Sequence[Run]) -> bool:
    starts: dict[int, set[str]] = {}
    for run in runs:
        starts.setdefault(run["seed"], set()).add(run["initial_digest"])
    return all(len(found) == 1 for found in starts.values())
