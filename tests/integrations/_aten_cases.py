"""Calls of the operators that the aten patch overrides, and truncdet's own functions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import truncdet

Function = Callable[[Tensor], Tensor]


class Gradient(NamedTuple):
    """An operator whose backward is overridden: input shape, the plain and our own function."""

    op: str
    shape: tuple[int, ...]
    plain: Function
    ours: Function


def _resized(op: str, shape: tuple[int, ...], **options: Any) -> Gradient:
    return Gradient(
        op,
        shape,
        lambda x: F.interpolate(x, **options),
        lambda x: truncdet.interpolate(x, **options),
    )


def _ours_max1d(x: Tensor) -> Tensor:
    return truncdet.adaptive_max_pool2d(x.unsqueeze(-2), (1, 4)).squeeze(-2)


GRADIENTS: Mapping[str, Gradient] = {
    "linear": _resized("upsample_linear1d", (2, 3, 9), scale_factor=1.7, mode="linear"),
    "bilinear": _resized("upsample_bilinear2d", (2, 3, 9, 5), scale_factor=1.7, mode="bilinear"),
    "bilinear scales": _resized(
        "upsample_bilinear2d", (2, 3, 9, 5), scale_factor=(1.7, 2.3), mode="bilinear"
    ),
    "bilinear corners": _resized(
        "upsample_bilinear2d", (2, 3, 9, 5), size=(4, 7), mode="bilinear", align_corners=True
    ),
    "bicubic": _resized("upsample_bicubic2d", (2, 3, 9, 5), scale_factor=2.3, mode="bicubic"),
    "bicubic corners": _resized(
        "upsample_bicubic2d", (2, 3, 9, 5), size=(4, 7), mode="bicubic", align_corners=True
    ),
    "trilinear": _resized(
        "upsample_trilinear3d", (2, 3, 3, 9, 5), scale_factor=(1.7, 2, 1.2), mode="trilinear"
    ),
    "area": _resized("_adaptive_avg_pool2d", (2, 3, 9, 5), size=(4, 3), mode="area"),
    "average 1d": Gradient(
        "_adaptive_avg_pool2d",
        (2, 3, 9),
        lambda x: F.adaptive_avg_pool1d(x, 4),
        lambda x: truncdet.adaptive_avg_pool1d(x, 4),
    ),
    "average 2d": Gradient(
        "_adaptive_avg_pool2d",
        (2, 3, 9, 5),
        torch.nn.AdaptiveAvgPool2d((4, 3)),
        lambda x: truncdet.adaptive_avg_pool2d(x, (4, 3)),
    ),
    "average 2d without batch": Gradient(
        "_adaptive_avg_pool2d",
        (3, 9, 5),
        lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
        lambda x: truncdet.adaptive_avg_pool2d(x, (4, 3)),
    ),
    "average 3d": Gradient(
        "_adaptive_avg_pool3d",
        (2, 3, 4, 9, 5),
        lambda x: F.adaptive_avg_pool3d(x, (3, 4, 3)),
        lambda x: truncdet.adaptive_avg_pool3d(x, (3, 4, 3)),
    ),
    "max 1d": Gradient(
        "adaptive_max_pool2d",
        (2, 3, 9),
        lambda x: F.adaptive_max_pool1d(x, 4),
        _ours_max1d,
    ),
    "max 2d": Gradient(
        "adaptive_max_pool2d",
        (2, 3, 9, 5),
        lambda x: F.adaptive_max_pool2d(x, (4, 3)),
        lambda x: truncdet.adaptive_max_pool2d(x, (4, 3)),
    ),
}


def _sampled(
    op: str, shape: tuple[int, ...], places: Tensor, align: bool = False, **options: str
) -> dict[str, Gradient]:
    """The gradients of grid_sample for its image and for its grid."""
    name = " ".join((op, *options.values(), *(["corners"] * align)))
    image = torch.randn(shape, generator=torch.Generator().manual_seed(6))

    def of(sample: Callable[..., Tensor], first: bool) -> Function:
        def call(x: Tensor) -> Tensor:
            pair = (x, places.to(x)) if first else (image.to(x), x)
            return sample(*pair, align_corners=align, **options)

        return call

    return {
        f"{name}: {what}": Gradient(
            f"grid_sampler_{op}", size, of(F.grid_sample, first), of(truncdet.grid_sample, first)
        )
        for what, first, size in (("image", True, shape), ("grid", False, tuple(places.shape)))
    }


def _places(*shape: int) -> Tensor:
    """Many places in few cells, some of them outside."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 2.4 - 1.2


SAMPLING: Mapping[str, Gradient] = {
    **_sampled("2d", (2, 3, 4, 5), _places(2, 9, 7, 2)),
    **_sampled("2d", (2, 3, 4, 5), _places(2, 9, 7, 2), True, padding_mode="border"),
    **_sampled("2d", (2, 3, 4, 5), _places(2, 9, 7, 2), mode="nearest", padding_mode="reflection"),
    **_sampled("2d", (2, 3, 4, 5), _places(2, 9, 7, 2), mode="bicubic"),
    **_sampled("3d", (2, 3, 4, 5, 2), _places(2, 5, 7, 2, 3)),
    **_sampled("3d", (2, 3, 4, 5, 2), _places(2, 5, 7, 2, 3), True, mode="nearest"),
}
