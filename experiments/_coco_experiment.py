"""What the studies of coco_map.py have in common: folders, runs, budget, result and exit code."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _budget import PROBE_STEPS, affordable
from _checks import Check, conclude, holds
from _coco_children import Children, Job
from _coco_data import describe_data
from _coco_options import Options
from _coco_plot import save_picture
from _coco_studies import map_jobs
from _environment import RESULTS, describe, write_result

from truncdet._atomic import write_text
from truncdet._demo_stop import Stop

MARK = "coco_map"  # a file in folders of runs that this program made, and may therefore remove


class Experiment:
    """What the command measures, and the result as far as it has come.

    Studies say which runs there are (`study`) and what they show (`fill`).
    """

    def __init__(self, arguments: Sequence[str], options: Options, stop: Stop) -> None:
        self.start = time.monotonic()
        self.options, self.stop = options, stop
        spec = options.spec
        self.full = spec.size == "full"
        self.folder = options.out or (RESULTS if self.full else None)
        place = self.folder or Path(tempfile.mkdtemp(prefix="coco_map-"))
        self.work = (options.work or place / f"{options.name}.runs").resolve()
        head = describe("coco_map", arguments, spec.torch_device())
        origin = {key: head[key] for key in ("commit", "dirty", "device", "versions")}
        self.children = Children(self.work, origin, stop.keep_going, self.say)
        self.result = head | {"experiment": f"coco_{options.study}", "size": spec.size}
        self.result |= {"framework": spec.framework, "model": spec.model}
        self.result |= {"seeds": list(options.seeds), "iou_types": list(spec.iou_types)}
        self.result |= {"data": describe_data(spec.data), "requested_steps": spec.steps}
        self.result |= {"steps": spec.steps, "complete": False, "failures": {}, "runs": []}
        self.named: dict[str, dict[str, Any]] = {}

    def study(self) -> None:
        """Carries out the runs."""
        raise NotImplementedError

    def fill(self) -> list[Check]:
        """Puts what the runs show into the result, and returns the conditions."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)

    def prepare(self) -> None:
        """Makes the folder of the runs; runs that lie there are an interrupted command's."""
        if self.work.exists() and any(self.work.iterdir()):
            if not self.options.resume or not (self.work / MARK).exists():
                raise SystemExit(
                    f"--resume: must be given to go on with the runs in {self.work}; remove the "
                    "folder to start anew"
                )
        self.work.mkdir(parents=True, exist_ok=True)
        if not (self.work / MARK).exists():
            write_text(self.work / MARK, "")

    def fit_budget(self) -> None:
        """Cuts the steps to what --budget allows, by a short run; the result says both numbers.

        An interrupted command goes on with the steps that it began with.
        """
        options = self.options
        if options.budget is None:
            return
        chosen = (self.work / MARK).read_text()
        steps = int(chosen) if chosen else self._affordable()
        write_text(self.work / MARK, str(steps))
        cut = dataclasses.replace(options.spec, steps=steps)
        self.options = dataclasses.replace(options, spec=cut)
        self.result["steps"] = steps
        self.say(f"{steps} of {options.spec.steps} steps fit into {options.budget:.0f} s")

    def _affordable(self) -> int:
        options = self.options
        assert options.budget is not None
        spec = dataclasses.replace(options.spec, steps=2 * PROBE_STEPS, checkpoint_every=0)
        before = time.monotonic()
        found: list[dict[str, Any]] = []
        self.children.run([Job("probe", spec)], 1, lambda job, run: found.append(run))
        if not found:
            raise SystemExit("--budget: the run that measures the time of a step did not end")
        step_s = found[0]["ms_per_step"] / 1000
        # A probe that an earlier command left took no time now.
        took = max(time.monotonic() - before, found[0]["seconds"])
        fixed_s = took - spec.steps * step_s
        runs = len(map_jobs(options))
        # Runs at once share the device: their starts overlap, their steps are taken to queue up.
        return affordable(
            {"run": options.spec.steps},
            {"run": runs},
            {"run": step_s},
            fixed_s * runs / options.jobs,
            options.budget - (time.monotonic() - self.start),
        )["run"]

    def carry_out(self, jobs: Sequence[Job], at_once: int, show: bool = True) -> None:
        """Runs what is missing; after every run the result so far is written."""

        def done(job: Job, run: dict[str, Any]) -> None:
            self.result["versions"] |= run.pop("versions")
            self.result["recipe"] = run.pop("recipe")
            self.named[job.name] = run
            if show:
                self.conclude()

        troubles = self.children.run(jobs, at_once, done)
        self.result["failures"] |= {name: text for name, text in troubles.items() if text}

    def conclude(self) -> None:
        """Fills the result from the runs that have ended, and writes it."""
        options, result = self.options, self.result
        result["training"] = {
            key: value
            for key, value in options.spec.as_json().items()
            if key in ("size", "batch", "learning_rate", "image_size", "amp")
        }
        result["training"]["warm_up"] = options.spec.warm_up
        result["training"]["drop_at"] = options.spec.drop_at
        checks = [holds(f"{name}: ran", False) for name in result["failures"]]
        # In the order of the plan, not of the ends.
        result["checks"] = checks + self.fill()
        if self.folder is not None and result["runs"]:
            write_result(self.folder, result, options.name)

    def finish(self) -> int:
        """Writes the whole result and the picture, prints the table, removes the runs."""
        complete = not self.stop.requested and not self.result["failures"]
        self.result["complete"] = complete
        picture = f"{self.options.name}.png"
        if self.folder is not None and complete and self.options.study == "map":
            if save_picture(self.folder / picture, self.result):
                self.result["picture"] = picture
        self.conclude()
        if self.stop.requested:
            self.say("Stopped: the runs that ended are kept, --resume goes on from here")
            return 128 + self.stop.requested
        # Late: it needs a result to show.
        render: Any = getattr(importlib.import_module("_coco_render"), f"coco_{self.options.study}")
        print(render(self.result))
        if complete:
            shutil.rmtree(self.work)
        return conclude(self.result["checks"])
