"""Reads a detection set in COCO's format: one JSON file and a folder of images.

Real files have crowds, empty boxes, images without boxes, gaps in the category ids and grey images;
all of these are accepted. What cannot be used is an error that names option, file and entry.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truncdet._demo_options import DemoError


@dataclass(frozen=True)
class Box:
    """One annotation: [x, y, width, height] in pixels and the COCO category id."""

    xywh: tuple[float, float, float, float]
    category: int
    crowd: bool
    area: float


@dataclass(frozen=True)
class CocoImage:
    """One image file and its boxes."""

    id: int
    path: Path
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class CocoSet:
    """The images of one annotation file, its categories in order of id, and what was left out."""

    file: Path
    images: tuple[CocoImage, ...]
    categories: dict[int, str]
    empty_boxes: int

    @property
    def box_count(self) -> int:
        return sum(len(image.boxes) for image in self.images)

    @property
    def crowd_count(self) -> int:
        return sum(box.crowd for image in self.images for box in image.boxes)


def load_coco(folder: Path, file: Path, option: str = "--ann") -> CocoSet:
    """Reads `file`, whose images lie in `folder` or in its `images` folder.

    Args:
        folder: the argument of --data.
        file: the annotation file.
        option: the option that named `file`, for error texts.

    Raises:
        DemoError: the file or one of its entries cannot be used, or an image is missing.
    """
    if not folder.is_dir():
        raise DemoError(f"truncdet demo: --data must be a folder, got {folder}")
    content = _read(file, option)
    where = f"{option} {file}"
    categories = {}
    for entry in content["categories"]:
        key = _integer(entry, "id", f"{where}: a category")
        categories[key] = str(entry.get("name", key))
    if not content["images"] or not categories:
        raise DemoError(
            f"truncdet demo: {option} must have images and categories, got none in {file}"
        )
    paths: dict[int, Path] = {}
    for entry in content["images"]:
        key = _integer(entry, "id", f"{where}: an image")
        if key in paths:
            raise DemoError(f"truncdet demo: {where}: image ids must be unique, got {key} twice")
        paths[key] = _image_path(folder, entry, f"{where}: image {key}")
    boxes: dict[int, list[Box]] = {key: [] for key in paths}
    empty = 0
    for entry in content["annotations"]:
        key = _integer(entry, "image_id", f"{where}: an annotation")
        name = f"{where}: annotation {entry.get('id', '(no id)')}"
        if key not in paths:
            raise DemoError(f"truncdet demo: {name}: image_id must be a listed image, got {key}")
        box = _box(entry, name, categories)
        if box.xywh[2] > 0 and box.xywh[3] > 0:
            boxes[key].append(box)
        else:
            empty += 1
    images = tuple(CocoImage(key, paths[key], tuple(boxes[key])) for key in sorted(paths))
    return CocoSet(file, images, dict(sorted(categories.items())), empty)


def _read(file: Path, option: str) -> dict[str, list[Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DemoError(
            f"truncdet demo: {option} must be a readable file, got {file} ({reason})"
        ) from error
    except ValueError as error:
        raise DemoError(f"truncdet demo: {option} must be JSON, got {file} ({error})") from error
    for key in ("images", "annotations", "categories"):
        found = content.get(key) if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise DemoError(
                f"truncdet demo: {option} must be in COCO's format with a list of objects"
                f" {key!r}, got {file} without"
            )
    return dict(content)


def _integer(entry: dict[str, Any], key: str, name: str) -> int:
    value = entry.get(key)
    # bool is an int to Python, and no id to COCO.
    if not isinstance(value, int) or isinstance(value, bool):
        raise DemoError(f"truncdet demo: {name}: {key} must be an integer, got {value!r}")
    return value


def _image_path(folder: Path, entry: dict[str, Any], name: str) -> Path:
    file_name = entry.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise DemoError(f"truncdet demo: {name}: file_name must be a text, got {file_name!r}")
    for path in (folder / file_name, folder / "images" / file_name):
        if path.is_file():
            return path
    raise DemoError(
        f"truncdet demo: {name}: file_name must be a file in --data {folder} or in its folder"
        f" images, got {file_name!r}"
    )


def _box(entry: dict[str, Any], name: str, categories: dict[int, str]) -> Box:
    category = _integer(entry, "category_id", name)
    if category not in categories:
        raise DemoError(f"truncdet demo: {name}: category_id must be a listed one, got {category}")
    found = entry.get("bbox")
    numbers = [_finite(number) for number in found] if isinstance(found, list) else []
    if len(numbers) != 4 or None in numbers:
        raise DemoError(f"truncdet demo: {name}: bbox must be four finite numbers, got {found!r}")
    x, y, width, height = (number for number in numbers if number is not None)
    area = _finite(entry.get("area"))
    crowd = bool(entry.get("iscrowd", 0))
    return Box((x, y, width, height), category, crowd, width * height if area is None else area)


def _finite(value: object) -> float | None:
    # JSON as Python reads it has NaN and Infinity, and true would pass for a number.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
