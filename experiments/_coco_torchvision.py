"""torchvision's detectors: trained from scratch, resumed, and their detections in COCO's format."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _coco_checkpoint import load, save
from _coco_eval import Detection
from _coco_images import Images
from _coco_order import order
from _coco_record import Recorder
from _coco_spec import LONGEST_GRADIENT, MOMENTUM, WEIGHT_DECAY, Spec
from _mask_rcnn import detector
from _train_run import DTYPES, one_step
from pycocotools import mask as mask_tools
from torch import Tensor, nn
from truncdet.integrations.torchvision import patched

RECIPE = "from scratch, batch normalisation learns; images as large as given, cached on the device"
PACKAGES = ("torchvision",)
RESUMES = True
TIE = 0.5  # logits are rounded to multiples of it where equal scores are wanted


class Trained:
    """A model and its optimizer, None where weights were only loaded."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.optimizer: torch.optim.Optimizer | None = None
        categories = spec.data.categories()
        # Labels count from 1 without gaps.
        self.labels = {category: i + 1 for i, category in enumerate(categories)}
        self.model: Any = detector(
            spec.size,
            len(categories) + 1,
            spec.masks,
            min_size=spec.image_size,
            max_size=spec.longest_side,
        )
        self.model.to(spec.torch_device())

    def images(self, train: bool) -> Images:
        spec = self.spec
        split = spec.data.train if train else spec.data.val
        masks = train and spec.masks
        return Images(split, self.labels, spec.torch_device(), objects=train, masks=masks)


@contextmanager
def scope(mode: str) -> Iterator[None]:
    """torchvision patched while the model trains and detects."""
    with patched(mode):
        yield


def train(spec: Spec, recorder: Recorder, folder: Path) -> Trained | None:
    """Trains, from the folder's checkpoint if there is one; None if it was stopped with one."""
    trained = Trained(spec)
    model, images = trained.model.train(), trained.images(train=True)
    optimizer = torch.optim.SGD(
        model.parameters(), spec.learning_rate, MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    scaler = torch.amp.GradScaler(recorder.device.type, enabled=spec.amp == "float16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    found = load(folder, spec)
    if found is None:
        recorder.start(model)
    else:
        for name, part in parts.items():
            part.load_state_dict(found[name])
        recorder.load(found["record"])
    batches = order(len(images), spec.batch, spec.seed)
    for step, batch in enumerate(itertools.islice(batches, spec.steps)):
        if step < recorder.steps:
            continue  # before the checkpoint
        recorder.before_step()
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * spec.factor(step)
        pixels = [images.image(*entry) for entry in batch]
        targets = [images.target(*entry) for entry in batch]
        forward = _forward(pixels, targets)
        losses = one_step(model, forward, DTYPES[spec.amp], optimizer, scaler, LONGEST_GRADIENT)
        recorder.after_step(losses, model)
        stop = step + 1 == spec.stop_at or not recorder.keep_going()
        due = spec.checkpoint_every and (step + 1) % spec.checkpoint_every == 0
        if stop or (due and step + 1 < spec.steps):
            states = {name: part.state_dict() for name, part in parts.items()}
            save(folder, spec, {**states, "record": recorder.state()})
        if stop:
            return None
    trained.optimizer = optimizer
    return trained


def _forward(pixels: list[Tensor], targets: list[dict[str, Tensor]]) -> Callable[..., Any]:
    return lambda model: model(pixels, targets)


def with_weights(spec: Spec, path: Path) -> Trained:
    """The model of a spec with the weights of a file."""
    trained = Trained(spec)
    trained.model.load_state_dict(torch.load(path, weights_only=True))
    return trained


@torch.no_grad()
def detect(trained: Trained, folder: Path) -> tuple[dict[str, list[Detection]], dict[str, float]]:
    """What the model finds in the images to measure on, by kind of overlap; no own figures."""
    spec, model = trained.spec, trained.model.eval()
    images = trained.images(train=False)
    hooks = _tie_logits(model) if spec.ties else []
    categories = {label: category for category, label in trained.labels.items()}
    found: list[Detection] = []
    for first in range(0, len(images), spec.batch):
        indices = range(first, min(first + spec.batch, len(images)))
        results = model([images.image(index) for index in indices])
        for index, result in zip(indices, results, strict=True):
            found += _in_coco_format(images.ids[index], result, categories)
    for hook in hooks:
        hook.remove()
    return dict.fromkeys(spec.iou_types, found), {}


def _in_coco_format(
    image: int, result: dict[str, Tensor], categories: dict[int, int]
) -> list[Detection]:
    corners = result["boxes"].double().cpu()
    corners[:, 2:] -= corners[:, :2]
    rows = zip(corners.tolist(), result["labels"].tolist(), result["scores"].tolist(), strict=True)
    found = [
        {"image_id": image, "category_id": categories[label], "bbox": box, "score": score}
        for box, label, score in rows
    ]
    if "masks" in result and found:
        masks = (result["masks"][:, 0] > 0.5).byte().permute(1, 2, 0).cpu().numpy()
        for entry, mask in zip(found, mask_tools.encode(np.asfortranarray(masks)), strict=True):
            entry["segmentation"] = {**mask, "counts": mask["counts"].decode("ascii")}
    return found


def _tie_logits(model: Any) -> list[Any]:
    """Has both heads round the logits of their classes; what they predict of boxes stays."""

    def coarse(logits: Tensor) -> Tensor:
        return (logits / TIE).round() * TIE

    def rpn(module: nn.Module, inputs: Any, output: Any) -> Any:
        return [coarse(level) for level in output[0]], output[1]

    def box(module: nn.Module, inputs: Any, output: Any) -> Any:
        return coarse(output[0]), output[1]

    return [
        model.rpn.head.register_forward_hook(rpn),
        model.roi_heads.box_predictor.register_forward_hook(box),
    ]
