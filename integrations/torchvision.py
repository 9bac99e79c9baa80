"""torchvision: RoIAlign, MultiScaleRoIAlign and the detection models, forward and backward.

Two layers. Names: every module global under `torchvision` that is `roi_align` becomes ours, so
models built before and after the patch both use it, and the mode of a graph is frozen in its
forward. Kernel (`fixed_point` only): the registration of `torchvision::_roi_align_backward` is
overridden, so that references taken before the patch, TorchScript and traced graphs get the
reproducible gradient as well. Such graphs carry no mode: what counts for them is the patch at the
time of their *backward*.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from truncdet.integrations._patch import Kernel, Patch, Plan, Site

import truncdet
from truncdet._mode import check_mode

TESTED = ((0, 26), (0, 30))
BACKWARD_OP = "torchvision::_roi_align_backward"

_ME = "truncdet.integrations.torchvision"
_MODES = ("fixed_point", "truncate", "off")
_jit: Any = torch.jit


def patch(mode: str = "fixed_point", *, allow_untested: bool = False) -> None:
    """Makes torchvision's RoIAlign reproducible until `unpatch`; another mode switches to it.

    Example:
        >>> import truncdet.integrations.torchvision as tv
        >>> tv.patch()
        >>> tv.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable) or 'off' (the original).
        allow_untested: patch versions outside the tested range too, 0.26 to 0.29; the
            environment variable TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for 'snap' and for unknown modes.
        TruncdetError: outside the tested range; nothing is changed then.
    """
    _PATCH.apply(_checked(mode, "patch"), allow_untested=allow_untested)


def unpatch() -> bool:
    """Puts torchvision back exactly as it was; returns False if it was not patched.

    Not while another thread is inside RoIAlign's backward: its kernel would vanish under it.
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
    with _PATCH.scope(_checked(mode, "patched"), allow_untested=allow_untested):
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != "off"


def mode() -> str:
    """Returns the mode in force: 'fixed_point', 'truncate' or 'off'."""
    return _PATCH.mode


def covers(op: str, grad_dtype: torch.dtype) -> bool:
    """Returns whether a call of this dispatcher operator repeats: used by the strict checker.

    Under 'truncate' the original kernel runs, and only the wrapper calls it in double.
    """
    if op != BACKWARD_OP:
        return False
    return mode() == "fixed_point" or (mode() == "truncate" and grad_dtype == torch.float64)


def _checked(mode: str, where: str) -> str:
    if mode == "snap":
        raise ValueError(
            f"{_ME}.{where}: mode must not be 'snap' for RoIAlign: its contributions have "
            "fractional weights, and snapping proves sums only of contributions of weight one"
        )
    return check_mode(mode, f"{_ME}.{where}", _MODES)


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
    if mode == "truncate":
        replacement.truncated = truncdet.wrap(original, truncate_args=(0,))
    replacement.warned = set()
    sites = tuple(
        Site(module_name, name, replacement)
        for module_name, module in list(sys.modules.items())
        if module_name == "torchvision" or module_name.startswith("torchvision.")
        for name, value in list(vars(module).items())
        if value is original
    )
    return Plan(sites, _KERNELS if mode == "fixed_point" else ())


@functools.cache
def _replacement() -> Any:
    """The one function that takes the place of `roi_align`; it obeys the mode in force when it is
    called, so a reference taken while patched turns into the original after `unpatch`."""
    # From sys.modules: the attribute torchvision.ops.roi_align is the function, not its module.
    original = vars(sys.modules["torchvision.ops.roi_align"])["roi_align"]

    @functools.wraps(original)
    def roi_align(
        input: torch.Tensor,
        boxes: Any,
        output_size: Any,
        spatial_scale: float = 1.0,
        sampling_ratio: int = -1,
        aligned: bool = False,
    ) -> Any:
        mode = _PATCH.mode
        function = original
        if mode != "off" and not _declined(input, roi_align):
            function = truncdet.roi_align if mode == "fixed_point" else roi_align.truncated  # type: ignore[attr-defined]
        return function(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)

    def prepare_scriptable() -> Any:
        _say_original("torch.jit.script", roi_align)
        return original

    # torch.jit asks a function for this before it compiles it.
    roi_align.__prepare_scriptable__ = prepare_scriptable  # type: ignore[attr-defined]
    return roi_align


def _declined(input: object, replacement: Any) -> bool:
    """Whether this call is for the original, because it is of a kind we do not compute."""
    reason = None
    if isinstance(input, torch.fx.Proxy):
        reason = "a symbolic trace (torch.fx)"
    elif not isinstance(input, torch.Tensor) or input.is_quantized:
        return True  # no gradient, hence nothing to make reproducible; or the original's error
    elif _jit.is_tracing():
        reason = "torch.jit.trace"
    elif input.device.type not in ("cpu", "cuda", "meta"):
        reason = f"device {input.device.type}"
    if reason is not None:
        _say_original(reason, replacement)
    return reason is not None


def _say_original(reason: str, replacement: Any) -> None:
    if is_patched() and reason not in replacement.warned:
        replacement.warned.add(reason)
        warnings.warn(
            f"{_ME}: {reason} uses torchvision's own roi_align; its gradient is reproducible "
            "on CPU and CUDA while mode 'fixed_point' is in force, not otherwise",
            RuntimeWarning,
            stacklevel=4,
        )


_PATCH = Patch(_ME, "torchvision", TESTED, _plan)
