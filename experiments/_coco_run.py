"""One run in a process of its own: reads `spec.json` in a folder, leaves `run.json` beside it.

    python experiments/_coco_run.py FOLDER

Exit status: 0 when `run.json` is written; 3 when the run stopped where its spec says, or was told
to stop; another if it failed.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _coco_checkpoint import remove
from _coco_eval import Detection, evaluate
from _coco_record import InterruptedRunError, Recorder
from _coco_spec import Spec, read_spec

import truncdet
from truncdet._atomic import write_bytes, write_text
from truncdet._demo_stop import Stop

STOPPED = 3
SPEC = "spec.json"
RUN = "run.json"
WEIGHTS = "weights.pt"


def run(spec: Spec, folder: Path, keep_going: Callable[[], bool]) -> dict[str, Any] | None:
    """Trains and evaluates as the spec says; None if it was stopped before its end.

    Runs differ in the mode alone: seeds, cuDNN's and cuBLAS's switches are set alike, and RoIAlign
    is the only operator that is replaced.
    """
    start = time.monotonic()
    framework: Any = importlib.import_module(f"_coco_{spec.framework}")
    recorder = Recorder(spec, folder, keep_going)
    flags = truncdet.deterministic(mode="off", seed=spec.seed, frameworks=())
    with flags, framework.scope(spec.mode):
        if spec.weights is not None:
            trained, found = framework.with_weights(spec, Path(spec.weights)), {}
        else:
            try:
                trained = framework.train(spec, recorder, folder)
            except InterruptedRunError:
                trained = None
            if trained is None:
                return None
            found = recorder.finish(trained.model, trained.optimizer)
        if spec.keep_weights:
            _keep(trained.model, folder / WEIGHTS)
        if spec.evaluate:
            recorder.say("evaluates")
            found |= _measure(framework, trained, spec, folder)
    found |= {"seconds": round(time.monotonic() - start, 1)}
    found["recipe"] = framework.RECIPE
    found["versions"] = {
        name: importlib.import_module(name).__version__ for name in framework.PACKAGES
    }
    return {"mode": spec.mode, "seed": spec.seed, "repeat": spec.repeat, **found}


def _measure(framework: Any, trained: Any, spec: Spec, folder: Path) -> dict[str, Any]:
    detections, own = framework.detect(trained, folder)
    figures: dict[str, Any] = {"stats": {}, "own_ap": own, "tied_scores": {}}
    for kind in spec.iou_types:
        result = evaluate(spec.data.val.annotations, detections[kind], kind)
        figures["stats"][kind] = result.stats
        figures["tied_scores"][kind] = tied(detections[kind])
    text = json.dumps(detections, sort_keys=True).encode()
    figures["detections_sha256"] = hashlib.sha256(text).hexdigest()
    figures["detections"] = {kind: len(found) for kind, found in detections.items()}
    return figures


def tied(detections: list[Detection]) -> int:
    """How many detections share their score with another one of their category."""
    counts: dict[tuple[int, float], int] = {}
    for entry in detections:
        key = (entry["category_id"], entry["score"])
        counts[key] = counts.get(key, 0) + 1
    return sum(count for count in counts.values() if count > 1)


def _keep(model: torch.nn.Module, path: Path) -> None:
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    write_bytes(path, content.getvalue())


def main(folder: Path) -> int:
    parent = os.getppid()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    with Stop() as stop:
        # The command that started it may be killed without a word.
        going = lambda: stop.keep_going() and os.getppid() == parent  # noqa: E731
        spec = read_spec(folder / SPEC)
        found = run(spec, folder, going)
    if found is None:
        return STOPPED
    write_text(folder / RUN, json.dumps(found, allow_nan=False))
    remove(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
