"""experiments/frameworks.py on the real frameworks: tiny models, a few steps, on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _frameworks import framework

from truncdet import digest

framework("mmdet")
framework("detectron2")

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"

sys.path.append(str(EXPERIMENTS))
detectors: Any = importlib.import_module("_detectors")
NAMES = list(detectors.DETECTORS)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program wrote, in a process of its own as a user starts it."""
    folder = tmp_path_factory.mktemp("results")
    arguments = ("--device", "cpu", "--size", "tiny", "--steps", "2", "--out", str(folder))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXPERIMENTS / "frameworks.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conditions met" in done.stdout and "| mmdet-cascade-rcnn " in done.stdout
    found: dict[str, Any] = json.loads((folder / "frameworks_cpu.json").read_text())
    return found


def runs(result: dict[str, Any], name: str, mode: str) -> list[dict[str, Any]]:
    return [r for r in result["runs"] if (r["detector"], r["mode"]) == (name, mode)]


def test_all_detectors_are_there_and_complete(result: dict[str, Any]) -> None:
    assert result["complete"] and not result["failures"]
    assert list(result["comparisons"]) == NAMES
    assert {"mmcv", "mmengine", "mmdet", "detectron2"} < set(result["versions"])
    assert str(ROOT) not in json.dumps(result)


@pytest.mark.parametrize("name", NAMES)
def test_a_detector_learns_and_its_patched_runs_repeat(result: dict[str, Any], name: str) -> None:
    first, second = runs(result, name, "fixed_point")
    assert len(set(first["loss_digests"])) == 2 and first["trained"]
    assert first["loss_digests"] == second["loss_digests"]
    assert first["weights_digest"] == second["weights_digest"]


@pytest.mark.parametrize("name", NAMES)
def test_patched_and_plain_compute_the_same_with_other_kernels(
    result: dict[str, Any], name: str
) -> None:
    plain, patched = (runs(result, name, mode)[0] for mode in ("off", "fixed_point"))
    assert plain["losses"][0] == pytest.approx(patched["losses"][0], abs=1e-4)
    assert plain["weights_digest"] != patched["weights_digest"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leaves_the_batch_as_it_was(name: str) -> None:
    detector = detectors.DETECTORS[name]
    ours = importlib.import_module(detector.module)
    model = ours.build(detector.config, "tiny", "off")
    batch = ours.batch_of(model, "tiny", torch.device("cpu"))
    before = digest_of(batch)
    ours.losses_of(model, batch)
    assert digest_of(batch) == before
    assert digest_of(ours.batch_of(model, "tiny", torch.device("cpu"))) == before


@pytest.mark.parametrize("name", NAMES)
def test_the_full_batch_is_one_that_the_shipped_config_can_learn(name: str) -> None:
    detector = detectors.DETECTORS[name]
    ours = importlib.import_module(detector.module)
    model = ours.build(detector.config, "full", "off")
    batch = ours.batch_of(model, "full", torch.device("cpu"))
    assert ours.classes_of(model) == 80
    images, labels = tensors_of(batch)[:2]
    assert [tuple(image.shape) for image in images] == 4 * [(3, 800, 1088)]
    assert all(image.dtype == torch.uint8 and image.max() > 200 for image in images)
    assert all(len(found) == 8 and 0 <= found.min() <= found.max() < 80 for found in labels)


def tensors_of(batch: Any) -> tuple[list[torch.Tensor], ...]:
    """Images, labels, boxes and masks, each a list with an entry for every image."""
    if isinstance(batch, dict):
        found = [sample.gt_instances for sample in batch["data_samples"]]
        masks = [torch.from_numpy(f.masks.masks) for f in found if "masks" in f]
        return batch["inputs"], [f.labels for f in found], [f.bboxes for f in found], masks
    found = [entry["instances"] for entry in batch]
    masks = [f.gt_masks.tensor.byte() for f in found]
    boxes = [f.gt_boxes.tensor for f in found]
    return [entry["image"] for entry in batch], [f.gt_classes for f in found], boxes, masks


def digest_of(batch: Any) -> list[str]:
    return [digest(tensor).hex for kind in tensors_of(batch) for tensor in kind]
