"""Mask R-CNN R50-FPN trained twice, plain and patched: are the bits equal, and what does it cost?

    python experiments/train_step.py                            # on a GPU, within --budget seconds
    python experiments/train_step.py --device cpu --size tiny --steps 2 --precisions float32

Batch 4 of 800 x 1088, random initialisation, one fixed batch; of all switches only cudnn's
`deterministic` is set. Writes experiments/results/train_step_<gpu>.json (tiny: only with --out),
and exits with 1 if a condition is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _checks import Check, at_most, conclude, holds
from _environment import RESULTS, describe, pick_device, write_result
from _mask_rcnn import make_batch, make_model
from _render import train_step as render
from _train_run import DTYPES, MODES, SETTLE, train

STEP_TIME_LIMIT = 1.00  # patched by plain
PEAK_LIMIT = 1.04
PROBE_STEPS = 6
FEWEST_STEPS = 2 * SETTLE
MARGIN = 0.95  # of the time that is left; the rest is for what the probe could not see

# Plain runs in float32 are repeated to show that they differ; elsewhere one gives the step time.
PLAIN_REPEATS = {"float32": 2, "float16": 1, "bfloat16": 1}
PATCHED_REPEATS = 2


def schedule(precision: str) -> list[tuple[str, int]]:
    """Modes and repeats in turn, so that a drift of the clock meets both modes."""
    number = {"off": PLAIN_REPEATS[precision], "fixed_point": PATCHED_REPEATS}
    return [(m, r) for r in range(PATCHED_REPEATS) for m in MODES if r < number[m]]


def affordable(
    wanted: Mapping[str, int], step_s: Mapping[str, float], fixed_s: float, left_s: float
) -> dict[str, int]:
    """Steps by precision that fit into the time left; all are cut in the same proportion."""
    runs = {precision: len(schedule(precision)) for precision in wanted}
    time_for_steps = MARGIN * left_s - fixed_s * sum(runs.values())
    needed = sum(runs[p] * wanted[p] * step_s[p] for p in wanted)
    share = min(1.0, max(0.0, time_for_steps / needed)) if needed > 0 else 1.0
    return {p: max(min(wanted[p], FEWEST_STEPS), int(wanted[p] * share)) for p in wanted}


def first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """The first step (from 0) whose digests differ; None if there is none.

    Raises:
        ValueError: the runs are of different length.
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Repeats with each other and modes with each other; all runs are of one precision."""
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


def _settled(run: Mapping[str, Any]) -> int:
    return min(SETTLE, len(run["step_ms"]) // 2)


def check(precision: str, runs: Sequence[Mapping[str, Any]], with_limits: bool) -> list[Check]:
    """The conditions on the runs of one precision."""
    found = compare(runs)
    repeats = found["repeats"]["fixed_point"]
    checks = [
        holds(f"{precision}: all losses finite", all(run["finite"] for run in runs)),
        holds(f"{precision}: patched losses repeat", repeats["first_difference"] is None),
        holds(f"{precision}: patched weights repeat", repeats["weights_equal"]),
    ]
    # In float16 the first steps only find the scale.
    if with_limits or precision != "float16":
        checks.append(holds(f"{precision}: parameters change", all(run["trained"] for run in runs)))
    if with_limits:
        time_name, peak_name = f"{precision}: step time", f"{precision}: peak memory"
        checks.append(at_most(time_name, found["ms_per_step_ratio"], STEP_TIME_LIMIT))
        checks.append(at_most(peak_name, found["peak_bytes_ratio"], PEAK_LIMIT))
    return checks


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, default=200, help="float32 steps of each run")
    parser.add_argument("--amp-steps", type=int, default=60, help="steps in float16 and bfloat16")
    parser.add_argument("--budget", type=float, default=135.0, help="seconds; cuts steps to fit")
    parser.add_argument("--precisions", default=",".join(DTYPES), help="separated by commas")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if min(options.steps, options.amp_steps) < 2:
        parser.error("--steps and --amp-steps must be at least 2")
    precisions = options.precisions.split(",")
    if not precisions or set(precisions) - set(DTYPES):
        parser.error(f"--precisions must be of {', '.join(DTYPES)}, got {options.precisions}")
    device = pick_device(options.device)
    full = options.size == "full"
    # For the life of the process: these are the conditions of every run.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    model, batch = make_model(options.size), make_batch(options.size, device)
    wanted = {p: options.steps if p == "float32" else options.amp_steps for p in precisions}
    step_s, fixed_s = {}, 0.0
    for precision in wanted if full else ():
        before = time.monotonic()
        ms = train(model, batch, precision, "off", 0, PROBE_STEPS)["step_ms"]
        step_s[precision] = statistics.median(ms[PROBE_STEPS // 2 :]) / 1000
        # The last probe's is kept: the first also loads the libraries.
        fixed_s = time.monotonic() - before - sum(ms) / 1000
    left_s = options.budget - (time.monotonic() - start)
    steps = affordable(wanted, step_s, fixed_s, left_s) if full else wanted
    result = describe("train_step", arguments, device)
    result |= {"size": options.size, "requested_steps": wanted, "steps": steps, "complete": False}
    result |= {"runs": [], "comparisons": {}, "checks": []}
    folder = options.out or (RESULTS if full else None)
    for precision in wanted:
        runs = []
        for mode, repeat in schedule(precision):
            run = train(model, batch, precision, mode, repeat, steps[precision])
            runs.append(run)
            print(
                f"{precision} {mode} {repeat}: {run['ms_per_step']:.1f} ms a step, last loss "
                f"{run['losses'][-1]}, weights {run['weights_digest']}",
                flush=True,
            )
        result["runs"] += runs
        result["comparisons"][precision] = compare(runs)
        result["checks"] += check(precision, runs, full and device.type == "cuda")
        result["complete"] = len(result["comparisons"]) == len(DTYPES)
        # After every precision: what was measured survives if the rest is cut off.
        if folder is not None:
            write_result(folder, result)
    print(render(result))
    return conclude(result["checks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
