"""The model and the batch that train_step.py trains on: nothing is downloaded or read."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import (
    FasterRCNN,
    MaskRCNN,
    fasterrcnn_resnet50_fpn,
    maskrcnn_resnet50_fpn,
)
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

SEED = 0


@dataclasses.dataclass(frozen=True)
class Size:
    """Image height and width are what the model resizes to, so that nothing is resized."""

    images: int
    height: int
    width: int
    objects: int
    classes: int


SIZES = {"full": Size(4, 800, 1088, 8, 91), "tiny": Size(2, 64, 96, 2, 5)}


def make_model(size: str) -> nn.Module:
    """Randomly initialised Mask R-CNN, on the CPU, equal in every call."""
    torch.manual_seed(SEED)
    shape = SIZES[size]
    return detector(size, shape.classes, True, min_size=shape.height, max_size=shape.width).train()


def detector(size: str, classes: int, masks: bool, **common: Any) -> nn.Module:
    """torchvision's Faster or Mask R-CNN from scratch; `classes` counts the background.

    full: ResNet-50 with FPN; tiny: ResNet-18 with FPN and few proposals. Without weights
    torchvision uses batch normalisation that learns, in which random features stay bounded.
    """
    if size == "full":
        make = maskrcnn_resnet50_fpn if masks else fasterrcnn_resnet50_fpn
        made: nn.Module = make(weights=None, weights_backbone=None, num_classes=classes, **common)
        return made
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        norm_layer=nn.BatchNorm2d,
        trainable_layers=5,
    )
    few = {"rpn_post_nms_top_n_train": 32, "box_batch_size_per_image": 16}
    few |= {"rpn_post_nms_top_n_test": 100, "box_detections_per_img": 20}
    made = (MaskRCNN if masks else FasterRCNN)(backbone, classes, **common, **few)
    return made


def make_batch(size: str, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Noise images in [0, 1] with bright rectangles; their boxes, labels and masks are targets."""
    shape = SIZES[size]
    generator = torch.Generator().manual_seed(SEED)
    images, targets = [], []
    for _ in range(shape.images):
        image = 0.5 * torch.rand(3, shape.height, shape.width, generator=generator)
        boxes, masks = [], []
        labels = torch.randint(1, shape.classes, (shape.objects,), generator=generator)
        for label in labels:
            x1, y1, x2, y2 = _rectangle(shape, generator)
            mask = torch.zeros(shape.height, shape.width, dtype=torch.uint8)
            mask[y1:y2, x1:x2] = 1
            # The colour tells the class, so that there is something to learn.
            image[int(label) % 3, y1:y2, x1:x2] += 0.5 * float(label) / shape.classes
            boxes.append([float(v) for v in (x1, y1, x2, y2)])
            masks.append(mask)
        images.append(image.to(device))
        target = {"boxes": torch.tensor(boxes), "labels": labels, "masks": torch.stack(masks)}
        targets.append({name: value.to(device) for name, value in target.items()})
    return images, targets


def _rectangle(shape: Size, generator: torch.Generator) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 with sides of one eighth to one half of the image."""
    found = []
    for extent in (shape.width, shape.height):
        side = int(torch.randint(extent // 8, extent // 2, (), generator=generator))
        start = int(torch.randint(0, extent - side, (), generator=generator))
        found.append((start, start + side))
    (x1, x2), (y1, y2) = found
    return x1, y1, x2, y2
