"""The common part of the stories' programs: options, runs of both modes, result and picture."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _story_picture
import torch
from _checks import Check, conclude, holds
from _environment import RESULTS, describe, pick_device, write_result
from _equal_runs import MODES, repeat, summary
from _parts import Parts
from _render_stories import story as render

Train = Callable[[torch.device, bool], dict[str, Any]]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every story has."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--size", choices=("full", "tiny"), default="full")
    made.add_argument("--repeats", type=int, default=10, help="runs of each mode")
    made.add_argument("--out", type=Path, help="folder of the result file")
    return made


def check(modes: Mapping[str, Mapping[str, Any]], atomics: bool) -> list[Check]:
    """`atomics`: on a device whose plain kernels add in no fixed order."""
    ours, plain = modes["truncdet"], modes["plain"]
    checks = [
        holds("truncdet: one set of weights", ours["distinct_weights"] == 1),
        holds("truncdet: one score", ours["distinct_scores"] == 1),
        holds("truncdet: all losses equal", ours["first_difference"] is None),
    ]
    if atomics:
        checks.append(holds("plain: weights differ", plain["distinct_weights"] > 1))
    return checks


def main(name: str, score: str, doc: str | None, arguments: Sequence[str], train: Train) -> int:
    """Runs a story whose `train(device, full)` makes one run; returns the exit code."""
    options_of = parser(doc)
    options = options_of.parse_args(arguments)
    if options.repeats < 2:
        options_of.error("--repeats must be at least 2")
    device = pick_device(options.device, options.size)
    full = options.size == "full"
    folder = options.out or (RESULTS if full else None)
    result = describe(name, arguments, device) | {"size": options.size, "score": score}
    parts = Parts(folder, result)
    runs: list[dict[str, Any]] = []
    for mode in MODES:
        one = functools.partial(train, device, full)
        runs += parts.get(mode, functools.partial(repeat, one, mode, options.repeats))
        print(f"{mode}: {options.repeats} runs", flush=True)
    result |= {"runs": runs, "modes": {}}
    for mode in MODES:
        result["modes"][mode] = summary([run for run in runs if run["mode"] == mode])
    result["checks"] = check(result["modes"], device.type == "cuda")
    if folder is not None:
        path = write_result(folder, result)
        _story_picture.save(path.with_suffix(".png"), result)
        parts.forget()
    print(render(result))
    return conclude(result["checks"])
