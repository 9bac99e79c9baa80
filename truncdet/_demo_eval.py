"""COCO's average precision of a detector, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn

from truncdet._demo_batches import Samples
from truncdet._demo_data import CocoSet

# More would take longer than the training; the screen and the report say how many were used.
EVAL_IMAGES = 200


def evaluate(
    model: nn.Module, samples: Samples, device: torch.device, keep_going: Callable[[], bool]
) -> tuple[float | None, float | None] | None:
    """AP (mean over IoU 0.50 to 0.95) and AP at IoU 0.50, both in 0..1.

    Args:
        model: a torchvision detection model.
        samples: the images to detect in; the first `EVAL_IMAGES` are used.
        device: where the model is.
        keep_going: asked before every image; False ends the evaluation without a result.

    Returns:
        The two figures, each None where the images have no box to find; None if stopped.
    """
    model.eval()
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for index in range(min(len(samples), EVAL_IMAGES)):
            if not keep_going():
                return None
            found += _detect(model, samples, index, device)
    truth = _ground_truth(samples.data)
    if not any(not entry["iscrowd"] for entry in truth["annotations"]):
        return None, None
    if not found:
        return 0.0, 0.0
    # pycocotools prints its progress and its table; neither belongs into ours.
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return _figure(evaluation.stats[0]), _figure(evaluation.stats[1])


def _figure(value: float) -> float | None:
    # pycocotools says -1 where there is nothing to average.
    return float(value) if value >= 0 else None


def _detect(
    model: nn.Module, samples: Samples, index: int, device: torch.device
) -> list[dict[str, Any]]:
    pixels, scale_x, scale_y = samples.image(index)
    result = model([pixels.to(device)])[0]
    categories = {label: category for category, label in samples.label_of.items()}
    found = []
    for corners, label, score in zip(
        result["boxes"].tolist(), result["labels"].tolist(), result["scores"].tolist(), strict=True
    ):
        x, y = corners[0] / scale_x, corners[1] / scale_y
        width, height = corners[2] / scale_x - x, corners[3] / scale_y - y
        found.append(
            {
                "image_id": samples.data.images[index].id,
                "category_id": categories[label],
                "bbox": [x, y, width, height],
                "score": score,
            }
        )
    return found


def _ground_truth(data: CocoSet) -> dict[str, Any]:
    """The set as pycocotools wants it: annotations numbered from 1, since it takes 0 for none."""
    images = data.images[:EVAL_IMAGES]
    annotations: list[dict[str, Any]] = []
    for image in images:
        for box in image.boxes:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image.id,
                    "category_id": box.category,
                    "bbox": list(box.xywh),
                    "area": box.area,
                    "iscrowd": int(box.crowd),
                }
            )
    return {
        "info": {},
        "images": [{"id": image.id} for image in images],
        "annotations": annotations,
        "categories": [{"id": key, "name": name} for key, name in data.categories.items()],
    }
