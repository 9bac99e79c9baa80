"""The detectors that frameworks.py trains: which config of which framework, in both modes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import torch
from _train_run import MODES, train_copy
from torch import nn

import truncdet


@dataclasses.dataclass(frozen=True)
class Detector:
    """A config of a framework, and our module for it: imported late, since it imports theirs."""

    module: str
    config: str


DETECTORS = {
    "mmdet-faster-rcnn": Detector("_mmdet_models", "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"),
    "mmdet-mask-rcnn": Detector("_mmdet_models", "mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"),
    "mmdet-cascade-rcnn": Detector("_mmdet_models", "cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py"),
    "detectron2-mask-rcnn": Detector(
        "_detectron2_models", "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
    ),
}


class Built:
    """A detector in both modes, on the CPU, with what the result file says about it."""

    def __init__(self, detector: Detector, size: str) -> None:
        self._framework: Any = importlib.import_module(detector.module)
        self._size = size
        self.models: dict[str, nn.Module] = {
            mode: self._framework.build(detector.config, size, mode) for mode in MODES
        }
        plain, patched = (truncdet.digest(self.models[mode].state_dict()) for mode in MODES)
        self.same_start = plain == patched
        self.described = {"config": detector.config, "changes": self._framework.CHANGES}
        packages = map(importlib.import_module, self._framework.PACKAGES)
        self.versions: dict[str, str] = {p.__name__: p.__version__ for p in packages}

    def train(self, device: torch.device, mode: str, steps: int) -> dict[str, Any]:
        """Trains a copy on the fixed batch; equal calls are equal but for what is under test."""
        model = self.models[mode]
        batch = self._framework.batch_of(model, self._size, device)
        forward = functools.partial(self._framework.losses_of, batch=batch)
        return train_copy(model, forward, device, self._framework.scope(mode), steps)
