"""`truncdet audit` on the training scripts of mmdet and detectron2: equal, and planted faults."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _frameworks import requires

HERE = Path(__file__).parent
KEYS = {"schema", "equal", "step", "phase", "module", "op", "elements", "max_ulp"}

# mmdet: lines that a config adds, and the module that they import.
MMDET_FAULTS = """
import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmdet.registry import TRANSFORMS

import planted


@TRANSFORMS.register_module()
class Noise(BaseTransform):
    def transform(self, results):
        results["img"] = results["img"] + planted.noise(results["img"].shape)
        return results


@HOOKS.register_module()
class Plant(Hook):
    def before_train(self, runner):
        neck = runner.model.neck
        neck.fpn_convs[0].planted = planted.Reordered()
        conv = neck.fpn_convs[0].forward
        neck.fpn_convs[0].forward = lambda x: neck.fpn_convs[0].planted(conv(x))
"""
MMDET_LINES = {
    "": "",
    "noise": "train_dataloader['dataset']['pipeline'].insert(-1, dict(type='Noise'))\n",
    "order": "custom_hooks = [dict(type='Plant')]\n",
}

# As detectron2's own train_net.py: arguments, configuration, trainer.
TRAIN_NET = """
import sys
from detectron2.config import get_cfg
from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup, launch

import planted

FAULT = {fault!r}


class Noisy(DatasetMapper):
    def __call__(self, dataset_dict):
        result = super().__call__(dataset_dict)
        image = result["image"]
        result["image"] = image + image.new_tensor(planted.noise(image.shape))
        return result


class Trainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        mapper = Noisy(cfg, is_train=True) if FAULT == "noise" else None
        return build_detection_train_loader(cfg, mapper=mapper)

    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        if FAULT == "order":
            layer = model.backbone.fpn_output2
            layer.planted = planted.Reordered()
            forward = layer.forward
            layer.forward = lambda x: layer.planted(forward(x))
        return model


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    default_setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    for name, file in {datasets!r}:
        register_coco_instances(name, {{}}, file, {images!r})
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, "auto", args=(args,))
"""


@dataclass
class Done:
    """How an audit ended."""

    status: int
    text: str
    found: dict[str, Any]


def audit(folder: Path, *command: object) -> Done:
    """Audits two steps of a script that lies in `folder` beside what it imports."""
    shutil.copy(HERE / "_planted.py", folder / "planted.py")
    verdict = folder / "verdict.json"
    options = ("--steps", "2", "--no-values", "--json", str(verdict))
    run = subprocess.run(
        [sys.executable, "-m", "truncdet", "audit", *options, "--", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )
    text = run.stdout + run.stderr
    return Done(run.returncode, text, json.loads(verdict.read_text()) if verdict.exists() else {})


def mmdet(folder: Path, fault: str) -> Done:
    """mmdet's tools/train.py, unmodified, with a small config."""
    tiny = importlib.import_module("_mmdet_tiny")
    # The config is read as text, as a user's: what it adds comes after what it inherits.
    config = folder / "config.py"
    lines = "custom_imports = dict(imports=['faults'])\n" if fault else ""
    text = Path(tiny.config_file("faster")).read_text() + lines + MMDET_LINES[fault]
    config.write_text(text)
    (folder / "faults.py").write_text(MMDET_FAULTS)
    return audit(folder, sys.executable, tiny.TRAIN_SCRIPT, config, "--work-dir", folder / "out")


def detectron2(folder: Path, fault: str) -> Done:
    """A train_net.py with a small configuration."""
    tiny = importlib.import_module("_detectron2_tiny")
    cfg = tiny.config(folder / "data", "faster")
    cfg.SEED = 0
    (folder / "config.yaml").write_text(cfg.dump())
    datasets = [
        (names[0], str(folder / "data" / f"{part}.json"))
        for part, names in (("train", cfg.DATASETS.TRAIN), ("val", cfg.DATASETS.TEST))
    ]
    script = folder / "train_net.py"
    images = str(tiny.DATA / "images")
    script.write_text(TRAIN_NET.format(fault=fault, datasets=datasets, images=images))
    return audit(folder, sys.executable, script, "--config-file", folder / "config.yaml")


each_script = pytest.mark.parametrize(
    "script",
    [
        pytest.param(mmdet, marks=requires("mmdet"), id="mmdet"),
        pytest.param(detectron2, marks=requires("detectron2"), id="detectron2"),
    ],
)
Script = Callable[[Path, str], Done]


@each_script
def test_an_unmodified_script_is_equal(script: Script, tmp_path: Path) -> None:
    done = script(tmp_path, "")
    assert done.status == 0, done.text
    assert done.found.keys() >= KEYS
    assert (done.found["schema"], done.found["equal"], done.found["steps_compared"]) == (1, True, 2)


@each_script
def test_an_unseeded_transform_is_a_fault_of_the_data(script: Script, tmp_path: Path) -> None:
    done = script(tmp_path, "noise")
    assert done.status == 1, done.text
    assert done.found.keys() >= KEYS
    named = [done.found[key] for key in ("equal", "step", "phase", "module", "op")]
    assert named == [False, 0, "data", "", "batch"], done.text


@each_script
def test_a_kernel_that_adds_in_another_order_is_named(script: Script, tmp_path: Path) -> None:
    done = script(tmp_path, "order")
    assert done.status == 1, done.text
    assert "planted: bits moved" in done.text
    where = {mmdet: "neck.fpn_convs.0.planted", detectron2: "backbone.fpn_output2.planted"}
    named = [done.found[key] for key in ("step", "phase", "module", "op")]
    assert named == [0, "backward", where[script], "_InOtherOrderBackward"], done.text
    assert done.found["equal_inputs"] == ["0"]
