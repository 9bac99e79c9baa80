"""The three studies of coco_map.py: which runs each needs, and what it concludes from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _checks import Check, holds
from _coco_children import Job
from _coco_options import Options
from _coco_run import WEIGHTS
from _coco_spec import Spec

Runs = Mapping[str, Mapping[str, Any]]

EVALUATIONS = 3
FEWEST_TIES = 0.5  # share of detections that must have a tied score where logits are rounded
WHOLE, STOPPED = "whole", "stopped"


def map_jobs(options: Options) -> list[Job]:
    """All modes x seeds x repeats; modes in turn, so that a drift of the clock meets all."""
    jobs = []
    for seed, repeats in zip(options.seeds, options.repeats, strict=True):
        for repeat in range(repeats):
            for mode in options.modes:
                spec = _run(options, mode=mode, seed=seed, repeat=repeat)
                jobs.append(Job(f"{mode}-seed{seed}-run{repeat}", spec))
    return jobs


def timing_jobs(options: Options) -> list[Job]:
    """Short runs of every mode, to be carried out one at a time."""
    changes = {"steps": options.timing_steps, "evaluate": False, "checkpoint_every": 0}
    return [Job(f"timing-{mode}", _run(options, mode=mode, **changes)) for mode in options.modes]


def training_jobs(options: Options) -> list[Job]:
    """For the evaluation alone: one run of every mode that leaves its weights."""
    changes = {"evaluate": False, "keep_weights": True}
    return [Job(f"train-{mode}", _run(options, mode=mode, **changes)) for mode in options.modes]


def evaluation_jobs(options: Options, work: Path) -> list[Job]:
    jobs = []
    for mode in options.modes:
        weights = str(work / f"train-{mode}" / WEIGHTS)
        for ties in (False, True):
            for repeat in range(EVALUATIONS):
                spec = _run(options, mode=mode, repeat=repeat, weights=weights, ties=ties)
                name = f"evaluate-{mode}-{'ties' if ties else 'plain'}{repeat}"
                jobs.append(Job(name, spec))
    return jobs


def resume_jobs(options: Options) -> tuple[list[Job], list[Job]]:
    """Those that are stopped and those that end; a stopped one ends in the second list."""
    half = options.spec.steps // 2
    stopped = [
        Job(f"{mode}-{STOPPED}", _run(options, mode=mode, stop_at=half)) for mode in options.modes
    ]
    ended = [
        Job(f"{mode}-{part}", _run(options, mode=mode))
        for mode in options.modes
        for part in (WHOLE, STOPPED)
    ]
    return stopped, ended


def evaluation_groups(runs: Runs, options: Options) -> list[dict[str, Any]]:
    """The evaluations of one model with one kind of logits, compared."""
    groups = []
    kind = options.spec.iou_types[-1]
    for mode in options.modes:
        for ties in (False, True):
            prefix = f"evaluate-{mode}-{'ties' if ties else 'plain'}"
            found = [run for name, run in runs.items() if name.startswith(prefix)]
            if not found:
                continue
            first = found[0]
            groups.append(
                {
                    "mode": mode,
                    "ties": ties,
                    "runs": len(found),
                    "ap": {k: [r["stats"][k]["AP"] for r in found] for k in options.spec.iou_types},
                    "ap_equal": all(run["stats"] == first["stats"] for run in found),
                    "detections_equal": _alike(found, "detections_sha256"),
                    "detections_sha256": [run["detections_sha256"] for run in found],
                    "detections": first["detections"][kind],
                    "tied_scores": first["tied_scores"][kind],
                }
            )
    return groups


def check_evaluations(groups: Sequence[Mapping[str, Any]]) -> list[Check]:
    checks = []
    for group in groups:
        name = f"{group['mode']}, {'tied scores' if group['ties'] else 'plain'}"
        checks.append(holds(f"{name}: {EVALUATIONS} runs", group["runs"] == EVALUATIONS))
        checks.append(holds(f"{name}: AP repeats", group["ap_equal"]))
        checks.append(holds(f"{name}: detections repeat", group["detections_equal"]))
        if group["ties"]:
            enough = group["tied_scores"] >= FEWEST_TIES * group["detections"] > 0
            checks.append(holds(f"{name}: most scores are tied", enough))
    return checks


def compare_resumed(runs: Runs, options: Options) -> dict[str, dict[str, Any]]:
    """By mode: the run that was stopped beside the one that was not."""
    compared = {}
    for mode in options.modes:
        pair = [runs.get(f"{mode}-{part}") for part in (WHOLE, STOPPED)]
        if None in pair:
            continue
        whole, stopped = (run for run in pair if run is not None)
        both = [whole, stopped]
        compared[mode] = {
            "stopped_at": stopped["went_on_from"][0] if stopped["went_on_from"] else None,
            "losses": _alike(both, "loss_digests"),
            "weights": _alike(both, "weights_digest"),
            "optimizer": _alike(both, "optimizer_digest"),
            "ap": {k: [run["stats"][k]["AP"] for run in both] for k in options.spec.iou_types},
        }
    return compared


def check_resumed(compared: Mapping[str, Mapping[str, Any]], options: Options) -> list[Check]:
    """`off` need not repeat, stopped or not."""
    checks = [holds("all modes have both runs", set(compared) == set(options.modes))]
    for mode, found in compared.items():
        half = found["stopped_at"] == options.spec.steps // 2
        checks.append(holds(f"{mode}: stopped at half", half))
        if mode == "fixed_point":
            for part in ("losses", "weights", "optimizer"):
                checks.append(holds(f"{mode}: {part} equal", found[part]))
            for kind, values in found["ap"].items():
                checks.append(holds(f"{mode}: {kind} AP equal", len(set(values)) == 1))
    return checks


def _run(options: Options, **changes: Any) -> Spec:
    return dataclasses.replace(options.spec, **changes)


def _alike(runs: Sequence[Mapping[str, Any]], key: str) -> bool:
    return all(run[key] == runs[0][key] for run in runs)
