"""roi_pool, ps_roi_align and ps_roi_pool: torchvision's kernels, atomics backward, and truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import _measure as measure
import torch
import torchvision
from _checks import Check, at_most, holds
from _roi_cases import Case, make_boxes
from torch import Tensor

import truncdet

assert torchvision and truncdet  # imported for the operators that they register

LIMIT = 0.8  # our backward by the native one's time
ERROR_LIMIT = 1.25  # our error against float64, by the native kernel's
# Besides the output a backward may allocate so much for a RoI, and the allocator rounds two
# allocations up to blocks of 2 MiB.
SCRATCH_PER_ROI = 256
ALLOCATOR_SLACK = 2 * (2 << 20)

Call = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Pooling:
    """An operator on RoIs of `case`, whose channels are those of the output."""

    operator: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.operator}, {self.case.name}"

    def tiny(self) -> Pooling:
        tiny = self.case.tiny()
        return Pooling(self.operator, dataclasses.replace(tiny, channels=max(1, tiny.channels)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The input's."""
        case = self.case
        planes = case.bins**2 if self.operator.startswith("ps_") else 1
        return (case.images, case.channels * planes, case.height, case.width)

    @property
    def options(self) -> tuple[int, ...]:
        return (self.case.sampling_ratio,) if self.operator == "ps_roi_align" else ()


def _pooling(operator: str, shape: tuple[int, int, int], bins: int, ratio: int = -1) -> Pooling:
    """2x512 RoIs on a map of stride 4 if it is large, and 16 otherwise."""
    channels, height, width = shape
    fine = height > 100
    planes = bins * bins if operator.startswith("ps_") else 1
    sampling = {-1: ", adaptive", 2: ", ratio 2"}[ratio] if operator == "ps_roi_align" else ""
    size = f"{channels * planes}x{height}x{width}"
    name = f"2x512 RoIs, {bins}x{bins}{sampling}, {size}"
    boxes = (1 / 4, ratio, 16.0, 112.0) if fine else (1 / 16, ratio, 32.0, 512.0)
    return Pooling(operator, Case(name, 2, 512, channels, height, width, bins, *boxes, LIMIT))


# Output channels: of position-sensitive maps 10, as in Light-Head R-CNN, or a class each.
CASES = (
    _pooling("roi_pool", (256, 200, 336), 7),
    _pooling("roi_pool", (512, 38, 63), 7),
    _pooling("roi_pool", (1024, 50, 84), 14),
    _pooling("ps_roi_align", (10, 50, 84), 7),
    _pooling("ps_roi_align", (10, 50, 84), 7, 2),
    _pooling("ps_roi_align", (81, 50, 84), 7),
    _pooling("ps_roi_pool", (10, 50, 84), 7),
    _pooling("ps_roi_pool", (81, 50, 84), 7),
)


@dataclasses.dataclass(frozen=True)
class Calls:
    """Inputs of a case on a device, and what is measured with them."""

    pooling: Pooling
    features: Tensor
    boxes: Tensor
    grad: Tensor
    chosen: dict[str, Tensor]  # what either forward tells its backward

    @classmethod
    def make(cls, pooling: Pooling, device: torch.device) -> Calls:
        case = pooling.case
        torch.manual_seed(0)
        features = torch.randn(pooling.shape, device=device)
        boxes = make_boxes(case).to(device)
        grad = torch.randn(case.rois, case.channels, case.bins, case.bins, device=device)
        calls = cls(pooling, features, boxes, grad, {})
        for side in ("native", "truncdet"):
            out = calls.run_forward(side)
            if isinstance(out, tuple):
                calls.chosen[side] = out[1]
        return calls

    def double(self) -> Calls:
        """The same values in float64, and the same cells chosen."""
        features, boxes, grad = (x.double() for x in (self.features, self.boxes, self.grad))
        return dataclasses.replace(self, features=features, boxes=boxes, grad=grad)

    def run_forward(self, side: str) -> Any:
        case, operator = self.pooling.case, self.pooling.operator
        bins, options = (case.bins, case.bins), self.pooling.options
        if side == "native":
            native = getattr(torch.ops.torchvision, operator)
            return native(self.features, self.boxes, case.spatial_scale, *bins, *options)
        ours = getattr(torch.ops.truncdet, operator)
        rest = (True,) if operator == "roi_pool" else options
        return ours(self.features, self.boxes, *bins, case.spatial_scale, *rest)

    def forward(self, side: str) -> Call:
        def call() -> Tensor:
            out = self.run_forward(side)
            return out[0] if isinstance(out, tuple) else out

        return call

    def backward(self, side: str) -> Call:
        case, operator = self.pooling.case, self.pooling.operator
        bins, options = (case.bins, case.bins), self.pooling.options
        shape = self.pooling.shape
        if side == "native":
            native = getattr(torch.ops.torchvision, f"_{operator}_backward")
            given = (self.grad, self.boxes, self.chosen["native"], case.spatial_scale)
            return lambda: native(*given, *bins, *options, *shape)
        ours = getattr(torch.ops.truncdet, f"{operator}_backward")
        if operator == "roi_pool":
            own = (self.grad, self.chosen["truncdet"], self.boxes, *shape, *bins)
            return lambda: ours(*own, case.spatial_scale, True, False)
        own = (self.grad, self.boxes, *shape, *bins)
        return lambda: ours(*own, case.spatial_scale, *options, False)


def measure_pooling(pooling: Pooling, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    calls = Calls.make(pooling, device)
    row: dict[str, Any] = {
        "name": pooling.name,
        "rois": pooling.case.rois,
        "output_bytes": calls.features.numel() * calls.features.element_size(),
        "limit": LIMIT,
        "errors": None,
    }
    for side in ("native", "truncdet"):
        forward, backward = calls.forward(side), calls.backward(side)
        row[side] = {
            "forward_ms": measure.median_ms(forward, device, repeats),
            "backward_ms": measure.median_ms(backward, device, repeats),
            "backward_peak_bytes": measure.peak_bytes(backward, device),
            "bits_equal": measure.repeats_equal(backward),
        }
    for part in ("forward", "backward"):
        row[f"{part}_ratio"] = row["truncdet"][f"{part}_ms"] / row["native"][f"{part}_ms"]
    if pooling.operator != "ps_roi_pool":  # whose bins have other cells in float64
        exact = calls.double().backward("native")()
        row["errors"] = {
            side: measure.errors(calls.backward(side)(), exact) for side in ("native", "truncdet")
        }
    return row


def check_pooling(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row; times, memory and errors in those of full size on a GPU."""
    name = row["name"]
    checks = [holds(f"{name}: bits repeat", row["truncdet"]["bits_equal"])]
    if not with_limits:
        return checks
    checks.append(at_most(f"{name}: backward", row["backward_ratio"], row["limit"]))
    scratch = row["truncdet"]["backward_peak_bytes"] - row["output_bytes"]
    allowed = SCRATCH_PER_ROI * row["rois"] + ALLOCATOR_SLACK
    checks.append(at_most(f"{name}: bytes beyond the output", scratch, allowed))
    if row["errors"] is not None:
        for norm, ours in row["errors"]["truncdet"].items():
            limit = ERROR_LIMIT * row["errors"]["native"][norm]
            checks.append(at_most(f"{name}: error, {norm}", ours, limit))
    return checks
