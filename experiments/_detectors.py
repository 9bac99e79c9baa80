"""The detectors that frameworks.py trains: which config of which framework, in both modes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from _train_run import MODES, train_copy
from torch import nn

import truncdet
from truncdet._frameworks import installed


@dataclasses.dataclass(frozen=True)
class Detector:
    """A config of a framework, and our module for it: imported late, since it imports theirs."""

    module: str
    config: str
    packages: tuple[str, ...]  # which the module imports


_mmdet = functools.partial(Detector, "_mmdet_models", packages=("mmcv", "mmengine", "mmdet"))
_detectron2 = functools.partial(Detector, "_detectron2_models", packages=("detectron2",))


DETECTORS = {
    "mmdet-faster-rcnn": _mmdet("faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"),
    "mmdet-mask-rcnn": _mmdet("mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"),
    "mmdet-cascade-rcnn": _mmdet("cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py"),
    "detectron2-mask-rcnn": _detectron2("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"),
}


def check_packages(names: Iterable[str]) -> None:
    """Ends the program, naming what is missing, unless the frameworks of all detectors are there.

    Found without importing: a package that is there and broken is that detector's failure.
    """
    needed = dict.fromkeys(p for name in names for p in DETECTORS[name].packages)
    missing = [package for package in needed if not installed(package)]
    if missing:
        raise SystemExit(
            f"--models: {', '.join(missing)} must be installed for these models, found nothing; "
            "`make frameworks` makes .venv-frameworks, which has all of them, mmcv for the CPU; "
            "experiments/README.md says what a GPU needs"
        )


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
        packages = map(importlib.import_module, detector.packages)
        self.versions: dict[str, str] = {p.__name__: p.__version__ for p in packages}

    def train(self, device: torch.device, mode: str, steps: int) -> dict[str, Any]:
        """Trains a copy on the fixed batch; equal calls are equal but for what is under test."""
        model = self.models[mode]
        batch = self._framework.batch_of(model, self._size, device)
        forward = functools.partial(self._framework.losses_of, batch=batch)
        return train_copy(model, forward, device, self._framework.scope(mode), steps)
