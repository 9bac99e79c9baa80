"""COCO's figures of a list of detections, at full precision, by pycocotools.

Every experiment that reports an AP calls `evaluate`; tests/test_coco_eval.py holds it against
figures that were published for known detections.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

_PRECISION = ("AP", "AP50", "AP75", "APs", "APm", "APl")
STATS = (*_PRECISION, "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
IOU_TYPES = ("bbox", "segm")

Detection = dict[str, Any]  # image_id, category_id, score, and bbox or segmentation


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The figures of one list of detections; None where there is nothing to find.

    `stats` are COCO's twelve, in 0..1; `category_ap` is AP by category name; `precision`
    [T, R, K, A, M], `recall` [T, K, A, M] and `scores` [T, R, K, A, M] are the arrays they come
    from, by IoU threshold, recall level, category, area and number of detections an image.
    """

    stats: dict[str, float | None]
    category_ap: dict[str, float | None]
    precision: np.ndarray[Any, np.dtype[np.float64]]
    recall: np.ndarray[Any, np.dtype[np.float64]]
    scores: np.ndarray[Any, np.dtype[np.float64]]


def evaluate(
    truth: Path | Mapping[str, Any],
    detections: Sequence[Detection],
    iou_type: str,
    *,
    iou_thresholds: Sequence[float] | None = None,
    recall_levels: Sequence[float] | None = None,
) -> Evaluation:
    """Compares detections with the annotations of all images of `truth`.

    Args:
        truth: an annotation file in COCO's format, or its content; left as it is.
        detections: what was found; left as it is. Their order decides between equal scores.
        iou_type: 'bbox' or 'segm'.
        iou_thresholds: others than COCO's .50:.05:.95; the stats are None then.
        recall_levels: others than COCO's 0:.01:1; the stats are None then.

    Raises:
        ValueError: an unknown `iou_type`.
    """
    if iou_type not in IOU_TYPES:
        raise ValueError(f"evaluate: iou_type must be one of {IOU_TYPES}, got {iou_type!r}")
    content = json.loads(truth.read_text()) if isinstance(truth, Path) else copy.deepcopy(truth)
    standard = iou_thresholds is None and recall_levels is None
    # pycocotools prints its progress and its table.
    with contextlib.redirect_stdout(io.StringIO()):
        known = _index(dict(content))
        # The evaluation of masks takes boxes as masks where there are boxes.
        other = "bbox" if iou_type == "segm" else "segmentation"
        kept = [{k: v for k, v in found.items() if k != other} for found in detections]
        # loadRes cannot read an empty list.
        nothing = {**content, "annotations": []}
        found = known.loadRes(kept) if kept else _index(nothing)
        evaluation = COCOeval(known, found, iou_type)
        if iou_thresholds is not None:
            evaluation.params.iouThrs = np.asarray(iou_thresholds, dtype=np.float64)
        if recall_levels is not None:
            evaluation.params.recThrs = np.asarray(recall_levels, dtype=np.float64)
        evaluation.evaluate()
        evaluation.accumulate()
        if standard:
            evaluation.summarize()
    arrays = {name: evaluation.eval[name] for name in ("precision", "recall", "scores")}
    stats = dict(zip(STATS, evaluation.stats, strict=True)) if standard else dict.fromkeys(STATS)
    names = {category["id"]: category["name"] for category in content["categories"]}
    # All areas, and the most detections an image.
    by_category = {
        names[category]: _mean(arrays["precision"][:, :, k, 0, -1])
        for k, category in enumerate(evaluation.params.catIds)
    }
    return Evaluation({n: _figure(v) for n, v in stats.items()}, by_category, **arrays)


def _index(content: dict[str, Any]) -> COCO:
    made = COCO()
    made.dataset = content
    made.createIndex()
    return made


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    """The mean of what is there: pycocotools writes -1 where a category has no objects."""
    present = values[values > -1]
    return float(present.mean()) if present.size else None


def _figure(value: Any) -> float | None:
    return None if value is None or value < 0 else float(value)
