"""What the published recipe's literal half cast loses, and exponent-safe truncation does not."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor
from torchvision.ops import box_iou

import truncdet

SCALES = tuple(10.0**-power for power in range(4, 10))
FEATURES = (1e3, 6e4, 1e5, 1e6)
IMAGES = (1344, 2048, 4096, 8192)
_BOXES = 512


def underflow(device: torch.device, channels: int = 64) -> list[dict[str, float]]:
    """Share of the gradient's non-zero entries that stay non-zero, by the size of what comes in."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, channels, 50, 84, generator=generator).to(device)
    boxes = _boxes(1344, generator)[:64].to(device)
    unit = torch.randn(len(boxes), channels, 7, 7, generator=generator).to(device)
    recipes = {
        "exact": {"bits": None, "grad_bits": None},
        "truncate": {"bits": 11, "grad_bits": 11},
        "literal": {"bits": torch.float16, "grad_bits": torch.float16},
    }
    rows = []
    for scale in SCALES:
        kept = {}
        for name, recipe in recipes.items():
            align: Any = truncdet.wrap(torchvision.ops.roi_align, **recipe)
            leaf = features.clone().requires_grad_()
            out = align(leaf, [boxes], output_size=7, spatial_scale=1 / 16, aligned=True)
            (gradient,) = torch.autograd.grad(out, leaf, unit * scale)
            kept[name] = int(torch.count_nonzero(gradient))
        rows.append({"scale": scale, **{n: kept[n] / kept["exact"] for n in recipes}})
    return rows


def overflow() -> list[dict[str, float]]:
    """Share of features that stay finite, by their largest magnitude; half's largest is 65504."""
    unit = torch.linspace(-1, 1, 10_001)
    return [
        {
            "largest": largest,
            "truncate": _finite(truncdet.truncate(unit * largest)),
            "literal": _finite(truncdet.truncate(unit * largest, dtype=torch.float16)),
        }
        for largest in FEATURES
    ]


def moved_boxes() -> list[dict[str, float]]:
    """How far the literal cast moves boxes, in pixels, and what is left of their overlap."""
    rows = []
    for size in IMAGES:
        boxes = _boxes(size, torch.Generator().manual_seed(0))
        cast = boxes.half().float()
        rows.append(
            {
                "image": size,
                "largest_shift": float((cast - boxes).abs().max()),
                "smallest_iou": float(box_iou(boxes, cast).diagonal().min()),
            }
        )
    return rows


def _boxes(size: int, generator: torch.Generator) -> Tensor:
    """Boxes of 16 to 112 pixels anywhere in an image of `size` pixels each way."""
    corners = torch.rand(_BOXES, 2, generator=generator) * (size - 112)
    extent = 16 + torch.rand(_BOXES, 2, generator=generator) * 96
    return torch.cat([corners, corners + extent], 1)


def _finite(values: Tensor) -> float:
    return float(values.isfinite().double().mean())
