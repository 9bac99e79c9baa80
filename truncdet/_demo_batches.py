"""Turns a COCO set into training batches; order and flips follow from the seed alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.functional import hflip, pil_to_tensor

from truncdet._demo_data import CocoImage, CocoSet
from truncdet._demo_options import DemoError

# Resized images kept in memory; enough for a small set, and no more than a few hundred MB.
CACHE_IMAGES = 1024


class Samples:
    """The images of a set, resized once, as tensors with their boxes."""

    def __init__(self, data: CocoSet, image_size: int) -> None:
        self.data = data
        self.image_size = image_size
        # The model counts its classes from 1 without gaps; 0 is the background.
        self.label_of = {category: i + 1 for i, category in enumerate(data.categories)}
        self._cache: dict[int, tuple[Tensor, float, float]] = {}

    def __len__(self) -> int:
        return len(self.data.images)

    def image(self, index: int) -> tuple[Tensor, float, float]:
        """Image [3, H, W] as float32 in 0..1, and its x and y scale against the file."""
        if index not in self._cache:
            if len(self._cache) >= CACHE_IMAGES:
                self._cache.clear()
            self._cache[index] = _read_image(self.data.images[index], self.image_size)
        pixels, scale_x, scale_y = self._cache[index]
        return pixels.float() / 255, scale_x, scale_y

    def target(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """An image and its boxes [L, 4] (corners, resized pixels) and labels [L]; no crowds."""
        pixels, scale_x, scale_y = self.image(index)
        height, width = pixels.shape[1:]
        corners, labels = [], []
        for box in self.data.images[index].boxes:
            x, y, w, h = box.xywh
            left, right = _span(x * scale_x, (x + w) * scale_x, width)
            top, bottom = _span(y * scale_y, (y + h) * scale_y, height)
            # A crowd is a region, not an object; a box outside the image has nothing left of it.
            if not box.crowd and right > left and bottom > top:
                corners.append([left, top, right, bottom])
                labels.append(self.label_of[box.category])
        boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
        # Two coordinates apart in double may meet in float32.
        solid = ((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])).nonzero().flatten()
        labels_tensor = torch.tensor(labels, dtype=torch.int64)
        return pixels, {"boxes": boxes[solid], "labels": labels_tensor[solid]}


def batches(
    samples: Samples, batch: int, seed: int
) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Endless batches: every image once per pass, shuffled, each flipped or not by a coin."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += torch.randperm(len(samples), generator=generator).tolist()
        images, targets = [], []
        for index in waiting[:batch]:
            pixels, target = samples.target(index)
            if torch.rand(1, generator=generator).item() < 0.5:
                pixels, target = hflip(pixels), _flip(target, pixels.shape[2])
            images.append(pixels)
            targets.append(target)
        waiting = waiting[batch:]
        yield images, targets


def _flip(target: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    return {**target, "boxes": torch.stack([width - x2, y1, width - x1, y2], dim=1)}


def _span(low: float, high: float, size: int) -> tuple[float, float]:
    return min(max(low, 0.0), float(size)), min(max(high, 0.0), float(size))


def _read_image(image: CocoImage, size: int) -> tuple[Tensor, float, float]:
    try:
        with Image.open(image.path) as file:
            picture = file.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DemoError(
            f"truncdet demo: --data must have readable images, got {image.path} ({error})"
        ) from error
    width, height = picture.size
    # Short side to `size`, unless the long side would exceed twice that, as in the model.
    factor = min(size / min(width, height), 2 * size / max(width, height))
    new = (max(1, round(width * factor)), max(1, round(height * factor)))
    pixels = pil_to_tensor(picture.resize(new, Image.Resampling.BILINEAR))
    return pixels, new[0] / width, new[1] / height
