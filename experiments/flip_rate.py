"""How probable is the published trick: how often do two orders of a double sum round apart?

    python experiments/flip_rate.py                             # on a GPU, about --budget seconds
    python experiments/flip_rate.py --device cpu --size tiny --pairs 40

Fresh gradients, each added twice in float64 by torchvision's RoIAlign backward, then rounded to 24
significant bits and fewer; on a CPU, whose order is fixed, the second sum takes the RoIs in another
order. Besides: what the literal cast to half loses. Writes experiments/results/flip_rate_<gpu>.json
and .png (tiny: only with --out); after an interruption the same command keeps the finished scenes.
Exits with 1 if a condition is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _flip_picture
from _checks import Check, conclude, holds
from _environment import RESULTS, describe, pick_device, write_result
from _flip_count import count, first_flip
from _flip_scenes import SCENES
from _literal_cost import moved_boxes, overflow, underflow
from _parts import Parts
from _render_flips import flip_rate as render

SCHEDULE_STEPS = 90_000  # Mask R-CNN's "1x" schedule
STEP_SCENES = ("box head, spread", "mask head, spread")


def check(result: Mapping[str, Any]) -> list[Check]:
    """What must hold; at full size 24 bits must have been too many, else nothing was tested."""
    checks = []
    for scene in result["scenes"]:
        name = scene["scene"]
        explained = scene["flips_among_proved_cells"] == 0
        checks.append(holds(f"{name}: every flip is among the unproved cells", explained))
        checks.append(holds(f"{name}: fixed point repeats", scene["fixed_point_differing"] == 0))
        checks.append(holds(f"{name}: orders differ", scene["cells_apart_in_double"] > 0))
    if result["size"] == "full":
        at_24 = (row["pairs_differing"] for s in result["scenes"] for row in s["rows"][:1])
        checks.append(holds("24 bits differ somewhere", sum(at_24) > 0))
    kept = result["underflow"]
    safe = all(row["truncate"] == 1.0 for row in kept)
    checks.append(holds("truncation keeps every gradient entry", safe))
    lost = all(row["literal"] < 0.1 for row in kept if row["scale"] <= 1e-8)
    checks.append(holds("the literal cast loses small gradients", lost))
    return checks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for all pairs")
    parser.add_argument("--pairs", type=int, default=100_000, help="most pairs of a scene")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if options.pairs < 2 or not options.budget > 0:
        parser.error("--pairs must be at least 2 and --budget above 0")
    device = pick_device(options.device, options.size)
    full = options.size == "full"
    folder = options.out or (RESULTS if full else None)
    result = describe("flip_rate", arguments, device) | {"size": options.size}
    order = "atomics" if device.type == "cuda" else "RoIs permuted"
    parts = Parts(folder, result)
    scenes = []
    for scene in SCENES if full else [scene.tiny() for scene in SCENES]:
        seconds = options.budget / len(SCENES)
        part = functools.partial(count, scene, device, seconds, options.pairs)
        scenes.append(found := parts.get(scene.name, part))
        print(f"{scene.name}: {found['pairs']} pairs", flush=True)
    step = [scene for scene in scenes if scene["scene"] in STEP_SCENES]
    result |= {
        "order": order,
        "scenes": scenes,
        "schedule_steps": SCHEDULE_STEPS,
        "first_flip": {str(t): first_flip(step, t) for t in (24, 11)},
        "underflow": parts.get("underflow", lambda: underflow(device)),
        "overflow": parts.get("overflow", overflow),
        "moved_boxes": parts.get("moved boxes", moved_boxes),
    }
    result["checks"] = check(result)
    if folder is not None:
        path = write_result(folder, result)
        _flip_picture.save(path.with_suffix(".png"), result)
        parts.forget()
    print(render(result))
    return conclude(result["checks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
