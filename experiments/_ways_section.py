"""Four ways, forward and backward together: native, truncdet, the trick, the official switch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import _measure as measure
import torch
import torchvision
from _checks import Check, at_most, holds
from _mask_rcnn import make_batch, make_model
from _roi_cases import CASES as ROI_CASES
from _roi_cases import make_boxes
from _scatter_section import deterministic_switch
from _train_run import train, train_copy
from torch import Tensor
from torch.nn import functional

import truncdet

WAYS = ("native", "truncdet", "trick", "switch")
STEPS = 16  # of the training; the first are left out of its time
# Without it the switch refuses matrix products; it is read once, before the first of them.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

Function = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Way:
    """An operator: `make(device, tiny)` gives its first argument, which gets a gradient, and the
    others."""

    name: str
    native: Function
    ours: Function
    make: Callable[[torch.device, bool], tuple[Tensor, tuple[Any, ...]]]
    small: bool = False

    def tiny(self) -> Way:
        return dataclasses.replace(self, small=True)


def _roi(number: int) -> Callable[[torch.device, bool], tuple[Tensor, tuple[Any, ...]]]:
    def make(device: torch.device, tiny: bool) -> tuple[Tensor, tuple[Any, ...]]:
        case = ROI_CASES[number].tiny() if tiny else ROI_CASES[number]
        features = torch.randn(case.images, case.channels, case.height, case.width, device=device)
        boxes = make_boxes(case).to(device)
        return features, (boxes, case.bins, case.spatial_scale, case.sampling_ratio, True)

    return make


def _map(device: torch.device, tiny: bool) -> Tensor:
    return torch.randn((2, 4, 20, 32) if tiny else (2, 256, 200, 336), device=device)


def _bilinear(device: torch.device, tiny: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x = _map(device, tiny)
    return x, ([2 * x.shape[2], 2 * x.shape[3]], None, "bilinear")


def _pool(device: torch.device, tiny: bool) -> tuple[Tensor, tuple[Any, ...]]:
    return _map(device, tiny), (7,)


def _sample(device: torch.device, tiny: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x = _map(device, tiny)
    grid = torch.rand(2, *x.shape[2:], 2, device=device) * 2 - 1
    return x, (grid, "bilinear", "zeros", False)


def _rows(device: torch.device, tiny: bool) -> tuple[Tensor, tuple[Any, ...]]:
    rows, cells, width = (200, 20, 4) if tiny else (2_000_000, 100_000, 64)
    index = torch.randint(cells, (rows,), device=device)
    return torch.randn(rows, width, device=device), (
        torch.zeros(cells, width, device=device),
        index,
    )


def _index_add(library: Any) -> Function:
    return lambda source, target, index: library.index_add(target, 0, index, source)


CASES = (
    Way("roi_align, 2x512 RoIs, 7x7, ratio 2", torchvision.ops.roi_align, truncdet.roi_align,
        _roi(1)),
    Way("roi_align, 2x128 RoIs, 14x14, adaptive", torchvision.ops.roi_align, truncdet.roi_align,
        _roi(2)),
    Way("interpolate, bilinear x2", functional.interpolate, truncdet.interpolate, _bilinear),
    Way("adaptive_avg_pool2d to 7x7", functional.adaptive_avg_pool2d, truncdet.adaptive_avg_pool2d,
        _pool),
    Way("grid_sample, anywhere", functional.grid_sample, truncdet.grid_sample, _sample),
    Way("index_add, 2,000,000 x 64 into 100,000", _index_add(torch), _index_add(truncdet), _rows),
)  # fmt: skip


def measure_ways(case: Way, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row: milliseconds by way, or why there is none."""
    torch.manual_seed(0)
    leaf, rest = case.make(device, case.small)
    leaf.requires_grad_()
    grad = torch.randn_like(case.native(leaf.detach(), *rest))

    def both(function: Function) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(leaf, *rest), leaf, grad)

    functions = {"native": case.native, "truncdet": case.ours, "trick": truncdet.wrap(case.native)}
    row: dict[str, Any] = {"name": case.name, "ms": {}, "why": {}}
    for way, function in functions.items():
        row["ms"][way] = measure.median_ms(both(function), device, repeats)
    row["ms"]["switch"] = None
    if device.type == "cuda":
        with deterministic_switch():
            try:
                row["ms"]["switch"] = measure.median_ms(both(case.native), device, repeats)
            except torch.OutOfMemoryError as error:
                row["why"]["switch"] = f"out of memory: {_first_line(error)}"
            except RuntimeError as error:
                row["why"]["switch"] = _first_line(error)
    return row


def measure_step(size: str, device: torch.device) -> dict[str, Any]:
    """The row of a whole training step of Mask R-CNN; cuDNN is deterministic in all four ways."""
    model, batch = make_model(size), make_batch(size, device)
    images, targets = batch
    steps = STEPS if size == "full" else 2
    row: dict[str, Any] = {"name": "Mask R-CNN R50-FPN, a training step", "ms": {}, "why": {}}
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    cudnn.deterministic = True
    os.environ.setdefault(*_CUBLAS)
    try:
        for way, mode in (("native", "off"), ("truncdet", "fixed_point"), ("trick", "truncate")):
            run = train(model, batch, "float32", mode, 0, steps)
            row["ms"][way] = run["ms_per_step"]
        row["ms"]["switch"] = None
        if device.type == "cuda":
            try:
                run = train_copy(
                    model,
                    lambda copied: copied(images, targets),
                    device,
                    deterministic_switch(),
                    steps,
                )
                row["ms"]["switch"] = run["ms_per_step"]
            except RuntimeError as error:
                row["why"]["switch"] = _first_line(error)
    finally:
        cudnn.deterministic = before
    return row


def check_ways(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """truncdet must be faster than the trick and the switch, where there are limits."""
    ms, name = row["ms"], row["name"]
    checks = [holds(f"{name}: timed", all(ms[way] > 0 for way in WAYS[:3]))]
    if with_limits:
        for way in WAYS[2:]:
            if ms[way] is not None:
                checks.append(
                    at_most(f"{name}: time by the {way}'s", ms["truncdet"] / ms[way], 1.0)
                )
    return checks


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
