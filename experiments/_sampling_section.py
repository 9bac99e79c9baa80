"""Backward of grid_sample and of ms_deform_attn: the atomic kernels and truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import _measure as measure
import torch
from _checks import Check, at_most, holds
from torch import Tensor
from torch.nn import functional

import truncdet

assert truncdet  # imported for the operators that it registers

LIMIT = 1.5  # our backward by the native one's time
SCRATCH_PER_CELL = 8  # bytes: an integer sum
ALLOCATOR_SLACK = 2 * (2 << 20)
_TINY = 8  # what the tiny sizes are divided by

Backward = Callable[[], Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class GridSample:
    """Bilinear sampling of a map at as many places as it has cells.

    smooth: every place near its own cell, as in warping; uniform: anywhere in the map.
    """

    places: str
    images: int = 2
    channels: int = 256
    height: int = 200
    width: int = 336

    @property
    def name(self) -> str:
        shape = f"{self.images}x{self.channels}x{self.height}x{self.width}"
        return f"grid_sample, {shape}, {self.places}"

    def tiny(self) -> GridSample:
        sizes = (self.channels // 32, self.height // _TINY, self.width // _TINY)
        return GridSample(self.places, self.images, *sizes)

    def calls(self, device: torch.device) -> tuple[int, dict[str, Backward]]:
        """Cells of the gradient, and the backwards by name, ours last."""
        torch.manual_seed(0)
        shape = (self.images, self.channels, self.height, self.width)
        input, grad = (torch.randn(shape, device=device) for _ in range(2))
        grid = torch.rand(self.images, self.height, self.width, 2, device=device) * 2 - 1
        if self.places == "smooth":
            identity = torch.eye(2, 3, device=device).expand(self.images, 2, 3)
            regular = functional.affine_grid(identity, list(shape), align_corners=False)
            cell = torch.tensor([2 / self.width, 2 / self.height], device=device)
            grid = regular + grid * cell
        rest = (0, 0, False)
        aten, ours = torch.ops.aten.grid_sampler_2d_backward, torch.ops.truncdet
        return input.numel(), {
            "PyTorch": lambda: aten(grad, input, grid, *rest, [True, True]),
            "truncdet": lambda: ours.grid_sample_backward(grad, input, grid, *rest, True, True),
        }


@dataclasses.dataclass(frozen=True)
class DeformAttention:
    """Deformable DETR's attention on an image of 800 x 1088: 8 heads, 32 channels, 4 points."""

    queries: str  # "300 queries", or "all cells" as in the encoder
    images: int = 2
    heads: int = 8
    channels: int = 32
    points: int = 4
    height: int = 800
    width: int = 1088

    @property
    def name(self) -> str:
        return f"ms_deform_attn, {self.images} of {self.height} x {self.width}, {self.queries}"

    def tiny(self) -> DeformAttention:
        return dataclasses.replace(
            self, heads=2, channels=4, height=self.height // _TINY, width=self.width // _TINY
        )

    def levels(self) -> list[tuple[int, int]]:
        return [(-(-self.height // s), -(-self.width // s)) for s in (8, 16, 32, 64)]

    def calls(self, device: torch.device) -> tuple[int, dict[str, Backward]]:
        """Cells of the gradient, and the backwards by name, ours last."""
        torch.manual_seed(0)
        levels = self.levels()
        sizes = [height * width for height, width in levels]
        references = [
            torch.cartesian_prod(
                (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
            ).flip(-1)
            for height, width in levels
        ]
        centres = torch.cat(references)
        if self.queries == "300 queries":
            centres = torch.rand(300, 2)
        shape = (self.images, len(centres), self.heads, len(levels), self.points)
        extent = torch.tensor([[w, h] for h, w in levels]).reshape(1, 1, 1, -1, 1, 2)
        # Offsets of a few cells of each level around the query's own place.
        where = centres.reshape(1, -1, 1, 1, 1, 2) + 2 * torch.randn(*shape, 2) / extent
        value = torch.randn(self.images, sum(sizes), self.heads, self.channels, device=device)
        grad = torch.randn(*shape[:2], self.heads * self.channels, device=device)
        weights = torch.randn(*shape[:3], len(levels) * self.points).softmax(-1).reshape(shape)
        starts = torch.tensor([sum(sizes[:level]) for level in range(len(sizes))])
        tensors = (value, torch.tensor(levels), starts, where, weights)
        case = [x.to(device) for x in tensors]
        calls = {"composition": _composition(levels, case, grad)}
        if (backward := _mmcv(case, grad)) is not None:
            calls["mmcv"] = backward
        operator = torch.ops.truncdet.ms_deform_attn_backward
        calls["truncdet"] = lambda: operator(grad, *case)
        return value.numel(), calls


def _composition(levels: list[tuple[int, int]], case: list[Tensor], grad: Tensor) -> Backward:
    """Autograd through grid_sample and sums, which is what runs without anybody's kernels."""
    value, where, weights = (x.detach().clone().requires_grad_() for x in (case[0], *case[3:]))
    images, _, heads, channels = value.shape
    parts = value.split([height * width for height, width in levels], 1)
    total = torch.zeros((), device=value.device)
    for level, (part, size) in enumerate(zip(parts, levels, strict=True)):
        maps = part.permute(0, 2, 3, 1).reshape(images * heads, channels, *size)
        grid = (2 * where[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        sampled = functional.grid_sample(maps, grid, align_corners=False)
        total = total + (
            sampled * weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        ).sum(-1)
    out = total.reshape(images, heads * channels, -1).transpose(1, 2)
    leaves = (value, where, weights)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _mmcv(case: list[Tensor], grad: Tensor) -> Backward | None:
    """mmcv's kernel, where it is installed and has one for the device."""
    try:
        from mmcv.ops.multi_scale_deform_attn import ext_module  # type: ignore[import-not-found]
    except ImportError:
        return None
    if not grad.is_cuda:
        return None

    def backward() -> Sequence[Tensor]:
        gradients = [torch.zeros_like(x) for x in (case[0], *case[3:])]
        ext_module.ms_deform_attn_backward(*case, grad, *gradients, im2col_step=64)
        return gradients

    return backward


CASES: tuple[GridSample | DeformAttention, ...] = (
    GridSample("smooth"),
    GridSample("uniform"),
    DeformAttention("300 queries"),
    DeformAttention("all cells"),
)


def measure_sampling(
    case: GridSample | DeformAttention, device: torch.device, repeats: int
) -> dict[str, Any]:
    """One row of the result; the native kernel is the fastest of those at hand."""
    cells, calls = case.calls(device)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        found[name] = {
            "backward_ms": measure.median_ms(call, device, repeats),
            "backward_peak_bytes": measure.peak_bytes(call, device),
            "bits_equal": all(
                measure.repeats_equal(lambda call=call, part=part: call()[part])
                for part in range(len(call()))
            ),
        }
    ours = found.pop("truncdet")
    native = min(found, key=lambda name: found[name]["backward_ms"])
    return {
        "name": case.name,
        "cells": cells,
        "output_bytes": sum(x.numel() * x.element_size() for x in calls["truncdet"]()),
        "native": found,
        "native_name": native,
        "truncdet": ours,
        "ratio": ours["backward_ms"] / found[native]["backward_ms"],
        "limit": LIMIT,
    }


def check_sampling(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row, times and memory in those of full size on a GPU."""
    checks = [holds(f"{row['name']}: bits repeat", row["truncdet"]["bits_equal"])]
    if with_limits:
        checks.append(at_most(f"{row['name']}: backward", row["ratio"], row["limit"]))
        scratch = row["truncdet"]["backward_peak_bytes"] - row["output_bytes"]
        allowed = SCRATCH_PER_CELL * row["cells"] + ALLOCATOR_SLACK
        checks.append(at_most(f"{row['name']}: bytes beyond the output", scratch, allowed))
    return checks
