"""detectron2's detectors: its shipped configs, DefaultTrainer and COCOEvaluator, patched."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _coco_data import Split
from _coco_eval import Detection
from _coco_order import Remembered, order
from _coco_record import InterruptedRunError, Recorder
from _coco_spec import DROP, LONGEST_GRADIENT, MOMENTUM, WEIGHT_DECAY, Spec
from _detectron2_models import shrink
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, DatasetMapper, get_detection_dataset_dicts
from detectron2.data import transforms as T
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, HookBase, hooks
from detectron2.evaluation import COCOEvaluator
from torch import nn
from truncdet.integrations.detectron2 import patched

CONFIG = {
    "faster_rcnn": "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml",
    "mask_rcnn": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
}
RECIPE = (
    "shipped config; from scratch: MODEL.WEIGHTS='', RESNETS.NORM='BN', BACKBONE.FREEZE_AT=0; own "
    "classes, image size, steps and gradient clipping; MASK_FORMAT='bitmask'; patched(mode)"
)
PACKAGES = ("detectron2",)
RESUMES = False
FOLDER = "detectron2"


class _Record(HookBase):  # type: ignore[misc]
    """Hands every step to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_train(self) -> None:
        self._recorder.start(self.trainer.model)

    def before_step(self) -> None:
        self._recorder.before_step()

    def after_step(self) -> None:
        # Python floats, each exactly the float32 loss of the step.
        latest = self.trainer.storage.latest()
        parts = {name: v for name, (v, _) in latest.items() if name.startswith("loss_")}
        self._recorder.after_step(parts, self.trainer.model)
        if not self._recorder.keep_going():
            raise InterruptedRunError


class Trained:
    """The trainer after its training."""

    def __init__(self, spec: Spec, cfg: Any, trainer: Any) -> None:
        self.spec, self.cfg = spec, cfg
        self.model, self.optimizer = trainer.model, trainer.optimizer


@contextmanager
def scope(mode: str) -> Iterator[None]:
    """detectron2 patched while the model trains and detects."""
    with patched(mode):
        yield


def train(spec: Spec, recorder: Recorder, folder: Path) -> Trained:
    """Trains by DefaultTrainer, always from the start."""

    class Trainer(DefaultTrainer):  # type: ignore[misc]
        @classmethod
        def build_train_loader(cls, cfg: Any) -> Iterator[list[Any]]:
            return _batches(cfg, spec)

        @classmethod
        def build_optimizer(cls, cfg: Any, model: nn.Module) -> Any:
            # The config knows limits for each parameter alone; here, as in the other frameworks,
            # the gradient is cut as a whole.
            optimizer = super().build_optimizer(cfg, model)
            optimizer.register_step_pre_hook(lambda *_: cut(model))
            return optimizer

        def build_hooks(self) -> list[Any]:
            return [hooks.LRScheduler(), _Record(recorder)]

    # At its usual level the trainer prints the whole model.
    logging.getLogger("detectron2").setLevel(logging.WARNING)
    cfg = config(spec, folder)
    trainer = Trainer(cfg)
    trainer.train()
    return Trained(spec, cfg, trainer)


def detect(trained: Trained, folder: Path) -> tuple[dict[str, list[Detection]], dict[str, float]]:
    """What the model finds, as COCOEvaluator writes it, and the AP that COCOEvaluator says."""
    cfg, spec = trained.cfg, trained.spec
    (name,) = cfg.DATASETS.TEST
    evaluator = COCOEvaluator(
        name,
        tasks=spec.iou_types,
        distributed=False,
        output_dir=cfg.OUTPUT_DIR,
        use_fast_impl=False,
    )
    figures = DefaultTrainer.test(cfg, trained.model, [evaluator])
    path = Path(cfg.OUTPUT_DIR) / "coco_instances_results.json"
    found = json.loads(path.read_text())
    # With nothing found there are no figures.
    own = {kind: figures[kind]["AP"] / 100 for kind in spec.iou_types if kind in figures}
    return dict.fromkeys(spec.iou_types, found), own


def cut(model: nn.Module) -> None:
    """Shortens the gradient of all parameters together to at most LONGEST_GRADIENT."""
    nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)


def config(spec: Spec, folder: Path) -> Any:
    """The shipped config with what RECIPE says."""
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(CONFIG[spec.model]))
    model, solver = cfg.MODEL, cfg.SOLVER
    model.WEIGHTS, model.DEVICE = "", spec.device
    model.RESNETS.NORM, model.BACKBONE.FREEZE_AT = "BN", 0
    if spec.size == "tiny":
        shrink(cfg)
    model.ROI_HEADS.NUM_CLASSES = len(spec.data.categories())
    cfg.DATASETS.TRAIN = (_registered(spec.data.train),)
    cfg.DATASETS.TEST = (_registered(spec.data.val),)
    cfg.DATALOADER.NUM_WORKERS = 0
    # Its targets are pooled by RoIAlign on the device; polygons are drawn on the CPU.
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (spec.image_size,), spec.longest_side
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = spec.image_size, spec.longest_side
    solver.IMS_PER_BATCH, solver.MAX_ITER = spec.batch, spec.steps
    solver.BASE_LR, solver.MOMENTUM = spec.learning_rate, MOMENTUM
    solver.WEIGHT_DECAY, solver.GAMMA = WEIGHT_DECAY, DROP
    # Two steps have no room for a drop, and detectron2 refuses one beyond the end.
    solver.STEPS = (spec.drop_at,) if spec.drop_at < spec.steps else ()
    solver.WARMUP_ITERS = spec.warm_up
    cfg.OUTPUT_DIR = str(folder / FOLDER)
    (folder / FOLDER).mkdir(exist_ok=True)
    return cfg


def _batches(cfg: Any, spec: Spec) -> Iterator[list[Any]]:
    """detectron2's mapper prepares each image once, mirrored or not by the order's coin."""
    entries = get_detection_dataset_dicts(cfg.DATASETS.TRAIN, filter_empty=True)
    resize = T.ResizeShortestEdge([spec.image_size], spec.longest_side, "choice")
    mappers = {
        mirrored: DatasetMapper(
            is_train=True,
            augmentations=[resize, T.RandomFlip(1.0)] if mirrored else [resize],
            image_format=cfg.INPUT.FORMAT,
            use_instance_mask=spec.masks,
            instance_mask_format=cfg.INPUT.MASK_FORMAT,
        )
        for mirrored in (False, True)
    }
    prepared = Remembered(lambda index, mirrored: mappers[mirrored](entries[index]))
    for batch in order(len(entries), spec.batch, spec.seed):
        yield [dict(prepared(*entry)) for entry in batch]


def _registered(split: Split) -> str:
    name = f"truncdet {split.annotations}"
    if name not in DatasetCatalog:
        register_coco_instances(name, {}, str(split.annotations), str(split.images))
    return name
