"""Recording a training of Mask R-CNN: what it costs, and whom it names.

    python experiments/record_cost.py                           # on a GPU, under two minutes
    python experiments/record_cost.py --device cpu --size tiny --steps 3

The model and batch of train_step.py. Plain and recorded steps give the cost at module level; two
recorded plain runs must differ first in a backward of roi_align, two under truncdet must be equal
over all steps. Writes experiments/results/record_cost_<gpu>.json (tiny: only with --out), and exits
with 1 if a condition is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _checks import Check, at_most, conclude, holds
from _environment import RESULTS, describe, pick_device, write_result
from _mask_rcnn import SEED, make_batch, make_model
from _render_record import record_cost as render
from _train_run import SETTLE, StepClock
from torch import nn

import truncdet

STEP_LIMIT = 1.25  # a recorded step by a plain one
MEMORY_LIMIT = 64 << 20  # more at the peak
COST_STEPS = 40


def run(
    model: nn.Module, batch: Any, device: torch.device, steps: int, *, recorded: bool, ours: bool
) -> dict[str, Any]:
    """One training from the seed: times, peak memory, and the trace if recorded."""
    gpu = device.type == "cuda"
    images, targets = batch
    scope = truncdet.deterministic(seed=SEED) if ours else contextlib.nullcontext()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(SEED)
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    clock = StepClock(device)
    with scope, contextlib.ExitStack() as undo:
        trace = undo.enter_context(truncdet.record(model, optimizer)) if recorded else None
        clock.mark()
        for _ in range(steps):
            losses = model(images, targets)
            optimizer.zero_grad(set_to_none=True)
            torch.stack([losses[name] for name in sorted(losses)]).sum().backward()
            optimizer.step()
            clock.mark()
    times = clock.milliseconds()
    return {
        "ms_per_step": statistics.median(times[min(SETTLE, steps // 2) :]),
        "peak_bytes": int(torch.cuda.max_memory_allocated(device)) if gpu else None,
        "trace": trace,
    }


def measure(size: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Cost, culprit and equality."""
    model, batch = make_model(size), make_batch(size, device)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        short = min(steps, COST_STEPS)
        run(model, batch, device, 3, recorded=False, ours=False)  # loads the libraries
        cost = {
            name: [run(model, batch, device, short, recorded=r, ours=False) for _ in range(2)]
            for name, r in (("plain", False), ("recorded", True))
        }
        ours = [run(model, batch, device, steps, recorded=True, ours=True) for _ in range(2)]
    finally:
        cudnn.deterministic = before
    traces = [found["trace"] for found in cost["recorded"]]
    plain = truncdet.compare(*traces)
    equal = truncdet.compare(*(found["trace"] for found in ours))
    found: dict[str, Any] = {
        "observations_per_step": len(traces[0].steps[-1].keys),
        "plain_verdict": plain.as_dict(),
        "truncdet_verdict": equal.as_dict(),
        "steps": steps,
    }
    for name, runs in cost.items():
        peaks = [one["peak_bytes"] for one in runs]
        found[name] = {
            "ms_per_step": min(one["ms_per_step"] for one in runs),
            "peak_bytes": None if None in peaks else max(peaks),
        }
    found["ratio"] = found["recorded"]["ms_per_step"] / found["plain"]["ms_per_step"]
    if found["plain"]["peak_bytes"] is not None:
        found["more_bytes"] = found["recorded"]["peak_bytes"] - found["plain"]["peak_bytes"]
    return found


def check(found: dict[str, Any], with_limits: bool) -> list[Check]:
    """Equality everywhere; cost and culprit at full size on a GPU."""
    ours, plain = found["truncdet_verdict"], found["plain_verdict"]
    checks = [
        holds("under truncdet the recordings are equal", ours["equal"] is True),
        holds("all steps were compared", ours["steps_compared"] == found["steps"]),
    ]
    if with_limits:
        culprit = (plain["op"] or "").lower().replace("_", "")
        named = plain["phase"] == "backward" and "roialign" in culprit
        checks += [
            holds("plain: roi_align's backward is named first", named),
            at_most("recorded step by the plain one", found["ratio"], STEP_LIMIT),
            at_most("bytes more at the peak", found["more_bytes"], MEMORY_LIMIT),
        ]
    return checks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, default=100, help="of the runs under truncdet")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    device = pick_device(options.device, options.size)
    full = options.size == "full"
    result = describe("record_cost", arguments, device) | {"size": options.size}
    result |= measure(options.size, device, options.steps)
    result["checks"] = check(result, full and device.type == "cuda")
    folder = options.out or (RESULTS if full else None)
    if folder is not None:
        write_result(folder, result)
    print(render(result))
    return conclude(result["checks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
