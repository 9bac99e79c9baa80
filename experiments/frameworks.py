"""Detectors of mmdet and detectron2 trained twice, plain and patched: are the bits equal?

    python experiments/frameworks.py                            # on a GPU, within --budget seconds
    python experiments/frameworks.py --device cpu --size tiny --steps 2

The configs that the packages ship, batch 4 of 800 x 1088, random initialisation, one fixed batch;
of all switches only cudnn's `deterministic` is set. mmdet gets the mode through its config key,
detectron2 through the patch. Needs both packages (`make frameworks`), and a GPU for full size.
Writes experiments/results/frameworks_<gpu>.json after every model (tiny: only with --out), and
exits with 1 if a condition is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _budget import affordable, probe
from _checks import Check, at_most, conclude, holds
from _compare import check_repeats, compare
from _detectors import DETECTORS, Built, check_packages
from _environment import RESULTS, describe, pick_device, write_result
from _render import frameworks as render
from _train_run import MODES, SETTLE

STEP_TIME_LIMIT = 1.00  # patched by plain
# Modes in turn, so that a drift of the clock meets both.
SCHEDULE = tuple((mode, repeat) for repeat in range(2) for mode in MODES)


def check(
    name: str, runs: Sequence[Mapping[str, Any]], same_start: bool, with_limits: bool
) -> list[Check]:
    """The conditions on the runs of one detector; `with_limits`: those of full size on a GPU."""
    checks = [holds(f"{name}: plain and patched start equal", same_start)]
    checks += check_repeats(name, runs)
    checks.append(holds(f"{name}: parameters change", all(run["trained"] for run in runs)))
    if with_limits:
        found = compare(runs)
        differ = found["repeats"]["off"]["first_difference"] is not None
        checks.append(holds(f"{name}: losses fall", all(_fall(run["losses"]) for run in runs)))
        checks.append(holds(f"{name}: plain runs differ", differ))
        checks.append(at_most(f"{name}: step time", found["ms_per_step_ratio"], STEP_TIME_LIMIT))
    return checks


def _fall(losses: Sequence[float | None]) -> bool:
    """Whether the last losses lie below the first one."""
    finite = [loss for loss in losses if loss is not None]
    return len(finite) == len(losses) and statistics.median(finite[-SETTLE:]) < finite[0]


class Experiment:
    """What `main` measures, and the result as far as it has come."""

    def __init__(self, arguments: Sequence[str], options: argparse.Namespace) -> None:
        self.start = time.monotonic()
        self.full = options.size == "full"
        self.device = pick_device(options.device, options.size)
        self.folder = options.out or (RESULTS if self.full else None)
        self.result = describe("frameworks", arguments, self.device)
        self.result |= {"size": options.size, "requested_steps": options.steps}
        self.result |= {"steps": {}, "complete": False, "detectors": {}, "runs": []}
        self.result |= {"comparisons": {}, "failures": {}, "checks": []}

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"[{self.seconds():4.0f} s] {text}", flush=True)

    def write(self) -> None:
        """Writes what there is; nothing measured never replaces an earlier result."""
        self.result["complete"] = set(self.result["comparisons"]) == set(DETECTORS)
        if self.folder is not None and self.result["runs"]:
            write_result(self.folder, self.result)

    @contextlib.contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """One detector that fails is a missed condition; the others are measured all the same."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.result["failures"][name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.result["checks"].append(holds(f"{name}: trains", False))

    def prepare(self, names: Sequence[str], size: str) -> dict[str, Built]:
        built = {}
        for name in names:
            with self.going_on(name):
                built[name] = Built(DETECTORS[name], size)
                self.result["versions"] |= built[name].versions
                self.result["detectors"][name] = built[name].described
        return built

    def steps(self, built: Mapping[str, Built], steps: int, budget_s: float) -> dict[str, int]:
        """Steps by detector: as many as wanted, or at full size as the budget allows."""
        if not self.full:
            return dict.fromkeys(built, steps)
        step_s, fixed_s = {}, 0.0
        for name, made in built.items():
            with self.going_on(name):
                found = probe(functools.partial(made.train, self.device, "off"))
                step_s[name], fixed_s = found[0], fixed_s + len(SCHEDULE) * found[1]
                self.say(f"{name}: {1000 * step_s[name]:.1f} ms a step in a probe")
        wanted, runs = (dict.fromkeys(step_s, n) for n in (steps, len(SCHEDULE)))
        return affordable(wanted, runs, step_s, fixed_s, budget_s - self.seconds())

    def measure(self, name: str, built: Built, steps: int) -> None:
        runs = []
        for mode, repeat in SCHEDULE:
            run = built.train(self.device, mode, steps)
            runs.append({"detector": name, "mode": mode, "repeat": repeat, **run})
            self.say(
                f"{name} {mode} {repeat}: {run['ms_per_step']:.1f} ms a step, losses "
                f"{run['losses'][0]} to {run['losses'][-1]}, weights {run['weights_digest']}"
            )
        with_limits = self.full and self.device.type == "cuda"
        self.result["steps"][name] = steps
        self.result["runs"] += runs
        self.result["comparisons"][name] = compare(runs)
        self.result["checks"] += check(name, runs, built.same_start, with_limits)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds; cuts steps to fit")
    parser.add_argument("--models", default=",".join(DETECTORS), help="separated by commas")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    names = options.models.split(",")
    if set(names) - set(DETECTORS) or len(set(names)) < len(names):
        parser.error(f"--models must be of {', '.join(DETECTORS)}, got {options.models}")
    experiment = Experiment(arguments, options)
    check_packages(names)
    # For the life of the process: these are the conditions of every run.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    built = experiment.prepare(names, options.size)
    for name, steps in experiment.steps(built, options.steps, options.budget).items():
        with experiment.going_on(name):
            experiment.measure(name, built[name], steps)
        # After every detector: what was measured survives if the rest is cut off.
        experiment.write()
    experiment.write()
    print(render(experiment.result))
    return conclude(experiment.result["checks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
