"""The layers that `convert` knows, and how each computes by a recipe."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from truncdet.integrations._rebound import rebound
from truncdet.integrations._roi import OFF, Recipe
from truncdet.integrations._roi_layers import Mmcv, MultiScale, Single
from truncdet.integrations._substitute import BY_IMAGE, CONVOLVED, SUMMED
from truncdet.integrations._swap import NOTICES, Converted, SubclassError
from truncdet.integrations._swap import swap_of as swap_of


class _Rebound(Converted):
    """A layer that runs its own methods, with the names of operators bound to ours."""

    @classmethod
    def _made_from(cls, original: type) -> tuple[Any, ...]:
        kind = kind_of_class(original)
        assert kind is not None
        return tuple(getattr(original, name) for name in kind.methods)

    @classmethod
    def _members(cls, original: type, recipe: Recipe, source: str) -> dict[str, Any]:
        kind = kind_of_class(original)
        assert kind is not None
        table = importlib.import_module(_TABLES[kind.framework]).TABLE
        members = {}
        for name, method in zip(kind.methods, cls._made_from(original), strict=True):
            plain = isinstance(method, FunctionType)
            members[name] = rebound(method, table, NOTICES) if plain else None
            if members[name] is None:
                raise SubclassError(f"its {name} was replaced and calls no known operator itself")
        return members


# Imported once a layer of the framework is there, since they need all of truncdet.
_TABLES = {
    name: f"truncdet.integrations._{name}_table" for name in ("torchvision", "mmcv", "detectron2")
}


@dataclass(frozen=True)
class Kind:
    """A layer of a framework: where its class is found, and what stands before it.

    `by` is the function of truncdet that computes it by 'fixed_point', which promises `tier`.
    `methods` compute: a layer whose class has methods of its own in their place is another one.
    """

    framework: str
    module: str
    name: str
    by: str = "truncdet.roi_align"
    tier: str = BY_IMAGE
    methods: tuple[str, ...] = ("forward",)
    mixin: Any = _Rebound  # a subclass of Converted

    def found(self) -> Any:
        """Returns the class, or None while the framework is not imported."""
        return getattr(sys.modules.get(self.module), self.name, None)

    def is_of(self, cls: type) -> bool:
        """Whether a class is this one or made from it."""
        found = self.found()
        return found is not None and issubclass(cls, found)

    def recipe(self, wanted: Recipe) -> Recipe:
        """Returns the recipe that its layers get: 'truncate' is for RoIAlign."""
        return OFF if wanted.mode == "truncate" and self.mixin is _Rebound else wanted


_CONVOLUTION = ("truncdet.deform_conv2d", CONVOLVED)
_DEFORM, _MODULATED = "mmcv.ops.deform_conv", "mmcv.ops.modulated_deform_conv"
_ATTENTION = "mmcv.ops.multi_scale_deform_attn"
_LAYERS = "detectron2.layers"

# The first that fits counts: classes stand before those that they are made from.
KINDS = (
    Kind("torchvision", "torchvision.ops.roi_align", "RoIAlign", mixin=Single),
    Kind("torchvision", "torchvision.ops.poolers", "MultiScaleRoIAlign", mixin=MultiScale),
    Kind("mmcv", "mmcv.ops.roi_align", "RoIAlign", mixin=Mmcv),
    Kind("detectron2", f"{_LAYERS}.roi_align", "ROIAlign", mixin=Single),
    Kind("torchvision", "torchvision.ops.roi_pool", "RoIPool", "truncdet.roi_pool"),
    Kind("torchvision", "torchvision.ops.ps_roi_align", "PSRoIAlign", "truncdet.ps_roi_align"),
    Kind("torchvision", "torchvision.ops.ps_roi_pool", "PSRoIPool", "truncdet.ps_roi_pool"),
    Kind("torchvision", "torchvision.ops.deform_conv", "DeformConv2d", *_CONVOLUTION),
    Kind("mmcv", "mmcv.ops.roi_pool", "RoIPool", "truncdet.roi_pool"),
    Kind("mmcv", "mmcv.ops.roi_align_rotated", "RoIAlignRotated", "truncdet.roi_align_rotated"),
    Kind("mmcv", _DEFORM, "DeformConv2dPack", *_CONVOLUTION),
    Kind("mmcv", _DEFORM, "DeformConv2d", *_CONVOLUTION),
    Kind("mmcv", _MODULATED, "ModulatedDeformConv2dPack", *_CONVOLUTION),
    Kind("mmcv", _MODULATED, "ModulatedDeformConv2d", *_CONVOLUTION),
    Kind("mmcv", "mmcv.ops.saconv", "SAConv2d", *_CONVOLUTION),
    Kind("mmcv", _ATTENTION, "MultiScaleDeformableAttention", "truncdet.ms_deform_attn"),
    Kind(
        "mmcv",
        "mmcv.ops.scatter_points",
        "DynamicScatter",
        "truncdet.dynamic_scatter",
        SUMMED,
        ("forward_single",),
    ),
    Kind(
        "detectron2",
        f"{_LAYERS}.roi_align_rotated",
        "ROIAlignRotated",
        "truncdet.roi_align_rotated",
    ),
    Kind("detectron2", f"{_LAYERS}.deform_conv", "DeformConv", *_CONVOLUTION),
    Kind("detectron2", f"{_LAYERS}.deform_conv", "ModulatedDeformConv", *_CONVOLUTION),
)


def kind_of(layer: nn.Module) -> Kind | None:
    """Returns which layer this is, subclasses and converted ones included."""
    return kind_of_class(type(layer))


def kind_of_class(cls: type) -> Kind | None:
    """As `kind_of`, for a class."""
    return next((kind for kind in KINDS if kind.is_of(cls)), None)


def source_of(layer: nn.Module, kind: Kind) -> str:
    """Returns the framework whose function the layer calls."""
    if kind.framework == "mmcv" and kind.name == "RoIAlign":
        return "torchvision" if getattr(layer, "use_torchvision", False) else "mmcv"
    return kind.framework if kind.mixin is _Rebound else "torchvision"
