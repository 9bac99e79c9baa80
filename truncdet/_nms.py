"""nms and batched_nms: which boxes stay, the same on every device.

Boxes are taken in descending order of their scores, of equal scores the lower index first. A box is
dropped if one kept before it, of its group, overlaps it by more than the threshold:

    both = max(0, right - left) * max(0, bottom - top)
    drop = float64(both / ((area_1 + area_2) - both)) > threshold

in the compute type of the boxes, each operation rounded once, box 1 being the one with the higher
score. That is torchvision's CPU operator. Its CUDA kernel compares with the threshold rounded to
float32 and may fuse a product and a sum, and its batched_nms moves groups apart by adding to the
coordinates, or not, by the size of the input and the device: each of that can change who stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _scatter_shapes as shapes
from truncdet import fixedpoint as fp
from truncdet._library import LIB
from truncdet._order import stable_order

for _schema in (
    "_nms_keep(Tensor boxes, Tensor? groups, float iou_threshold) -> Tensor",
    "nms(Tensor boxes, Tensor scores, Tensor? groups, float iou_threshold) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def keep_reference(boxes: Tensor, groups: Tensor | None, iou_threshold: float) -> Tensor:
    """boxes [N, 4] in descending order of scores give a mask [N] of those that stay."""
    kind = fp.compute_dtype(boxes.dtype)
    x1, y1, x2, y2 = boxes.to(kind).unbind(1)
    area = (x2 - x1) * (y2 - y1)
    keep = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    zero = torch.zeros((), dtype=kind, device=boxes.device)

    def larger(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a < b, b, a)

    def smaller(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b < a, b, a)

    for i in range(len(boxes) - 1):
        later = slice(i + 1, None)
        width = larger(zero, smaller(x2[i], x2[later]) - larger(x1[i], x1[later]))
        height = larger(zero, smaller(y2[i], y2[later]) - larger(y1[i], y1[later]))
        both = width * height
        drop = (both / ((area[i] + area[later]) - both)).to(torch.float64) > iou_threshold
        if groups is not None:
            drop &= groups[i] == groups[later]
        keep[later] &= ~(drop & keep[i])
    return keep


def _nms(boxes: Tensor, scores: Tensor, groups: Tensor | None, iou_threshold: float) -> Tensor:
    order = stable_order(scores)
    sorted_groups = None if groups is None else groups[order]
    keep = torch.ops.truncdet._nms_keep(boxes[order], sorted_groups, iou_threshold)
    return order[keep]


LIB.impl("_nms_keep", keep_reference, "CompositeExplicitAutograd")
LIB.impl("nms", _nms, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::_nms_keep", lib=LIB)
def _fake_keep(boxes: Tensor, groups: Tensor | None, iou_threshold: float) -> Tensor:
    return boxes.new_empty(boxes.size(0), dtype=torch.bool)


@torch.library.register_fake("truncdet::nms", lib=LIB)
def _fake_nms(boxes: Tensor, scores: Tensor, groups: Tensor | None, threshold: float) -> Tensor:
    kept = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty(kept, dtype=torch.int64)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Drops boxes that overlap a box of a higher score; the same boxes stay on every device.

    As `torchvision.ops.nms`, which is not needed for it. Tiers T1 and T2. There is no gradient, and
    a GPU is waited for, since the length of the result depends on the values.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 3], [5, 5, 6, 6]])
        >>> truncdet.nms(boxes, torch.tensor([0.5, 0.5, 0.9]), 0.5)
        tensor([2, 0])

    Args:
        boxes: [N, 4] of (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2, in any unit; float64, float32,
            float16 or bfloat16.
        scores: [N] of one of these dtypes. Of equal scores the lower index comes first; NaN counts
            as the largest score.
        iou_threshold: boxes that overlap by more are dropped; compared in float64.

    Returns:
        int64 indices of the boxes that stay, in descending order of scores. Intersection and union
        are computed in float32 (float64 for float64 boxes), each operation rounded once. A box with
        a NaN always stays and drops none.

    Raises:
        TypeError: an argument or a dtype is none of the above.
        ValueError: a shape or a device does not fit.

    Memory besides: N^2 / 8 bytes on CUDA, as torchvision's.
    """
    _check("nms", boxes, scores)
    arguments = (boxes.detach(), scores.detach(), None, float(iou_threshold))
    kept: Tensor = torch.ops.truncdet.nms(*arguments)
    return kept


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Drops boxes that overlap a box of the same group with a higher score, like `nms`.

    As `torchvision.ops.batched_nms`. Groups are compared, coordinates stay as they are: the result
    is that of `nms` for each group by itself. Tiers T1, T2 and, for groups, T3c.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 3], [0, 0, 2, 2]])
        >>> truncdet.batched_nms(boxes, torch.tensor([0.5, 0.4, 0.9]), torch.tensor([1, 1, 7]), 0.5)
        tensor([2, 0])

    Args:
        boxes: as for `nms`.
        scores: as for `nms`.
        idxs: [N] the group of each box, of any integer dtype.
        iou_threshold: as for `nms`.

    Returns:
        int64 indices of the boxes that stay, of all groups together, in descending order of scores,
        of equal scores the lower index first.

    Raises:
        TypeError: an argument or a dtype is none of the above.
        ValueError: a shape or a device does not fit.
    """
    _check("batched_nms", boxes, scores)
    if not isinstance(idxs, Tensor):
        raise TypeError(f"batched_nms: idxs must be a Tensor, got {type(idxs).__name__}")
    if idxs.is_floating_point() or idxs.is_complex():
        raise TypeError(f"batched_nms: idxs must be of integers, got {idxs.dtype}")
    if idxs.shape != scores.shape:
        raise ValueError(
            f"batched_nms: idxs must have scores' shape, {list(scores.shape)}, "
            f"got {list(idxs.shape)}"
        )
    shapes.check_device("batched_nms", "boxes", boxes, "idxs", idxs)
    groups = idxs.to(torch.int64)
    arguments = (boxes.detach(), scores.detach(), groups, float(iou_threshold))
    kept: Tensor = torch.ops.truncdet.nms(*arguments)
    return kept


def _check(op: str, boxes: object, scores: object) -> None:
    for name, x in (("boxes", boxes), ("scores", scores)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
        shapes.check_float(op, name, x)
    assert isinstance(boxes, Tensor) and isinstance(scores, Tensor)
    if boxes.dim() != 2 or boxes.size(1) != 4:
        raise ValueError(f"{op}: boxes must have shape [N, 4], got {list(boxes.shape)}")
    if scores.dim() != 1 or scores.size(0) != boxes.size(0):
        raise ValueError(
            f"{op}: scores must have shape [{boxes.size(0)}], got {list(scores.shape)}"
        )
    shapes.check_device(op, "boxes", boxes, "scores", scores)
