"""How converted RoIAlign layers compute by a recipe: a forward for each form that there is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, where
from truncdet.integrations._roi import (
    Function,
    Recipe,
    declined,
    for_original,
    from_mmcv,
    from_torchvision,
    make_function,
)
from truncdet.integrations._swap import NOTICES, Converted


class _RoIAlign(Converted):
    """What computes by any recipe: fixed point, or the framework's function between roundings."""

    if TYPE_CHECKING:
        _function: Function

    _precise = True

    @classmethod
    def _members(cls, original: type, recipe: Recipe, source: str) -> dict[str, Any]:
        # The framework's own function, from under any patch of ours.
        importlib.import_module(f"{source}.ops.roi_align")
        integration = importlib.import_module(f"truncdet.integrations.{source}")
        function = integration._replacement().__wrapped__
        common = from_mmcv(function) if source == "mmcv" else from_torchvision(function)
        return {"_function": staticmethod(make_function(common, recipe))}


class Single(_RoIAlign):
    """One level: torchvision's RoIAlign, detectron2's ROIAlign, mmcv's RoIAlign."""

    if TYPE_CHECKING:
        output_size: Any
        spatial_scale: float
        sampling_ratio: int
        aligned: bool

    def forward(self, input: Any, rois: Any) -> Any:
        reason = declined(input, rois)
        if reason is not None:
            NOTICES.say(reason, stacklevel=4)
            return super().forward(input, for_original(input, rois))  # type: ignore[misc]
        return self._function(
            input,
            rois,
            self.output_size,
            self.spatial_scale,
            self.sampling_ratio,
            self.aligned,
            self._pool_mode(),
        )

    def _pool_mode(self) -> str:
        return "avg"


class Mmcv(Single):
    if TYPE_CHECKING:
        pool_mode: str
        use_torchvision: bool

    def _pool_mode(self) -> str:
        # torchvision's function only averages, and mmcv lets it, whatever pool_mode says.
        return "avg" if self.use_torchvision else self.pool_mode


class MultiScale(_RoIAlign):
    """torchvision's MultiScaleRoIAlign: its own levels and scales, our operator at each level."""

    if TYPE_CHECKING:
        featmap_names: list[str]
        output_size: tuple[int, int]
        sampling_ratio: int
        canonical_scale: int
        canonical_level: int
        scales: list[float] | None
        map_levels: Any
        _poolers: Any  # the module torchvision.ops.poolers

    @classmethod
    def _members(cls, original: type, recipe: Recipe, source: str) -> dict[str, Any]:
        poolers = sys.modules["torchvision.ops.poolers"]
        return {"_poolers": poolers, **super()._members(original, recipe, source)}

    def forward(self, x: Any, boxes: Any, image_shapes: Any) -> Any:
        features = list(x.values()) if isinstance(x, dict) else [x]
        for reason in (declined(feature, boxes) for feature in features):
            if reason is not None:
                NOTICES.say(reason, stacklevel=4)
                return super().forward(x, boxes, image_shapes)  # type: ignore[misc]
        return self._pool(self._poolers._filter_input(x, self.featmap_names), boxes, image_shapes)

    def _pool(self, features: list[Tensor], boxes: Sequence[Tensor], image_shapes: Any) -> Tensor:
        # The first batch fixes the scales; the original keeps them in these attributes too.
        if self.scales is None or self.map_levels is None:
            self.scales, self.map_levels = self._poolers._setup_scales(
                features, image_shapes, self.canonical_scale, self.canonical_level
            )
        rois = self._poolers._convert_to_roi_format(boxes)
        if len(features) == 1:
            return self._level(features[0], rois, self.scales[0])
        # Boxes stay in their own type, under autocast too: the level of a box, then, does not
        # depend on the features' type.
        levels = self.map_levels(boxes)
        shape = (len(rois), features[0].shape[1], *self.output_size)
        result = features[0].new_zeros(shape)
        for level, (feature, scale) in enumerate(zip(features, self.scales, strict=False)):
            (index,) = where(levels == level)
            # Under autocast the levels may come in different types.
            result[index] = self._level(feature, rois[index], scale).to(result.dtype)
        return result

    def _level(self, feature: Tensor, rois: Tensor, scale: float) -> Tensor:
        result: Tensor = self._function(
            feature, rois, self.output_size, scale, self.sampling_ratio, False, "avg"
        )
        return result
