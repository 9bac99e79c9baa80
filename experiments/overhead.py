"""What repeatability costs, operator by operator, beside the kernels in common use.

    python experiments/overhead.py                              # on a GPU, about two minutes
    python experiments/overhead.py --device cpu --size tiny     # does everything run?

Prints the tables, writes experiments/results/overhead_<gpu>.json (tiny: only with --out), and exits
with 1 if a limit is missed. Durations are medians between CUDA events, on inputs that stay where
they are: what fits is read from the L2 cache, for both sides alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _measure as measure
import _ways_picture
import torch
from _already_section import CASES as ALREADY_CASES
from _already_section import check_already, measure_already
from _checks import Check, at_most, conclude, holds
from _deform_section import CASES as DEFORM_CASES
from _deform_section import check_deform, measure_deform
from _environment import RESULTS, describe, pick_device, write_result
from _loss_section import CASES as LOSS_CASES
from _loss_section import check_loss, measure_loss
from _render import (
    already_times,
    deform_times,
    loss_times,
    overhead_details,
    overhead_times,
    pooling_times,
    resample_times,
    rotated_times,
    sampling_times,
    scatter_times,
    ways_times,
)
from _resample_section import CASES as RESAMPLE_CASES
from _resample_section import check_resample, measure_resample
from _roi_cases import CASES, FORWARD_LIMIT, Calls, Case
from _roi_section import CASES as POOLING_CASES
from _roi_section import check_pooling, measure_pooling
from _rotated_section import CASES as ROTATED_CASES
from _rotated_section import check_rotated, measure_rotated
from _sampling_section import CASES as SAMPLING_CASES
from _sampling_section import check_sampling, measure_sampling
from _scatter_section import CASES as SCATTER_CASES
from _scatter_section import check_scatter, measure_scatter
from _ways_section import CASES as WAYS_CASES
from _ways_section import check_ways, measure_step, measure_ways

ERROR_LIMIT = 1.25  # our error against float64, by the native kernel's
# Besides the output a backward may allocate so much for a RoI, and the allocator rounds two
# allocations up to blocks of 2 MiB. A second buffer of the output's size is far beyond it.
SCRATCH_PER_ROI = 8192
ALLOCATOR_SLACK = 2 * (2 << 20)

# Beside RoIAlign's rows, by their key in the result: the cases, what measures and what checks one
# of them, and the table.
SECTIONS: dict[str, tuple[Any, Any, Any, Callable[[dict[str, Any]], str]]] = {
    "scatter": (SCATTER_CASES, measure_scatter, check_scatter, scatter_times),
    "resample": (RESAMPLE_CASES, measure_resample, check_resample, resample_times),
    "sampling": (SAMPLING_CASES, measure_sampling, check_sampling, sampling_times),
    "pooling": (POOLING_CASES, measure_pooling, check_pooling, pooling_times),
    "rotated": (ROTATED_CASES, measure_rotated, check_rotated, rotated_times),
    "deform": (DEFORM_CASES, measure_deform, check_deform, deform_times),
    "loss": (LOSS_CASES, measure_loss, check_loss, loss_times),
    "already": (ALREADY_CASES, measure_already, check_already, already_times),
    "ways": (WAYS_CASES, measure_ways, check_ways, ways_times),
}


def measure_case(
    case: Case, device: torch.device, channels_last: bool, repeats: int
) -> dict[str, Any]:
    """One row of the result."""
    calls = Calls.make(case, device, channels_last)
    row: dict[str, Any] = dataclasses.asdict(case)
    row["layout"] = "channels_last" if channels_last else "NCHW"
    row["output_bytes"] = calls.features.numel() * calls.features.element_size()
    for side, (forward, backward) in (("native", calls.native()), ("truncdet", calls.ours())):
        row[side] = {
            "forward_ms": measure.median_ms(forward, device, repeats),
            "backward_ms": measure.median_ms(backward, device, repeats),
            "backward_peak_bytes": measure.peak_bytes(backward, device),
            "bits_equal": measure.repeats_equal(backward),
        }
    for part in ("forward", "backward"):
        row[f"{part}_ratio"] = row["truncdet"][f"{part}_ms"] / row["native"][f"{part}_ms"]
    row["errors"] = measure_errors(calls, device)
    return row


def measure_errors(calls: Calls, device: torch.device) -> dict[str, Any] | None:
    """Errors of both sides against the native kernel in float64; None where memory is too small."""
    if device.type == "cuda":
        # Features, gradient, their float64 copies and two results with differences beside them.
        needed = 8 * 8 * max(calls.features.numel(), calls.grad.numel())
        if torch.cuda.mem_get_info(device)[0] < needed:
            return None
    sides = {"native": calls.native(), "truncdet": calls.ours()}
    found: dict[str, Any] = {}
    for number, part in enumerate(("forward", "backward")):
        exact = calls.double().native()[number]()
        found[part] = {side: measure.errors(pair[number](), exact) for side, pair in sides.items()}
    return found


def check_row(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row; memory and errors in full-size rows, times in those that are NCHW too."""
    name = f"{row['name']}, {row['layout']}"
    checks = [holds(f"{name}: bits repeat", row["truncdet"]["bits_equal"])]
    if not with_limits:
        return checks
    if row["layout"] == "NCHW":
        checks.append(at_most(f"{name}: backward", row["backward_ratio"], row["backward_limit"]))
        checks.append(at_most(f"{name}: forward", row["forward_ratio"], FORWARD_LIMIT))
    scratch = row["truncdet"]["backward_peak_bytes"] - row["output_bytes"]
    allowed = SCRATCH_PER_ROI * row["images"] * row["rois_per_image"] + ALLOCATOR_SLACK
    checks.append(at_most(f"{name}: bytes beyond the output", scratch, allowed))
    for part, sides in (row["errors"] or {}).items():
        for norm, ours in sides["truncdet"].items():
            limit = ERROR_LIMIT * sides["native"][norm]
            checks.append(at_most(f"{name}: {part} error, {norm}", ours, limit))
    return checks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    device = pick_device(options.device, options.size)
    tiny = options.size == "tiny"
    with_limits = device.type == "cuda" and not tiny
    repeats = 3 if tiny else measure.REPEATS
    result = describe("overhead", arguments, device)
    result["size"] = options.size
    measure.wake(device)
    checks: list[Check] = []
    result["rows"] = []
    for case in CASES:
        for channels_last in (False, True):
            small = case.tiny() if tiny else case
            row = measure_case(small, device, channels_last, repeats)
            result["rows"].append(row)
            checks += check_row(row, with_limits)
            print(f"measured {row['name']}, {row['layout']}", file=sys.stderr, flush=True)
    for key, (cases, measure_one, check_one, _) in SECTIONS.items():
        result[key] = []
        for section_case in cases:
            small = section_case.tiny() if tiny else section_case
            row = measure_one(small, device, repeats)
            result[key].append(row)
            checks += check_one(row, with_limits)
            print(f"measured {key}: {row.get('name', row.get('operator'))}", file=sys.stderr)
    step = measure_step(options.size, device)
    result["ways"].append(step)
    checks += check_ways(step, with_limits)
    result["checks"] = checks
    for table in (overhead_times, overhead_details, *(section[3] for section in SECTIONS.values())):
        print(table(result), end="\n\n")
    folder = options.out or (None if tiny else RESULTS)
    if folder is not None:
        path = write_result(folder, result)
        _ways_picture.save(path.with_suffix(".png"), result["ways"])
        print("written:", path.name)
    return conclude(checks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
