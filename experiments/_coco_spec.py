"""What one run does, as a value: the command writes it down, a fresh process carries it out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from _coco_data import CocoData

FRAMEWORKS = ("torchvision", "mmdet", "detectron2")
MODELS = ("faster_rcnn", "mask_rcnn")
MODES = ("off", "fixed_point", "truncate")

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
LONGEST_GRADIENT = 10.0  # longer ones are cut: random weights meet a full learning rate early
DROP = 0.1  # what is left of the learning rate after its one drop
RATIO = 5 / 3  # longest side by shortest side of a resized image, at most; COCO's 1333 by 800


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        size: 'full' (ResNet-50) or 'tiny' (ResNet-18, few proposals).
        repeat: which of several equal runs; nothing depends on it.
        image_size: the shorter side that images are resized to, in pixels.
        amp: 'float32', or the format of autocast, 'float16' or 'bfloat16' (torchvision).
        steps, batch: of the training.
        checkpoint_every: steps between two checkpoints; 0 for none.
        stop_at: end the process with a checkpoint after so many steps; None for never.
        evaluate: whether AP is measured at the end.
        keep_weights: leave the weights in the run's folder.
        weights: evaluate these instead of training.
        ties: round the logits of the classes, so that many scores are equal.
    """

    framework: str
    model: str
    size: str
    device: str
    mode: str
    seed: int
    repeat: int
    steps: int
    batch: int
    learning_rate: float
    image_size: int
    amp: str
    data: CocoData
    checkpoint_every: int = 0
    stop_at: int | None = None
    evaluate: bool = True
    keep_weights: bool = False
    weights: str | None = None
    ties: bool = False

    @property
    def masks(self) -> bool:
        return self.model == "mask_rcnn"

    @property
    def longest_side(self) -> int:
        return int(self.image_size * RATIO)

    @property
    def iou_types(self) -> tuple[str, ...]:
        return ("bbox", "segm") if self.masks else ("bbox",)

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, self.steps // 9)

    @property
    def drop_at(self) -> int:
        """The step from which on the learning rate is a tenth."""
        return max(self.warm_up + 1, self.steps * 5 // 6)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with in a step, counted from 0."""
        return min(1.0, (step + 1) / self.warm_up) * (DROP if step >= self.drop_at else 1.0)

    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "data": self.data.as_json()}

    def training(self) -> dict[str, Any]:
        """What must be equal for a run to go on from another's checkpoint."""
        found = self.as_json()
        for name in ("stop_at", "evaluate", "keep_weights", "checkpoint_every"):
            del found[name]
        return found


def read_spec(path: Path) -> Spec:
    """The spec in a file that the command wrote."""
    content = json.loads(path.read_text())["spec"]
    return Spec(**{**content, "data": CocoData.from_json(content["data"])})
