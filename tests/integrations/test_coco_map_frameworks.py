"""Runs of experiments/coco_map.py on the real mmdet and detectron2: tiny models, a few steps."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _frameworks import framework

framework("mmdet")
framework("detectron2")

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"

sys.path.append(str(EXPERIMENTS))
coco_run: Any = importlib.import_module("_coco_run")
coco_data: Any = importlib.import_module("_coco_data")
coco_order: Any = importlib.import_module("_coco_order")
coco_record: Any = importlib.import_module("_coco_record")
coco_report: Any = importlib.import_module("_coco_report")
coco_spec: Any = importlib.import_module("_coco_spec")

FRAMEWORKS = ("mmdet", "detectron2")
DATA = {"faster_rcnn": "bccd_tiny", "mask_rcnn": "nuclei_tiny"}
STEPS = 3
BITS = ("loss_digests", "weights_digest", "optimizer_digest", "detections_sha256")

Train = Callable[..., dict[str, Any]]


def a_spec(name: str, model: str, mode: str, batch: int = 2) -> Any:
    return coco_spec.Spec(
        framework=name,
        model=model,
        size="tiny",
        device="cpu",
        mode=mode,
        seed=3,
        repeat=0,
        steps=STEPS,
        batch=batch,
        learning_rate=0.005,
        image_size=96,
        amp="float32",
        data=coco_data.find_data(DATA[model]),
    )


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Carries out a run in this process, each in a folder of its own."""
    level = logging.getLogger("detectron2").level
    monkeypatch.setattr(logging.getLogger("detectron2"), "level", level)

    def train(name: str, model: str, mode: str = "fixed_point", batch: int = 2) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        found = coco_run.run(a_spec(name, model, mode, batch), folder, lambda: True)
        assert found is not None
        return dict(found)

    return train


def bits(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in BITS}


@pytest.mark.parametrize("model", ["faster_rcnn", "mask_rcnn"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_runs_repeat_and_the_frameworks_evaluator_agrees(
    train: Train, name: str, model: str
) -> None:
    plain, ours = train(name, model, "off"), train(name, model)
    assert bits(ours) == bits(train(name, model))
    assert ours["initial_digest"] == plain["initial_digest"] != ours["weights_digest"]
    assert len(set(ours["loss_digests"])) == STEPS and ours["finite"]
    # The same training with another RoIAlign.
    assert ours["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-5)
    assert ours["weights_digest"] != plain["weights_digest"]
    kinds = ["bbox"] if model == "faster_rcnn" else ["bbox", "segm"]
    assert list(ours["stats"]) == list(ours["own_ap"]) == kinds
    assert all(ours["detections"][kind] > 0 for kind in kinds)
    (agrees,) = coco_report._check_own([plain, ours])
    assert agrees["passed"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_truncate_is_another_arithmetic(train: Train, name: str) -> None:
    found, ours = (train(name, "faster_rcnn", mode) for mode in ("truncate", "fixed_point"))
    assert found["initial_digest"] == ours["initial_digest"]
    assert found["weights_digest"] != ours["weights_digest"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_long_gradients_are_cut_as_a_whole(
    train: Train, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = importlib.import_module(f"_coco_{name}")
    before = train(name, "faster_rcnn")
    monkeypatch.setattr(ours, "LONGEST_GRADIENT", 1e-12)
    after = train(name, "faster_rcnn")
    # The first step sees the same weights; the next one weights that hardly moved.
    assert after["loss_digests"][0] == before["loss_digests"][0]
    assert after["weights_digest"] != before["weights_digest"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_remembered_is_what_would_be_prepared_anew(
    train: Train, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twelve of eight images: some are used twice.
    first = train(name, "mask_rcnn", batch=4)
    monkeypatch.setattr(coco_order.Remembered.__init__, "__defaults__", (0,))
    assert bits(train(name, "mask_rcnn", batch=4)) == bits(first)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_run_that_is_told_to_stop_has_no_result(name: str, tmp_path: Path) -> None:
    spec = a_spec(name, "faster_rcnn", "fixed_point")
    assert coco_run.run(spec, tmp_path, lambda: False) is None


def test_the_command_runs_on_mmdet_and_records_its_versions(tmp_path: Path) -> None:
    line = ["--framework", "mmdet", "--device", "cpu", "--size", "tiny", "--steps", "2"]
    line += ["--modes", "fixed_point", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXPERIMENTS / "coco_map.py"), *line],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "coco_map_mmdet_faster_rcnn.json").read_text())
    assert result["complete"] and {"mmcv", "mmengine", "mmdet"} < set(result["versions"])
    assert "TruncdetHook" in result["recipe"]
    assert str(ROOT) not in json.dumps(result)
