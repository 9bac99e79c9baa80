"""Tiny mmdet detectors on the shipped images: mmdet's own configs, made small, and its own Runner.

Nothing is downloaded and no weights are loaded. The images are the package's bccd_tiny set; it has
no masks, so the mask models get an octagon in each box.
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import _mmdet_needed  # noqa: F401
import mmdet
import torch
from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

import truncdet

CONFIGS = Path(mmdet.__file__).parent / ".mim" / "configs"
TRAIN_SCRIPT = Path(mmdet.__file__).parent / ".mim" / "tools" / "train.py"
DATA = Path(truncdet.__file__).parent / "data" / "bccd_tiny"

BASES = {
    "faster": "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "mask": "mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "cascade": "cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py",
    "grid": "grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco.py",  # predicts points, as keypoint heads
    "groie": "groie/faste-rcnn_r50_fpn_groie_1x_coco.py",  # GenericRoIExtractor
}
CHANNELS = 16
STEPS = 5


@functools.cache
def folder() -> Path:
    """A folder for everything that is written, gone when the process ends."""
    kept = tempfile.TemporaryDirectory(prefix="truncdet-mmdet-")
    atexit.register(kept.cleanup)
    return Path(kept.name)


def config(kind: str, **changes: Any) -> Config:
    """The small variant of one of mmdet's configs, as read from a file that knows no truncdet."""
    cfg = Config.fromfile(config_file(kind))
    cfg.merge_from_dict(changes)
    return cfg


def config_with(kind: str, text: str) -> Config:
    """A config that inherits the small variant and adds lines of its own."""
    path = Path(tempfile.mkdtemp(dir=folder())) / "config.py"
    path.write_text(f"_base_ = {str(config_file(kind))!r}\n{text}")
    return Config.fromfile(path)


@functools.cache
def annotations(name: str) -> Path:
    """A shipped annotation file with an octagon as the mask of every box."""
    content = json.loads((DATA / f"instances_{name}.json").read_text())
    for annotation in content["annotations"]:
        annotation["segmentation"] = [_octagon(*annotation["bbox"])]
    path = folder() / f"instances_{name}.json"
    path.write_text(json.dumps(content))
    return path


def _octagon(x: float, y: float, w: float, h: float) -> list[float]:
    corners = ((1, 0), (3, 0), (4, 1), (4, 3), (3, 4), (1, 4), (0, 3), (0, 1))
    return [value for a, b in corners for value in (x + w * a / 4, y + h * b / 4)]


@functools.cache
def config_file(kind: str) -> Path:
    cfg = Config.fromfile(CONFIGS / BASES[kind])
    masks = "mask_head" in cfg.model.roi_head
    _shrink_model(cfg.model)
    dataset = {"data_root": f"{DATA}/", "data_prefix": {"img": "images/"}}
    dataset["metainfo"] = {"classes": ("RBC", "WBC", "Platelets")}
    for part, name in (("train", "train"), ("test", "val")):
        loader = cfg[f"{part}_dataloader"]
        loader.update(batch_size=2, num_workers=0, persistent_workers=False)
        if part == "train":  # mmengine sleeps two seconds between epochs; this sampler has none
            loader.sampler = {"type": "InfiniteSampler", "shuffle": True}
            loader.batch_sampler = None
        # Absolute, so that data_root does not come before it.
        loader.dataset.update(ann_file=str(annotations(name)), **dataset)
        for transform in loader.dataset.pipeline:
            if transform.type == "Resize":
                transform.scale = (160, 160)
    metric = ["bbox", "segm"] if masks else "bbox"
    evaluator = {"type": "CocoMetric", "metric": metric}
    cfg.test_evaluator = {**evaluator, "ann_file": str(annotations("val"))}
    cfg.train_cfg = {"type": "IterBasedTrainLoop", "max_iters": STEPS, "val_interval": 1000}
    # Evaluation is a test of its own.
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.param_scheduler = []
    cfg.optim_wrapper = {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.01}}
    cfg.default_hooks.checkpoint = {"type": "CheckpointHook", "by_epoch": False, "interval": STEPS}
    cfg.log_processor.by_epoch = False
    cfg.log_level = "ERROR"
    cfg.randomness = {"seed": 0}
    path = folder() / f"{kind}.py"
    cfg.dump(path)
    return path


def _shrink_model(model: Any) -> None:
    model.backbone.update(depth=18, base_channels=8, stem_channels=8, init_cfg=None)
    model.backbone.update(frozen_stages=-1, norm_eval=False)
    model.neck.update(in_channels=[8, 16, 32, 64])
    model.rpn_head.feat_channels = CHANNELS
    _replace(model, "num_classes", 3)
    _replace(model, "fc_out_channels", 32)
    for key in ("in_channels", "out_channels", "conv_out_channels"):
        _replace(model, key, CHANNELS, old=256)
    if "grid_head" in model.roi_head:
        model.roi_head.grid_head.update(point_feat_channels=4, num_convs=2)
        model.roi_head.grid_head.norm_cfg = {"type": "GN", "num_groups": 9, "requires_grad": True}
    proposals = {"nms_pre": 200, "max_per_img": 50}
    model.train_cfg.setdefault("rpn_proposal", {}).update(proposals)
    model.test_cfg.rpn.update(proposals)
    model.test_cfg.rcnn.max_per_img = 20
    stages = model.train_cfg.rcnn
    for stage in stages if isinstance(stages, list) else [stages]:
        stage.sampler.num = 32


def _replace(node: Any, key: str, new: Any, old: Any = None) -> None:
    """Replaces the value of a key everywhere below `node`, where it is `old` if that is given."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, (dict, list)):
            _replace(child, key, new, old)
    if isinstance(node, dict) and key in node and (old is None or node[key] == old):
        node[key] = new


def extractors(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseRoIExtractor)]


class Recorder(Hook):
    """Keeps the losses of every step."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append({key: float(value) for key, value in outputs.items()})


class Training:
    """One run of mmdet's Runner: the losses of every step, and the weights at the end.

    Args:
        cfg: a config as `Config.fromfile` gives it.
        before: called with the runner before it trains.
    """

    def __init__(self, cfg: Config, before: Callable[[Any], Any] | None = None) -> None:
        self.work_dir = Path(tempfile.mkdtemp(dir=folder()))
        cfg.work_dir = str(self.work_dir)
        # Runs of one config that start in the same second would share a logger.
        cfg.experiment_name = self.work_dir.name
        recorder = Recorder()
        # Pretty-printing configs takes longer than all the training.
        with mock.patch("mmengine.config.config.FormatCode", lambda text, **_: (text, True)):
            self.runner = Runner.from_cfg(cfg)
            self.runner.register_hook(recorder)
            if before is not None:
                before(self.runner)
            self.runner.train()
        self.losses = recorder.losses

    @property
    def model(self) -> Any:
        return self.runner.model

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def checkpoint(self) -> dict[str, Any]:
        return dict(torch.load(self.checkpoint_path(), weights_only=False))

    def checkpoint_path(self) -> Path:
        return self.work_dir / f"iter_{STEPS}.pth"


def permute_rois(model: torch.nn.Module, seed: int) -> None:
    """Lets every RoI layer of a built model see its RoIs in another order, and give them back."""
    draw = torch.Generator().manual_seed(seed)

    def permuted(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(features: torch.Tensor, rois: torch.Tensor) -> torch.Tensor:
            order = torch.randperm(len(rois), generator=draw)
            return forward(features, rois[order])[order.argsort()]

        return run

    for extractor in extractors(model):
        for layer in extractor.roi_layers:
            layer.forward = permuted(layer.forward)


class Permuting(Hook):
    """Permutes from within the run, after every hook that might swap layers."""

    priority = "LOWEST"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def before_run(self, runner: Any) -> None:
        permute_rois(runner.model, self.seed)


class AfterLoading(Hook):
    """Keeps the weights as they are once a checkpoint is loaded."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        self.kept = kept

    def before_train(self, runner: Any) -> None:
        self.kept.update({k: v.clone() for k, v in runner.model.state_dict().items()})
