"""Forward and backward of roi_align_rotated: the kernels of mmcv where there are any, and ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import _measure as measure
import torch
from _checks import Check, at_most, holds
from _roi_cases import P2, make_boxes
from _roi_cases import Case as Upright
from torch import Tensor

import truncdet

assert truncdet  # imported for the operators that it registers

LIMIT = 0.8  # our backward by the native one's time
ERROR_LIMIT = 1.25  # our error against float64, by the native kernel's
# Weights of a RoI lie in a pool of so much, its box and its bounds beside it.
SCRATCH_PER_ROI = (24 << 10) + 256
ALLOCATOR_SLACK = 2 * (2 << 20)
NO_NATIVE = "mmcv has no kernel for this device here"

Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]


@dataclasses.dataclass(frozen=True)
class Rotated:
    """The boxes of a RoIAlign case, each turned by an angle of its own."""

    name: str
    upright: Upright

    def tiny(self) -> Rotated:
        return Rotated(self.name, self.upright.tiny())

    @property
    def rest(self) -> tuple[Any, ...]:
        """Bins, scale, ratio, aligned and clockwise."""
        case = self.upright
        bins = (case.bins, case.bins)
        return (*bins, case.spatial_scale, max(case.sampling_ratio, 0), True, False)

    def rois(self) -> Tensor:
        """Rows [K, 6]: centre, sides, and an angle uniform in half a turn."""
        image, *corners = make_boxes(self.upright).split(1, 1)
        x1, y1, x2, y2 = corners
        generator = torch.Generator().manual_seed(1)
        angle = (torch.rand(x1.shape, generator=generator) - 0.5) * math.pi
        return torch.cat([image, (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, angle], 1)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Features, RoIs and a gradient of the output."""
        torch.manual_seed(0)
        case = self.upright
        features = torch.randn(case.images, case.channels, case.height, case.width, device=device)
        grad = torch.randn(case.rois, case.channels, case.bins, case.bins, device=device)
        return features, self.rois().to(device), grad


def ours(case: Rotated, features: Tensor, rois: Tensor, grad: Tensor) -> Calls:
    """truncdet's forward and backward, statistics and non-finite values handled inside."""
    ops, rest = torch.ops.truncdet, case.rest
    return (
        lambda: ops.roi_align_rotated(features, rois, *rest),
        lambda: ops.roi_align_rotated_backward(grad, rois, *features.shape, *rest, False),
    )


def native(case: Rotated, features: Tensor, rois: Tensor, grad: Tensor) -> Calls | None:
    """mmcv's kernels, where it is installed and has them for the device."""
    try:
        from mmcv.ops.roi_align_rotated import ext_module
    except ImportError:
        return None
    names = ("pooled_height", "pooled_width", "spatial_scale", "sampling_ratio")
    options = dict(zip((*names, "aligned", "clockwise"), case.rest, strict=True))

    def forward() -> Tensor:
        out = torch.zeros_like(grad)
        ext_module.roi_align_rotated_forward(features, rois, out, **options)
        return out

    def backward() -> Tensor:
        out = torch.zeros_like(features)
        ext_module.roi_align_rotated_backward(grad, rois, out, **options)
        return out

    try:
        forward()
    except RuntimeError:  # built without operators for the device
        return None
    return forward, backward


CASES = tuple(
    Rotated(
        f"2x512 rotated RoIs, 7x7, {how}, 256x200x336",
        Upright(how, 2, 512, *P2, 7, 1 / 4, ratio, 16, 112, LIMIT),
    )
    for how, ratio in (("adaptive", 0), ("ratio 2", 2))
)


def _measure_side(calls: Calls, device: torch.device, repeats: int) -> dict[str, Any]:
    forward, backward = calls
    return {
        "forward_ms": measure.median_ms(forward, device, repeats),
        "backward_ms": measure.median_ms(backward, device, repeats),
        "backward_peak_bytes": measure.peak_bytes(backward, device),
        "bits_equal": measure.repeats_equal(backward),
    }


def measure_rotated(case: Rotated, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    tensors = case.tensors(device)
    sides = {"truncdet": ours(case, *tensors), "native": native(case, *tensors)}
    row: dict[str, Any] = {
        "name": case.name,
        "rois": case.upright.rois,
        "output_bytes": tensors[0].numel() * tensors[0].element_size(),
        "native": None,
        "native_name": None,
        "note": NO_NATIVE,
        "forward_ratio": None,
        "ratio": None,
        "limit": LIMIT,
        "errors": {},
    }
    exact = [call() for call in ours(case, *(x.double() for x in tensors))]
    for side, calls in sides.items():
        if calls is None:
            continue
        row[side] = _measure_side(calls, device, repeats)
        row["errors"][side] = {
            part: measure.errors(call(), value)
            for part, call, value in zip(("forward", "backward"), calls, exact, strict=True)
        }
    if row["native"] is not None:
        row["native_name"], row["note"] = "mmcv", None
        for key, part in (("forward_ratio", "forward_ms"), ("ratio", "backward_ms")):
            row[key] = row["truncdet"][part] / row["native"][part]
    return row


def check_rotated(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row; memory in those of full size on a GPU, times and errors beside mmcv's."""
    name = row["name"]
    checks = [holds(f"{name}: bits repeat", row["truncdet"]["bits_equal"])]
    if not with_limits:
        return checks
    scratch = row["truncdet"]["backward_peak_bytes"] - row["output_bytes"]
    allowed = SCRATCH_PER_ROI * row["rois"] + ALLOCATOR_SLACK
    checks.append(at_most(f"{name}: bytes beyond the output", scratch, allowed))
    if row["ratio"] is None:
        return checks
    checks.append(at_most(f"{name}: backward", row["ratio"], row["limit"]))
    for part, errors in row["errors"]["truncdet"].items():
        for norm, error in errors.items():
            limit = ERROR_LIMIT * row["errors"]["native"][part][norm]
            checks.append(at_most(f"{name}: {part} error, {norm}", error, limit))
    return checks
