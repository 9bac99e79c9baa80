"""RoIAlign by recipe: one calling convention for every framework's function and our own.

A framework's own function is first brought into the form (input, boxes, output_size,
spatial_scale, sampling_ratio, aligned, pool_mode) by `from_torchvision` or `from_mmcv`; a `Recipe`
then says what computes the call in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from truncdet.integrations._precision import DEVICES, PreciseBoxes, plain

import truncdet
from truncdet._mode import check_mode

MODES = ("fixed_point", "truncate", "off")
_jit: Any = torch.jit

Function = Callable[..., Any]


def checked(mode: str, where: str) -> str:
    """Returns `mode` if RoIAlign has it; else ValueError naming `where` and the choices."""
    if mode == "snap":
        raise ValueError(
            f"{where}: mode must not be 'snap' for RoIAlign: its contributions have fractional "
            "weights, and snapping proves sums only of contributions of weight one"
        )
    return check_mode(mode, where, MODES)


def _check(mode: str, literal: object, where: str) -> None:
    checked(mode, where)
    if not isinstance(literal, bool):
        raise TypeError(f"{where}: literal must be a bool, got {literal!r}")
    if literal and mode != "truncate":
        raise ValueError(
            f"{where}: literal must be False unless mode is 'truncate', got True for mode {mode!r}"
        )


@dataclass(frozen=True)
class Recipe:
    """What computes RoIAlign: a mode, and for 'truncate' whether literally as published.

    Example:
        >>> Recipe("truncate")
        Recipe(mode='truncate', literal=False)

    Args:
        mode: 'fixed_point', 'truncate' or 'off'.
        literal: features and rois through half to double, as in the published one-line recipe.
    """

    mode: str
    literal: bool = False

    def __post_init__(self) -> None:
        _check(self.mode, self.literal, "Recipe")


OFF = Recipe("off")


def recipe(mode: str, literal: bool, where: str) -> Recipe:
    """Returns the recipe of a public function's arguments, checked in that function's name.

    A literal one warns of what it does, at the caller of that function.
    """
    _check(mode, literal, where)
    if literal:
        warnings.warn(
            f"{where}: literal=True takes features and rois through half to double: coordinates "
            "past 2048 pixels move in steps of two and batch indices above 2048 are rounded, "
            "features above 65504 overflow and gradients up to 2^-25 vanish; literal=False avoids "
            "all of it",
            UserWarning,
            stacklevel=3,
        )
    return Recipe(mode, literal)


def from_torchvision(function: Function) -> Function:
    """Returns torchvision's roi_align, which only averages, in the common form."""

    def roi_align(
        input: Any,
        boxes: Any,
        output_size: Any,
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
        pool_mode: str = "avg",
    ) -> Any:
        return function(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)

    return roi_align


def from_mmcv(function: Function) -> Function:
    """Returns mmcv's roi_align, which has the pool mode before `aligned`, in the common form."""

    def roi_align(
        input: Any,
        boxes: Any,
        output_size: Any,
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
        pool_mode: str = "avg",
    ) -> Any:
        return function(
            input, boxes, output_size, spatial_scale, sampling_ratio, pool_mode, aligned
        )

    return roi_align


def make_function(original: Function, recipe: Recipe) -> Function:
    """Returns the function in the common form that computes RoIAlign by `recipe`.

    Args:
        original: the framework's function, in the common form.
        recipe: 'fixed_point' leads to `truncdet.roi_align`; 'truncate' runs the original in double
            between two roundings, with rois untouched; literally, with both through half; 'off'
            runs the original.
    """
    if recipe.mode == "fixed_point":
        return _fixed_point
    if recipe.mode == "off":
        return original
    return _literal(original) if recipe.literal else _truncated(original)


def declined(input: object, boxes: object) -> str | None:
    """Returns why the original must compute this call, or None if it need not.

    The reason is empty where there is nothing to say: quantized features have no gradient, and
    what is no tensor gets the original's own error.
    """
    if isinstance(input, torch.fx.Proxy) or isinstance(boxes, torch.fx.Proxy):
        return "a symbolic trace (torch.fx)"
    if not isinstance(input, Tensor) or input.is_quantized:
        return ""
    if _jit.is_tracing():
        return "torch.jit.trace"
    if input.device.type not in DEVICES:
        return f"device {input.device.type}"
    return None


def for_original(input: Any, boxes: Any) -> Any:
    """Returns boxes as an original kernel takes them: those kept precise in the features' dtype."""
    if isinstance(boxes, PreciseBoxes) and isinstance(input, Tensor):
        return plain(boxes).to(input.dtype)
    return boxes


class Notices:
    """Warnings that calls fall back on the original, one a reason.

    Example:
        >>> notices = Notices("truncdet: {reason} uses the original")
        >>> notices.say("torch.jit.trace")

    Args:
        text: the sentence, with `{reason}` in it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.said: set[str] = set()

    def say(self, reason: str, stacklevel: int = 2) -> None:
        """Warns unless this reason was given before or is empty."""
        if reason and reason not in self.said:
            self.said.add(reason)
            warnings.warn(
                self.text.format(reason=reason), RuntimeWarning, stacklevel=stacklevel + 1
            )

    def forget(self) -> None:
        """Lets every reason be given once more."""
        self.said.clear()


def _fixed_point(
    input: Any,
    boxes: Any,
    output_size: Any,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    pool_mode: str = "avg",
) -> Any:
    # Looked up at the call, so that whoever replaces truncdet.roi_align is obeyed.
    return truncdet.roi_align(
        input, _plain(boxes), output_size, spatial_scale, sampling_ratio, aligned, pool_mode
    )


def _truncated(original: Function) -> Function:
    wrapped = truncdet.wrap(original, truncate_args=(0,))

    def roi_align(input: Any, boxes: Any, *arguments: Any, **named: Any) -> Any:
        return wrapped(input, _plain(boxes), *arguments, **named)

    return roi_align


def _literal(original: Function) -> Function:
    def roi_align(input: Any, boxes: Any, *arguments: Any, **named: Any) -> Any:
        boxes = _plain(boxes)
        if isinstance(boxes, (list, tuple)):
            rois: Any = [box.half().double() for box in boxes]
        else:
            rois = boxes.half().double()
        result = original(input.half().double(), rois, *arguments, **named)
        return result.to(input.dtype)

    return roi_align


def _plain(boxes: Any) -> Any:
    if isinstance(boxes, Tensor):
        return plain(boxes)
    if isinstance(boxes, (list, tuple)):
        return [plain(box) if isinstance(box, Tensor) else box for box in boxes]
    return boxes
