"""Boxes that keep their precision on the way through code that would round them.

Under autocast the features are half precision, and mmdet's extractors and detectron2's ROIAlign
cast the boxes to the features' type before they pool: past 2048 pixels half moves boxes in steps
of two. truncdet takes boxes in float32 beside features of any type, so nothing needs that cast.
Instead of rewriting other people's forwards, the boxes enter them as a Tensor subclass for which
casts to a narrower type only copy. They are for forwards whose every line is known, and for layers
that take such boxes: rows picked out of them keep that property, whatever else is computed is an
ordinary tensor of the boxes' own type.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

_KEPT = (torch.float32, torch.float64)
_CASTS = frozenset(
    (Tensor.to, Tensor.type, Tensor.type_as, Tensor.half, Tensor.bfloat16, Tensor.float)
)
# Where truncdet computes RoIAlign itself; elsewhere the original needs boxes that are cast.
DEVICES = ("cpu", "cuda", "meta")
_FEATURES, _BOXES = ("input", "feats", "x"), ("rois", "boxes")
_jit: Any = torch.jit


class PreciseBoxes(Tensor):
    """Boxes for which `.half()`, `.type_as(features)`, `.to(dtype)` to a narrower type only copy.

    Example:
        >>> boxes = keep_precision(torch.tensor([[0.0, 1.0, 2.0, 2049.0, 4.0]]))
        >>> boxes.half().dtype
        torch.float32
    """

    # torch.compile must not see inside: compiled code cannot take such tensors together with
    # operators of ours (torch 2.14), so each call is a graph break. Privately, since the public
    # torch.compiler.disable imports the compiler at once, a second that few programs need wait.
    @classmethod
    @_disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CASTS and isinstance(args[0], PreciseBoxes):
                return _kept(_cast(func, *args, **kwargs))
            result = func(*args, **kwargs)
            # Rows; columns are on their way to something else, and so is what is looked up in
            # another tensor with boxes for an index.
            if func is Tensor.__getitem__ and isinstance(args[0], PreciseBoxes):
                return _kept(result) if result.dim() == 2 else result
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return keep_precision(copy.deepcopy(plain(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as an ordinary tensor: what is loaded must not depend on this package.
        return plain(self).__reduce_ex__(protocol)


def keep_precision(boxes: Tensor) -> Tensor:
    """Returns float32 or float64 boxes as `PreciseBoxes` of the same memory, others unchanged.

    Tensors of other subclasses than nn.Parameter are unchanged as well.

    Example:
        >>> type(keep_precision(torch.zeros(0, 5))).__name__
        'PreciseBoxes'

    Args:
        boxes: of any shape and dtype.
    """
    # Other subclasses have semantics of their own; fake tensors are among them.
    if type(boxes) not in (Tensor, nn.Parameter) or boxes.dtype not in _KEPT:
        return boxes
    return _as(PreciseBoxes, boxes)


def plain(boxes: Tensor) -> Tensor:
    """Returns an ordinary tensor of the same memory, with the precision that was kept.

    Example:
        >>> type(plain(keep_precision(torch.zeros(0, 5)))).__name__
        'Tensor'

    Args:
        boxes: of any shape and dtype.
    """
    if not isinstance(boxes, PreciseBoxes):
        return boxes
    return _as(Tensor, boxes)


def keep_rois(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook (`with_kwargs=True`) that keeps the precision of the boxes.

    For RoI layers, called with (input, rois), and for extractors, called with (feats, rois, ...),
    by position or by name. It acts where the boxes are wider than the features, and not while
    torch.jit.trace, torch.fx or torch.export record what will run without us.

    Example:
        >>> layer = torch.nn.Identity()
        >>> handle = layer.register_forward_pre_hook(keep_rois, with_kwargs=True)

    Args:
        module: the layer or extractor; not looked at.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The arguments with the boxes as `PreciseBoxes`, or None where they can stay as they are.
    """
    if not would_round(args, kwargs):
        return None
    if len(args) > 1:
        return (args[0], keep_precision(args[1]), *args[2:]), kwargs
    name = next(name for name in _BOXES if name in kwargs)
    return args, {**kwargs, name: keep_precision(kwargs[name])}


def would_round(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether `keep_rois` acts on these arguments.

    Example:
        >>> would_round((torch.zeros(1).half(), torch.zeros(0, 5)), {})
        True
    """
    features = args[0] if args else _named(kwargs, _FEATURES)
    if isinstance(features, Sequence):
        features = features[0] if features else None
    boxes = args[1] if len(args) > 1 else _named(kwargs, _BOXES)
    if not isinstance(features, Tensor) or not isinstance(boxes, Tensor):
        return False
    if boxes.dtype not in _KEPT or not _narrower(features.dtype, boxes.dtype):
        return False
    if features.device.type not in DEVICES:
        return False
    return not (_jit.is_tracing() or torch.compiler.is_exporting())


@_disable_dynamo
def _as(kind: type[Tensor], boxes: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return boxes.as_subclass(kind)


def _named(kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((kwargs[name] for name in names if name in kwargs), None)


def _narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).bits < torch.finfo(than).bits


def _cast(func: Any, boxes: Tensor, *args: Any, **kwargs: Any) -> Any:
    # An empty tensor answers what would come out, and launches no kernel.
    wanted = func(boxes.new_empty(0), *args, **kwargs)
    if not isinstance(wanted, Tensor) or not _narrower(wanted.dtype, boxes.dtype):
        return func(boxes, *args, **kwargs)
    # A copy, as the cast would have been: callers may change the result in place.
    return boxes.to(wanted.device, copy=True)


def _kept(result: Any) -> Any:
    if isinstance(result, PreciseBoxes) or not isinstance(result, Tensor):
        return result
    return keep_precision(result)
