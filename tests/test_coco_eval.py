"""The evaluation of the experiments reproduces published figures and notices what is changed."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
DATA = EXPERIMENTS / "data"
KNOWN = DATA / "cocoeval"

sys.path.append(str(EXPERIMENTS))
coco_eval: Any = importlib.import_module("_coco_eval")

EXPECTED = json.loads((KNOWN / "expected.json").read_text())
COCO_CASES = [name for name, case in EXPECTED.items() if isinstance(case, dict) and "stats" in case]
ARRAYS = ("precision", "recall", "scores")
# Means of the exact arrays: the order in which NumPy adds is not part of the definition.
LAST_DIGITS = 1e-14


def read(name: str) -> Any:
    return json.loads((KNOWN / name).read_text())


def evaluate(name: str, detections: list[dict[str, Any]] | None = None) -> Any:
    case = EXPECTED[name]
    found = read(case["detections"]) if detections is None else detections
    return coco_eval.evaluate(KNOWN / case["ground_truth"], found, case["iou_type"])


def sha256(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<f8").tobytes()).hexdigest()


def close(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return math.isclose(found, expected, rel_tol=LAST_DIGITS)


def differences(name: str, found: Any) -> list[str]:
    """The figures of a case that are not the expected ones."""
    case = EXPECTED[name]
    wrong = [key for key in ARRAYS if sha256(getattr(found, key)) != case[f"{key}_sha256"]]
    for key in ("precision", "recall"):
        if list(getattr(found, key).shape) != case[f"{key}_shape"]:
            wrong.append(f"{key}_shape")
    for kind, figures in (("stats", found.stats), ("per_category_AP", found.category_ap)):
        if list(figures) != list(case[kind]):
            wrong.append(f"{kind}: names")
        for key, value in case[kind].items():
            if not close(figures[key], value):
                wrong.append(f"{kind}: {key}")
    for digits in (3, 6):
        for key, value in case.get(f"published_{digits}_decimals", {}).items():
            if round(found.stats[key], digits) != value:
                wrong.append(f"published: {key}")
    return wrong


@pytest.mark.parametrize("name", COCO_CASES)
def test_every_known_figure_is_reproduced(name: str) -> None:
    assert differences(name, evaluate(name)) == []


def test_the_cases_are_those_of_the_file_and_each_has_published_figures() -> None:
    assert len(COCO_CASES) == 3 and set(EXPECTED) == {*COCO_CASES, "voc_example", "evaluator"}
    assert all(any(key.startswith("published") for key in EXPECTED[n]) for n in COCO_CASES)
    assert round(EXPECTED["val2014_100_bbox"]["stats"]["AP"], 3) == 0.505
    assert round(EXPECTED["val2014_100_segm"]["stats"]["AP"], 3) == 0.320


@pytest.mark.parametrize("name", COCO_CASES)
@pytest.mark.parametrize("change", ["score", "place", "category", "missing"])
def test_one_changed_detection_is_noticed(name: str, change: str) -> None:
    found = read(EXPECTED[name]["detections"])
    # The best of all: every curve of its category begins with it.
    index = max(range(len(found)), key=lambda i: found[i]["score"])
    if change == "score":
        found[index]["score"] -= 1e-9
    elif change == "category":
        found[index]["category_id"] = 89  # hair drier, of which there is none
    elif change == "missing":
        del found[index]
    else:
        others = [d for d in found if d["image_id"] != found[index]["image_id"]]
        found[index]["image_id"] = others[0]["image_id"]
    wrong = differences(name, evaluate(name, found))
    assert "scores" in wrong
    if change != "score":
        assert any(entry.startswith("stats") for entry in wrong)
        assert any(entry.startswith("per_category_AP") for entry in wrong)


def test_the_voc_example_is_reproduced_by_the_same_function() -> None:
    """VOC counts pixels inclusively: boxes are one wider and higher than corners tell."""
    case = EXPECTED["voc_example"]
    truth, found = read(case["ground_truth"]), read(case["detections"])
    for box in (entry["bbox"] for entry in (*truth["annotations"], *found)):
        box[2], box[3] = box[2] + 1, box[3] + 1
    objects = len(truth["annotations"])
    # The area under the stairs is the mean of their heights at the recalls that can be reached.
    levels = {
        "published_AP_every_point": [k / objects for k in range(1, objects + 1)],
        "published_AP_eleven_point": np.linspace(0, 1, 11),
    }
    for key, recalls in levels.items():
        result = coco_eval.evaluate(
            truth, found, "bbox", iou_thresholds=case["iou_thresholds"], recall_levels=recalls
        )
        assert set(result.stats.values()) == {None}
        by_threshold = result.precision[:, :, 0, 0, -1].mean(axis=1)
        assert by_threshold == pytest.approx(case[key], abs=1e-10), key


def test_the_arguments_are_left_as_they_are() -> None:
    case = EXPECTED["val2014_100_segm"]
    truth, found = read(case["ground_truth"]), read(case["detections"])
    before = copy.deepcopy((truth, found))
    first = coco_eval.evaluate(truth, found, "segm").stats
    assert (truth, found) == before
    assert coco_eval.evaluate(truth, found, "segm").stats == first


def test_nothing_found_is_an_ap_of_zero_and_nothing_to_find_is_none() -> None:
    truth = read(EXPECTED["val2014_100_bbox"]["ground_truth"])
    assert coco_eval.evaluate(truth, [], "bbox").stats["AP"] == 0
    some = read(EXPECTED["val2014_100_bbox"]["detections"])[:3]
    stats = coco_eval.evaluate({**truth, "annotations": []}, some, "bbox").stats
    assert set(stats.values()) == {None}


def test_boxes_that_come_with_masks_do_not_become_the_masks() -> None:
    case = EXPECTED["val2014_100_segm"]
    found = [{**d, "bbox": [0.0, 0.0, 1.0, 1.0]} for d in read(case["detections"])]
    assert (
        evaluate("val2014_100_segm", found).stats["AP"] == evaluate("val2014_100_segm").stats["AP"]
    )


def test_an_unknown_kind_of_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"iou_type must be one of .*, got 'mask'"):
        coco_eval.evaluate({}, [], "mask")


@pytest.mark.parametrize("folder", ["cocoeval", "nuclei_tiny"])
def test_shipped_data_is_what_its_checksums_say(folder: str) -> None:
    root = DATA / folder
    listed = dict(
        reversed(line.split("  ", 1)) for line in (root / "SHA256SUMS").read_text().splitlines()
    )
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
    del files["SHA256SUMS"]
    assert {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()} == listed
