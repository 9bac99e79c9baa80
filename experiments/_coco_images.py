"""A COCO set as torchvision's detectors take it, each image read once and kept on the device."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch
from _coco_data import Split
from _coco_order import Remembered
from PIL import Image
from pycocotools.coco import COCO
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor


class Images:
    """Images and targets by index; an index is a place in the order of COCO's image ids.

    `labels` are those of the categories, by COCO's id; 0 is the background. With `objects`, images
    without any object are left out, as torchvision's reference training does.
    """

    def __init__(
        self, split: Split, labels: dict[int, int], device: torch.device, objects: bool, masks: bool
    ) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco = COCO(str(split.annotations))
        self._folder, self._labels = split.images, labels
        self._device, self._masks = device, masks
        self.ids = sorted(self._coco.imgs)
        if objects:
            self.ids = [key for key in self.ids if self._objects(key)]
        self._pixels = Remembered(lambda index, _: self._read(index))
        self._targets = Remembered(lambda index, _: self._read_target(index))

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int, mirrored: bool = False) -> Tensor:
        """[3, H, W] in 0..1, as large as the file."""
        pixels: Tensor = self._pixels(index, False)
        return (pixels.flip(2) if mirrored else pixels).float() / 255

    def target(self, index: int, mirrored: bool = False) -> dict[str, Tensor]:
        """boxes [L, 4] (corners, pixels), labels [L] and, if asked for, masks [L, H, W]."""
        target: dict[str, Tensor] = self._targets(index, False)
        if not mirrored:
            return dict(target)
        x1, y1, x2, y2 = target["boxes"].unbind(1)
        width = self._pixels(index, False).size(2)
        turned = {**target, "boxes": torch.stack([width - x2, y1, width - x1, y2], dim=1)}
        if self._masks:
            turned["masks"] = target["masks"].flip(2)
        return turned

    def _objects(self, key: int) -> list[dict[str, Any]]:
        """A crowd is a region, not an object; a box without an area has nothing to learn."""
        found = self._coco.imgToAnns[key]
        return [a for a in found if not a.get("iscrowd") and min(a["bbox"][2:]) > 0]

    def _read(self, index: int) -> Tensor:
        entry = self._coco.imgs[self.ids[index]]
        with Image.open(self._folder / entry["file_name"]) as file:
            pixels: Tensor = pil_to_tensor(file.convert("RGB")).to(self._device)
        return pixels

    def _read_target(self, index: int) -> dict[str, Tensor]:
        objects = self._objects(self.ids[index])
        _, height, width = self._pixels(index, False).shape
        boxes = torch.tensor([a["bbox"] for a in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        labels = torch.tensor([self._labels[a["category_id"]] for a in objects], dtype=torch.int64)
        target = {"boxes": boxes, "labels": labels}
        if self._masks:
            masks = [self._coco.annToMask(a) for a in objects]
            shape = (len(objects), height, width)
            stacked = np.stack(masks) if masks else np.zeros(shape, dtype=np.uint8)
            target["masks"] = torch.from_numpy(stacked)
        # Boxes that lie outside of the image have no area left.
        solid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        return {name: value[solid].to(self._device) for name, value in target.items()}
