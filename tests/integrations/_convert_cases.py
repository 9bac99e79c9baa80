"""Layers for the tests of `convert`, and ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_torchvision import scene
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, RoIAlign

ALL = slice(None)


def single() -> RoIAlign:
    return RoIAlign(3, 0.5, 2, True)


def multi() -> MultiScaleRoIAlign:
    return MultiScaleRoIAlign(["0", "1"], (3, 2), 2)


class Model(nn.Module):
    """A layer at two places, another one, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.pool = self.again = single()
        self.levels = nn.ModuleList([multi()])


def run_single(
    layer: Any, order: Any = ALL, dtype: Any = torch.float32, wide: bool = False
) -> list[Tensor]:
    """Output, for RoIs in the given order, and gradient of the features, which are of `dtype`;
    with `wide` the layer gets them in float32."""
    features, _, upstream = scene(dtype=dtype)
    _, boxes, _ = scene()
    out = layer(features.float() if wide else features, boxes[order])
    out.backward(upstream[order].to(out.dtype))
    assert features.grad is not None
    return [out.detach(), features.grad]


def run_multi(
    layer: Any, order: Any = ALL, dtype: Any = torch.float32, wide: bool = False
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    maps = {
        name: torch.randn(1, 3, side, side, generator=draw).to(dtype).requires_grad_()
        for name, side in (("0", 32), ("1", 16))
    }
    corner = torch.rand(40, 2, generator=draw) * 20
    size = torch.rand(40, 2, generator=draw) ** 4 * 900 + 1
    boxes = torch.cat([corner, corner + size], 1)[order]
    upstream = torch.randn(40, 3, 3, 2, generator=draw).to(dtype)[order]
    given = {name: features.float() for name, features in maps.items()} if wide else maps
    out = layer(given, [boxes], [(64, 64)])
    out.backward(upstream.to(out.dtype))
    gradients = [features.grad for features in maps.values()]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach(), *gradients]  # type: ignore[list-item]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "RoIAlign": (single, run_single),
    "MultiScaleRoIAlign": (multi, run_multi),
}
both_kinds = pytest.mark.parametrize("kind", KINDS)
