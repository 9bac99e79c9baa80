"""torchvision: RoIAlign, MultiScaleRoIAlign, the detection models; gradients of other operators.

Two layers. Names: every module global under `torchvision` that is `roi_align` becomes ours, so
models built before and after the patch both use it, and the mode of a graph is frozen in its
forward. Kernel (`fixed_point` only): the registration of `torchvision::_roi_align_backward` is
overridden, so that references taken before the patch, TorchScript and traced graphs get the
reproducible gradient as well. Such graphs carry no mode: what counts for them is the patch at the
time of their *backward*. So with the gradients of RoIPool, PSRoIAlign, PSRoIPool and deform_conv2d,
whose kernels alone are overridden (_torchvision_table.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from truncdet.integrations import _torchvision_table
from truncdet.integrations._original import check_original, not_original
from truncdet.integrations._patch import Kernel, Patch, Plan, sites_of
from truncdet.integrations._roi import (
    Function,
    Notices,
    Recipe,
    checked,
    declined,
    for_original,
    from_torchvision,
    make_function,
)
from truncdet.integrations._swap import truncating

from truncdet._frameworks import FRAMEWORKS, mode_of

TESTED = ((0, 26), (0, 30))
BACKWARD_OP = "torchvision::_roi_align_backward"

_ME = "truncdet.integrations.torchvision"
_OPS = "torchvision.ops.roi_align"
_IMPORTERS = ("torchvision.ops", "torchvision.ops.poolers")
_FUNCTIONS: dict[str, Function] = {}  # by mode, those that were ever in force
_NOTICES = Notices(
    f"{_ME}: {{reason}} uses torchvision's own roi_align; its gradient is reproducible on CPU and "
    "CUDA while mode 'fixed_point' is in force, not otherwise"
)


def patch(mode: str = "fixed_point", *, allow_untested: bool = False) -> None:
    """Makes torchvision's operators reproducible until `unpatch`; another mode switches to it.

    Example:
        >>> import truncdet.integrations.torchvision as tv
        >>> tv.patch()
        >>> tv.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable, RoIAlign alone) or 'off' (the
            original).
        allow_untested: patch versions outside the tested range too, 0.26 to 0.29; the
            environment variable TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for 'snap' and for unknown modes.
        TruncdetError: outside the tested range, or if somebody else has replaced torchvision's
            roi_align; nothing is changed then.
    """
    _PATCH.apply(checked(mode, f"{_ME}.patch"), allow_untested=allow_untested)


def unpatch() -> bool:
    """Puts torchvision back exactly as it was; returns False if it was not patched.

    Not while another thread is inside one of the backwards: its kernel would vanish under it.
    """
    return _PATCH.undo()


@contextmanager
def patched(mode: str = "fixed_point", *, allow_untested: bool = False) -> Iterator[None]:
    """Patches within a `with` block; blocks nest, and each puts the mode before it back.

    Example:
        >>> import truncdet.integrations.torchvision as tv
        >>> with tv.patched("truncate"):
        ...     tv.mode()
        'truncate'

    Args:
        mode: as for `patch`.
        allow_untested: as for `patch`.

    Raises:
        ValueError: as `patch`.
        TruncdetError: as `patch`.
    """
    with _PATCH.scope(checked(mode, f"{_ME}.patched"), allow_untested=allow_untested):
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != "off"


def mode() -> str:
    """Returns the mode in force: 'fixed_point', 'truncate' or 'off'."""
    return _PATCH.mode


def covers(op: str, grad_dtype: torch.dtype) -> bool:
    """Returns whether a call of this dispatcher operator repeats: used by the strict checker.

    Under 'truncate' the original kernel runs, and only the wrapper calls it in double: the wrapper
    of this patch, of another framework whose layers call torchvision, or of a converted layer.
    """
    if op != BACKWARD_OP:
        return mode() == "fixed_point" and _torchvision_table.covers(op, grad_dtype)
    if mode() == "fixed_point":
        return True
    patched_so = any(mode_of(name) == "truncate" for name in FRAMEWORKS)
    return grad_dtype == torch.float64 and (patched_so or truncating())


def _backward_kernel(
    grad: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """torchvision's backward schema (the same in 0.26 and 0.29) on our backward operator."""
    # torchvision's rois have the gradient's dtype; ours are float32, or float64 for double.
    boxes = rois if grad.dtype == torch.float64 else rois.float()
    result: torch.Tensor = torch.ops.truncdet.roi_align_backward(
        grad,
        boxes,
        batch_size,
        channels,
        height,
        width,
        pooled_height,
        pooled_width,
        spatial_scale,
        sampling_ratio,
        aligned,
        False,  # torchvision returns contiguous NCHW
    )
    return result


_KERNELS = tuple(Kernel(BACKWARD_OP, key, _backward_kernel) for key in ("CPU", "CUDA"))


def _plan(mode: str) -> Plan:
    replacement = _replacement()
    original = replacement.__wrapped__
    check_original(_OPS, _is_original, replacement, _ME)
    _FUNCTIONS[mode] = make_function(from_torchvision(original), Recipe(mode))
    _NOTICES.forget()
    sites = sites_of(original, replacement, "torchvision")
    return Plan(sites, (*_KERNELS, *_torchvision_table.kernels()) if mode == "fixed_point" else ())


def _is_original(found: Any) -> bool:
    # By its globals, which no wrapper can copy, as `functools.wraps` copies names.
    module = vars(sys.modules[_OPS])
    return isinstance(found, FunctionType) and found.__globals__ is module


def _original() -> Any:
    """torchvision's own function, from under what somebody may have put in its place."""
    # From sys.modules: the attribute torchvision.ops.roi_align is the function, not its module.
    found = vars(sys.modules[_OPS]).get("roi_align")
    # The package and MultiScaleRoIAlign have imported it by name.
    others = [vars(sys.modules[name]).get("roi_align") for name in _IMPORTERS]
    for candidate in (found, *others):
        unwrapped: Any = candidate
        while not _is_original(unwrapped) and hasattr(unwrapped, "__wrapped__"):
            unwrapped = unwrapped.__wrapped__
        if _is_original(unwrapped):
            return unwrapped
    raise not_original(_OPS, found, _ME)


@functools.cache
def _replacement() -> Any:
    """The one function that takes the place of `roi_align`; it obeys the mode in force when it is
    called, so a reference taken while patched turns into the original after `unpatch`."""
    original = _original()

    @functools.wraps(original)
    def roi_align(
        input: torch.Tensor,
        boxes: Any,
        output_size: Any,
        spatial_scale: float = 1.0,
        sampling_ratio: int = -1,
        aligned: bool = False,
    ) -> Any:
        reason = declined(input, boxes) if is_patched() else ""
        if reason is not None:
            _NOTICES.say(reason)
            boxes = for_original(input, boxes)
            return original(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)
        function = _FUNCTIONS[_PATCH.mode]
        return function(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)

    def prepare_scriptable() -> Any:
        if is_patched():
            _NOTICES.say("torch.jit.script")
        return original

    # torch.jit asks a function for this before it compiles it.
    roi_align.__prepare_scriptable__ = prepare_scriptable  # type: ignore[attr-defined]
    return roi_align


_PATCH = Patch(_ME, "torchvision", TESTED, _plan)
