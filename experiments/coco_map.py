"""COCO's AP of detectors trained repeatedly from equal seeds: does it repeat to the last bit?

    python experiments/coco_map.py --framework torchvision --model faster_rcnn        # on a GPU
    python experiments/coco_map.py --framework mmdet --model mask_rcnn --jobs 3
    python experiments/coco_map.py --only-evaluate        # fixed weights, three times, with ties
    python experiments/coco_map.py --stop-and-resume      # stopped at half against not stopped
    python experiments/coco_map.py --device cpu --size tiny --out FOLDER     # minutes on a CPU

Every run is a process of its own that gets nothing but its seed and mode. Writes
experiments/results/coco_map_<framework>_<model>.json and a picture (tiny: only with --out), keeps
finished runs for --resume, and exits with 1 if a condition is missed. The images must lie under
TRUNCDET_DATA or in experiments/data, unless --data says where; README.md names the public sources.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence

from _checks import Check
from _coco_experiment import Experiment
from _coco_options import parse
from _coco_report import check, summarize
from _coco_studies import (
    check_evaluations,
    check_resumed,
    compare_resumed,
    evaluation_groups,
    evaluation_jobs,
    map_jobs,
    resume_jobs,
    timing_jobs,
    training_jobs,
)
from _environment import pick_device

from truncdet._demo_stop import Stop


class Map(Experiment):
    """Equal trainings, mode by mode."""

    def study(self) -> None:
        self.carry_out(map_jobs(self.options), self.options.jobs)
        if self.options.jobs > 1 and self.stop.keep_going():
            self.carry_out(timing_jobs(self.options), 1, show=False)

    def fill(self) -> list[Check]:
        options, result = self.options, self.result
        planned = [job for job in map_jobs(options) if job.name in self.named]
        result["runs"] = [self.named[job.name] for job in planned]
        result["modes"] = summarize(result["runs"], options.modes, options.spec.iou_types)
        # Runs at once slow each other down.
        apart = options.jobs > 1
        timed: dict[str, list[float]] = {mode: [] for mode in options.modes}
        for job in timing_jobs(options) if apart else planned:
            if job.name in self.named:
                timed[job.spec.mode].append(self.named[job.name]["ms_per_step"])
        result["timing"] = {
            "apart": apart,
            "runs_at_once": options.jobs,
            "steps": options.timing_steps if apart else options.spec.steps,
            "ms_per_step": {mode: statistics.median(ms) for mode, ms in timed.items() if ms},
        }
        with_limits = self.full and options.spec.device == "cuda"
        return check(result["runs"], result["modes"], with_limits)


class Evaluate(Experiment):
    """Evaluation alone, of fixed weights."""

    def study(self) -> None:
        options = self.options
        training = training_jobs(options)
        self.carry_out(training, options.jobs, show=False)
        trained = {job.spec.mode for job in training if job.name in self.named}
        jobs = [j for j in evaluation_jobs(options, self.work) if j.spec.mode in trained]
        self.carry_out(jobs, options.jobs)

    def fill(self) -> list[Check]:
        self.result["runs"] = [{"name": name, **run} for name, run in self.named.items()]
        self.result["groups"] = evaluation_groups(self.named, self.options)
        return check_evaluations(self.result["groups"])


class Resume(Experiment):
    """A run that was stopped and resumed, and one that was not."""

    def study(self) -> None:
        stopped, ended = resume_jobs(self.options)
        # A stopped run that went on and ended is not to be stopped again.
        missing = [job for job in stopped if self.children.finished(job) is None]
        self.carry_out(missing, self.options.jobs, show=False)
        self.carry_out(ended, self.options.jobs)

    def fill(self) -> list[Check]:
        self.result["runs"] = [{"name": name, **run} for name, run in self.named.items()]
        self.result["comparisons"] = compare_resumed(self.named, self.options)
        return check_resumed(self.result["comparisons"], self.options)


STUDIES = {"map": Map, "evaluate": Evaluate, "resume": Resume}


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments, (__doc__ or "").partition("\n")[0])
    device = pick_device(options.spec.device, options.spec.size)
    spec = dataclasses.replace(options.spec, device=device.type)
    with Stop() as stop:
        experiment = STUDIES[options.study](
            arguments, dataclasses.replace(options, spec=spec), stop
        )
        try:
            experiment.prepare()
            experiment.fit_budget()
            experiment.study()
        except ValueError as error:  # a folder of runs that does not fit to the command
            raise SystemExit(str(error)) from error
        return experiment.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
