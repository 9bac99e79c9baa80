"""Ways to mmcv's RoIAlign, from before a patch and made under it, and a crowded scene for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import _mmcv_needed  # noqa: F401
import mmcv.ops
import torch
from mmcv.ops import RoIAlign
from mmcv.ops import roi_align as imported
from mmcv.ops.roi_align import RoIAlignFunction
from torch import Tensor

# In a tuple: the patch replaces every module global that is the function.
HELD = (vars(sys.modules["mmcv.ops.roi_align"])["roi_align"],)


def original(*args: Any) -> Any:
    return HELD[0](*args)


def scene(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Features [2, 3, 16, 16], crowded RoIs [60, 5], some outside, and a gradient [60, 3, 3, 2]."""
    draw = torch.Generator().manual_seed(0)
    corner = torch.rand(60, 2, generator=draw) * 20 - 2
    size = torch.rand(60, 2, generator=draw) * 20 + 0.5
    image = torch.randint(0, 2, (60, 1), generator=draw).float()
    features = torch.randn(2, 3, 16, 16, generator=draw).to(dtype).requires_grad_()
    gradient = torch.randn(60, 3, 3, 2, generator=draw).to(dtype)
    return features, torch.cat([image, corner, corner + size], 1).to(dtype), gradient


def run(way: Callable[..., Any], order: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Result and gradient, the rows of the result in the order of `scene`."""
    features, boxes, upstream = scene()
    order = torch.arange(len(boxes)) if order is None else order
    result = way(features, boxes[order], **options)
    (gradient,) = torch.autograd.grad(result, features, upstream[order])
    return [result.detach()[order.argsort()], gradient]


ORDERS = [torch.randperm(60, generator=torch.Generator().manual_seed(i)) for i in range(20)]


def differs(way: Callable[..., Any], **options: Any) -> bool:
    """Whether some order of the RoIs changes a bit of the gradient."""
    first = run(way, **options)[1]
    return any(not torch.equal(run(way, order, **options)[1], first) for order in ORDERS)


def layer(use_torchvision: bool) -> Callable[..., Any]:
    def build(pool_mode: str = "avg", sampling_ratio: int = 0, aligned: bool = True) -> RoIAlign:
        return RoIAlign((3, 2), 0.5, sampling_ratio, pool_mode, aligned, use_torchvision)

    before: dict[Any, RoIAlign] = {
        (pool, ratio, aligned): build(pool, ratio, aligned)
        for pool in ("avg", "max")
        for ratio in (0, 2)
        for aligned in (True, False)
    }

    def way(
        features: Tensor,
        boxes: Tensor,
        pool_mode: str = "avg",
        sampling_ratio: int = 0,
        aligned: bool = True,
        new: bool = False,
    ) -> Any:
        key = (pool_mode, sampling_ratio, aligned)
        return (build(*key) if new else before[key])(features, boxes)

    return way


def function(get: Callable[[], Any]) -> Callable[..., Any]:
    def way(
        features: Tensor,
        boxes: Tensor,
        pool_mode: str = "avg",
        sampling_ratio: int = 0,
        aligned: bool = True,
    ) -> Any:
        return get()(features, boxes, (3, 2), 0.5, sampling_ratio, pool_mode, aligned)

    return way


MMCVS: dict[str, Callable[..., Any]] = {
    "mmcv.ops.roi_align": function(lambda: mmcv.ops.roi_align),
    "imported before": function(lambda: imported),
    "RoIAlignFunction.apply": function(lambda: RoIAlignFunction.apply),
    "RoIAlign built before": layer(use_torchvision=False),
    "RoIAlign": lambda *args, **options: layer(False)(*args, **options, new=True),
}
TORCHVISIONS: dict[str, Callable[..., Any]] = {
    "through torchvision, built before": layer(use_torchvision=True),
    "through torchvision": lambda *args, **options: layer(True)(*args, **options, new=True),
}
WAYS = {**MMCVS, **TORCHVISIONS}
FORMS = [
    {"pool_mode": pool, "sampling_ratio": ratio, "aligned": aligned}
    for pool in ("avg", "max")
    for ratio in (0, 2)
    for aligned in (True, False)
]
