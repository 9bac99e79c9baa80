"""Mask R-CNN R50-FPN trained twice, plain and patched: are the bits equal, and what does it cost?

    python experiments/train_step.py                            # on a GPU, within --budget seconds
    python experiments/train_step.py --device cpu --size tiny --steps 2 --precisions float32

Batch 4 of 800 x 1088, random initialisation, one fixed batch; of all switches only cudnn's
`deterministic` is set. Writes experiments/results/train_step_<gpu>.json (tiny: only with --out),
and exits with 1 if a condition is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _budget import MARGIN as MARGIN
from _budget import affordable as fit
from _budget import probe
from _checks import Check, at_most, conclude, holds
from _compare import check_repeats, compare
from _compare import first_difference as first_difference
from _environment import RESULTS, describe, pick_device, write_result
from _mask_rcnn import make_batch, make_model
from _render import train_step as render
from _train_run import DTYPES, MODES, train

STEP_TIME_LIMIT = 1.00  # patched by plain
PEAK_LIMIT = 1.04

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
    """Steps by precision that fit into the time left; `fixed_s` is of one run."""
    runs = {precision: len(schedule(precision)) for precision in wanted}
    return fit(wanted, runs, step_s, fixed_s * sum(runs.values()), left_s)


def check(precision: str, runs: Sequence[Mapping[str, Any]], with_limits: bool) -> list[Check]:
    """The conditions on the runs of one precision."""
    found = compare(runs)
    checks = check_repeats(precision, runs)
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
    device = pick_device(options.device, options.size)
    full = options.size == "full"
    # For the life of the process: these are the conditions of every run.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    model, batch = make_model(options.size), make_batch(options.size, device)
    wanted = {p: options.steps if p == "float32" else options.amp_steps for p in precisions}
    step_s, fixed_s = {}, 0.0
    for precision in wanted if full else ():
        found = probe(functools.partial(train, model, batch, precision, "off", 0))
        # The last probe's is kept: the first also loads the libraries.
        step_s[precision], fixed_s = found
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
