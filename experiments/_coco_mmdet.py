"""mmdet's detectors: its shipped configs, its Runner and CocoMetric, TruncdetHook as the switch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import truncdet.integrations.mmdet  # noqa: F401  (registers TruncdetHook)
from _coco_eval import Detection
from _coco_order import Remembered, order
from _coco_record import InterruptedRunError, Recorder
from _coco_spec import DROP, LONGEST_GRADIENT, MOMENTUM, WEIGHT_DECAY, Spec
from _mmdet_models import CONFIGS, shrink
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

CONFIG = {
    "faster_rcnn": "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "mask_rcnn": "mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
}
RECIPE = (
    "shipped config; from scratch: backbone.init_cfg=None, frozen_stages=-1, norm_eval=False; "
    "own classes, image size, steps and gradient clipping; TruncdetHook sets the mode"
)
PACKAGES = ("mmcv", "mmengine", "mmdet")
RESUMES = False
FOLDER = "mmdet"


@DATASETS.register_module()
class TruncdetOrdered:
    """A dataset in the order that _coco_order gives, each image prepared once.

    mmdet's own pipeline prepares it; mirroring, its only random step, follows the order's coin.
    """

    def __init__(self, dataset: Any, batch: int, steps: int, seed: int) -> None:
        mirrored = copy.deepcopy(dataset)
        mirrored["pipeline"].insert(-1, {"type": "RandomFlip", "prob": 1.0})
        sets = {False: DATASETS.build(dataset), True: DATASETS.build(mirrored)}
        self.metainfo = sets[False].metainfo
        batches = itertools.islice(order(len(sets[False]), batch, seed), steps)
        self._entries = list(itertools.chain.from_iterable(batches))
        self._prepared = Remembered(lambda index, flip: sets[flip][index])

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Any:
        return dict(self._prepared(*self._entries[index]))


class _Record(Hook):  # type: ignore[misc]
    """Hands every step to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_train(self, runner: Any) -> None:
        self._recorder.start(runner.model)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._recorder.before_step()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        # As parse_losses itself tells losses from accuracies; `loss` is their sum.
        parts = {name: v for name, v in outputs.items() if "loss" in name and name != "loss"}
        self._recorder.after_step(parts, runner.model)
        if not self._recorder.keep_going():
            raise InterruptedRunError


class Trained:
    """The Runner after its training."""

    def __init__(self, spec: Spec, runner: Any) -> None:
        self.spec, self.runner = spec, runner
        self.model = runner.model
        self.optimizer = runner.optim_wrapper.optimizer


@contextlib.contextmanager
def scope(mode: str) -> Iterator[None]:
    """Nothing: the hook in the config is the switch."""
    yield


def train(spec: Spec, recorder: Recorder, folder: Path) -> Trained:
    """Trains by mmdet's Runner, always from the start."""
    runner = Runner(**settings(spec, folder))
    runner.register_hook(_Record(recorder), "LOWEST")
    runner.train()
    return Trained(spec, runner)


def detect(trained: Trained, folder: Path) -> tuple[dict[str, list[Detection]], dict[str, float]]:
    """What the model finds, as CocoMetric writes it, and the AP that CocoMetric says."""
    figures = trained.runner.test()
    found = {
        kind: json.loads((folder / FOLDER / f"found.{kind}.json").read_text())
        for kind in trained.spec.iou_types
    }
    # With nothing found there are no figures.
    own = {kind: figures.get(f"coco/{kind}_mAP") for kind in found}
    return found, {kind: float(value) for kind, value in own.items() if value is not None}


def settings(spec: Spec, folder: Path) -> dict[str, Any]:
    """What the Runner is made of, from the shipped config."""
    cfg = Config.fromfile(CONFIGS / CONFIG[spec.model])
    _change_model(cfg.model, spec)
    set_up = _datasets(cfg, spec)
    plan = {"by_epoch": False, "type": "LinearLR", "begin": 0, "end": spec.warm_up}
    drop = {"by_epoch": False, "type": "MultiStepLR", "milestones": [spec.drop_at], "gamma": DROP}
    optimizer = {"type": "SGD", "lr": spec.learning_rate, "momentum": MOMENTUM}
    return {
        "model": cfg.model,
        "work_dir": str(folder / FOLDER),
        "train_cfg": {
            "type": "IterBasedTrainLoop",
            "max_iters": spec.steps,
            "val_interval": spec.steps + 1,
        },
        "test_cfg": cfg.test_cfg,
        **set_up,
        "test_evaluator": {
            "type": "CocoMetric",
            "metric": list(spec.iou_types),
            "ann_file": str(spec.data.val.annotations),
            "outfile_prefix": str(folder / FOLDER / "found"),
        },
        "optim_wrapper": {
            "type": "OptimWrapper",
            "optimizer": {**optimizer, "weight_decay": WEIGHT_DECAY},
            "clip_grad": {"max_norm": LONGEST_GRADIENT},
        },
        "param_scheduler": [{**plan, "start_factor": 1 / spec.warm_up}, drop],
        "default_hooks": {"checkpoint": None, "logger": {"type": "LoggerHook", "interval": 10**6}},
        "custom_hooks": [{"type": "TruncdetHook", "mode": spec.mode, "verbose": False}],
        "randomness": {"seed": spec.seed},
        "log_level": "ERROR",
        "default_scope": "mmdet",
        "experiment_name": folder.name,
    }


def _change_model(model: Any, spec: Spec) -> None:
    model.backbone.update(init_cfg=None, frozen_stages=-1, norm_eval=False)
    if spec.size == "tiny":
        shrink(model)
    classes = len(spec.data.categories())
    for head in ("bbox_head", "mask_head"):
        if head in model.roi_head:
            model.roi_head[head].num_classes = classes


def _datasets(cfg: Any, spec: Spec) -> dict[str, Any]:
    """Both loaders, without worker processes."""
    found = {}
    classes = tuple(spec.data.categories().values())
    for part, split in (("train", spec.data.train), ("test", spec.data.val)):
        loader = cfg[f"{part}_dataloader"]
        loader.update(num_workers=0, persistent_workers=False)
        dataset = loader.dataset
        dataset.update(data_root=None, ann_file=str(split.annotations))
        dataset.update(data_prefix={"img": f"{split.images}/"}, metainfo={"classes": classes})
        dataset.pipeline = [t for t in dataset.pipeline if t.type != "RandomFlip"]
        for transform in dataset.pipeline:
            if transform.type == "Resize":
                transform.scale = (spec.longest_side, spec.image_size)
            if transform.type == "LoadAnnotations" and part == "test":
                # Boxes are enough: CocoMetric reads the truth from its file.
                transform.with_mask = False
        if part == "train":
            loader.update(batch_size=spec.batch, sampler={"type": "DefaultSampler"})
            loader.sampler.shuffle = False
            loader.batch_sampler = None
            loader.dataset = {
                "type": "TruncdetOrdered",
                "dataset": dataset,
                "batch": spec.batch,
                "steps": spec.steps,
                "seed": spec.seed,
            }
        found[f"{part}_dataloader"] = loader
    return found
