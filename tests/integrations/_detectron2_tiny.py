"""A Mask R-CNN small enough for tests, on the tiny set, trained by detectron2's own trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import COCOEvaluator

import truncdet
from truncdet import _seed

DATA = Path(truncdet.__file__).parent / "data" / "bccd_tiny"
STEPS = 5
ZOO = {
    "faster": "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml",
    "mask": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
    "cascade": "Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml",
    "c4": "COCO-Detection/faster_rcnn_R_50_C4_1x.yaml",
}


class TinyTrainer(DefaultTrainer):  # type: ignore[misc]
    """DefaultTrainer with COCO's evaluator, as detectron2's own train_net.py has it."""

    @classmethod
    def build_evaluator(cls, cfg: Any, name: str) -> Any:
        return COCOEvaluator(name, output_dir=cfg.OUTPUT_DIR)


@dataclass
class Run:
    """What one training left behind."""

    trainer: TinyTrainer
    losses: list[float]
    digest: str


def config(folder: Path, model_name: str = "mask", steps: int = STEPS) -> Any:
    """A model of the zoo at a few channels; it writes to `folder`."""
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(ZOO[model_name]))
    model = cfg.MODEL
    model.WEIGHTS, model.DEVICE = "", "cpu"
    model.BACKBONE.FREEZE_AT = 0
    model.RESNETS.NORM = "BN"
    model.RESNETS.STEM_OUT_CHANNELS, model.RESNETS.RES2_OUT_CHANNELS = 8, 16
    model.RESNETS.WIDTH_PER_GROUP = 4
    model.FPN.OUT_CHANNELS = 16
    model.RPN.PRE_NMS_TOPK_TRAIN, model.RPN.POST_NMS_TOPK_TRAIN = 200, 100
    model.RPN.PRE_NMS_TOPK_TEST, model.RPN.POST_NMS_TOPK_TEST = 100, 30
    model.ROI_HEADS.NUM_CLASSES, model.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 3, 32
    # The evaluator needs something to evaluate, and not much of it.
    model.ROI_HEADS.SCORE_THRESH_TEST, cfg.TEST.DETECTIONS_PER_IMAGE = 0.0, 5
    model.ROI_BOX_HEAD.NUM_FC, model.ROI_BOX_HEAD.FC_DIM = 1, 32
    model.ROI_MASK_HEAD.NUM_CONV, model.ROI_MASK_HEAD.CONV_DIM = 1, 16
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = _registered(folder)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.MASK_FORMAT = "bitmask"  # its targets are pooled by ROIAlign; polygons are drawn
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (96,), 128
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 96, 128
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, steps
    cfg.SOLVER.BASE_LR, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = 0.01, (), 0
    cfg.OUTPUT_DIR = str(folder)
    return cfg


def trainer(cfg: Any, seed: int = 0) -> TinyTrainer:
    """A trainer whose weights and data order follow from the seed."""
    _seed.seed_all(seed)
    return TinyTrainer(cfg)


def train(cfg: Any, seed: int = 0) -> Run:
    """Trains from scratch."""
    made = trainer(cfg, seed)
    made.train()
    losses = [value for value, _ in made.storage.history("total_loss").values()]
    return Run(made, losses, truncdet.digest(made.model.state_dict()).hex)


def inputs(images: int = 1) -> list[dict[str, Any]]:
    """What the model takes at inference: noise of the size of a small image."""
    draw = torch.Generator().manual_seed(0)
    return [{"image": torch.rand(3, 96, 128, generator=draw) * 255} for _ in range(images)]


def _registered(folder: Path) -> tuple[tuple[str], tuple[str]]:
    """The tiny set in detectron2's catalog, its boxes as polygons, so that masks can be trained."""
    names = []
    for part in ("train", "val"):
        file = folder / f"{part}.json"
        name = f"truncdet_{part}_{file}"
        names.append(name)
        if name in DatasetCatalog:
            continue
        content = json.loads((DATA / f"instances_{part}.json").read_text())
        for entry in content["annotations"]:
            x, y, w, h = entry["bbox"]
            entry["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
        register_coco_instances(name, {}, str(file), str(DATA / "images"))
    return (names[0],), (names[1],)
