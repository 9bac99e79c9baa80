"""Which forwards may be handed boxes that keep their precision: those that are known line by line.

Anything else may use the boxes it cast for purposes of its own: beside half tensors, in layers of
its own, in kernels that need boxes of the features' type. There the cast stays a cast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from truncdet.integrations._precision import keep_rois
from truncdet.integrations._swap import swap_of

_EXTRACTORS = "mmdet.models.roi_heads.roi_extractors"
_METHODS = ("map_roi_levels", "roi_rescale")  # to which SingleRoIExtractor.forward gives boxes


def inherits(module: nn.Module, cls: Any, name: str) -> bool:
    """Returns whether a method of a module is that of `cls`, patched or not."""
    return name not in vars(module) and getattr(type(module), name, None) is getattr(cls, name)


def convertible(extractor: nn.Module) -> bool:
    """Returns whether an extractor's forward is mmdet's and all its layers are converted."""
    single = _single()
    return (
        single is not None
        and isinstance(extractor, single)
        and inherits(extractor, single, "forward")
        and _known(extractor, _is_converted)
    )


def precise_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns SingleRoIExtractor.forward with boxes kept precise where all that follows is known.

    A subclass with a forward of its own has this only for what it gives to `super().forward`.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _known(self, _is_ours):
            args, kwargs = keep_rois(self, args, kwargs) or (args, kwargs)
        return original(self, *args, **kwargs)

    return forward


def _known(extractor: Any, ours: Callable[[nn.Module], object]) -> bool:
    found = getattr(extractor, "roi_layers", None)
    layers = list(found) if isinstance(found, Iterable) else []
    methods = all(inherits(extractor, _single(), name) for name in _METHODS)
    return bool(layers) and methods and all(ours(layer) for layer in layers)


def _is_converted(layer: nn.Module) -> bool:
    """Returns whether a layer is converted and takes boxes that are kept precise."""
    swap = swap_of(layer)
    return swap is not None and bool(swap.mixin._precise)


def _is_ours(layer: nn.Module) -> bool:
    """Returns whether a layer pools by truncdet: converted, or mmcv's own while it is patched."""
    if _is_converted(layer):
        return True
    from truncdet.integrations import mmcv

    cls = sys.modules["mmcv.ops.roi_align"].RoIAlign
    return mmcv.is_patched() and isinstance(layer, cls) and inherits(layer, cls, "forward")


def _single() -> Any:
    return getattr(sys.modules.get(_EXTRACTORS), "SingleRoIExtractor", None)
