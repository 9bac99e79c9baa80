"""Stands in for experiments/_coco_run.py where only the command around the runs is under test.

Starts in a blink, since it imports nothing. TRUNCDET_FAKE says, separated by commas, what is wrong:
`noise` (fixed_point differs from run to run), `equal` (off does not), `start`, `forget` (a resumed
run ends elsewhere), `nan`, `fail:MODE`, `wait:MODE` (until it is told to stop), `own`, `untied`.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

FAULTS = os.environ.get("TRUNCDET_FAKE", "").split(",")


def main(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())["spec"]
    if f"fail:{spec['mode']}" in FAULTS:
        print("first line\nRuntimeError: broken")
        return 1
    if f"wait:{spec['mode']}" in FAULTS:
        return wait(folder)
    checkpoint = folder / "checkpoint.pt"
    if spec["stop_at"]:
        checkpoint.write_text(str(spec["stop_at"]))
        return 3
    went_on = [int(checkpoint.read_text())] if checkpoint.exists() else []
    (folder / "run.json").write_text(json.dumps(result(spec, went_on)))
    return 0


def wait(folder: Path) -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (folder / "waits").touch()
    until = time.monotonic() + 60
    while not told and time.monotonic() < until:
        time.sleep(0.02)
    (folder / "waits").unlink()
    return 3


def result(spec: dict[str, Any], went_on: list[int]) -> dict[str, Any]:
    mode, seed, steps = spec["mode"], spec["seed"], spec["steps"]
    draw = random.Random(f"{seed}")
    losses = [3.0 / (step + 1) + 0.1 * draw.random() for step in range(steps)]
    ap = 0.5 + 0.01 * draw.random()
    free = mode == "off" and "equal" not in FAULTS
    if spec["weights"] is None and (free or (mode == "fixed_point" and "noise" in FAULTS)):
        gap = 1e-6 * (1 + spec["repeat"] + os.getpid() % 1000)
        losses = losses[:1] + [loss + gap for loss in losses[1:]]
        ap += gap
    if went_on and "forget" in FAULTS:
        losses[-1] += 1.0
    start = f"start{seed}" + (mode if "start" in FAULTS else "")
    stats = {name: ap for name in ("AP", "AP50", "APs")}
    if spec["ties"] and spec["repeat"] == 2 and "noise" in FAULTS:
        stats["AP50"] += 1e-9
    run: dict[str, Any] = {
        "mode": mode,
        "seed": seed,
        "repeat": spec["repeat"],
        "seconds": 1.0,
        "recipe": "none",
        "versions": {"fake": "1"},
        "finite": "nan" not in FAULTS,
        "losses": losses,
        "loss_digests": [loss.hex() for loss in losses],
        "initial_digest": start,
        "weights_digest": f"{losses[-1].hex()}",
        "optimizer_digest": f"o{losses[-1].hex()}",
        "ms_per_step": {"off": 10.0, "fixed_point": 9.0, "truncate": 12.0}[mode] + seed,
        "peak_bytes": (100 + seed) << 20,
        "went_on_from": went_on,
    }
    if spec["evaluate"]:
        kinds = ("bbox", "segm") if spec["model"] == "mask_rcnn" else ("bbox",)
        run["stats"] = {kind: stats for kind in kinds}
        run["own_ap"] = {kind: ap + (0.01 if "own" in FAULTS else 0.0004) for kind in kinds}
        run["detections"] = dict.fromkeys(kinds, 100)
        tied = 40 if "untied" in FAULTS else 60
        run["tied_scores"] = dict.fromkeys(kinds, tied if spec["ties"] else 0)
        run["detections_sha256"] = json.dumps(stats)
    return run


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
