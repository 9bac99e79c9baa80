"""mmcv: RoIAlign, average and max, and the operators of _mmcv_table.py, wherever they are called.

Three kinds of places. Names: every module global that is mmcv's `roi_align` becomes ours, in mmcv
and wherever it was imported to, so models built before and after the patch both use it.
`RoIAlignFunction.apply`: the same for those who call the autograd function directly; subclasses
of it keep what they define. `RoIAlign.forward`: with `use_torchvision=True` it calls torchvision,
which this patch leaves alone, so there the layer itself calls ours. The operators of the table, in
mode 'fixed_point' alone, have places of the first two kinds.

mmcv's kernels bypass the dispatcher, so a reference to the original that no module global holds
stays what it is. The mode of a graph is frozen in its forward.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

from truncdet.integrations._claims import Claims
from truncdet.integrations._mmcv_table import TABLE
from truncdet.integrations._original import check_original
from truncdet.integrations._patch import Patch, Plan, Site, sites_of
from truncdet.integrations._roi import (
    OFF,
    Function,
    Notices,
    Recipe,
    declined,
    for_original,
    from_mmcv,
    from_torchvision,
    make_function,
    recipe,
)
from truncdet.integrations._substitute import Substitution, apply_of

TESTED = ((2, 1), (2, 2))

_ME = "truncdet.integrations.mmcv"
_OPS = "mmcv.ops.roi_align"
_NOTICES = Notices(f"{_ME}: {{reason}} uses the original roi_align, whose gradient may vary")
# The function of mmcv and that of torchvision under each recipe that was ever in force.
_FUNCTIONS: dict[Recipe, tuple[Function, Function]] = {}


def patch(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> None:
    """Makes mmcv's operators reproducible until `unpatch`; another mode switches to it.

    Example:
        >>> import truncdet.integrations.mmcv
        >>> truncdet.integrations.mmcv.patch()
        >>> truncdet.integrations.mmcv.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable, RoIAlign alone) or 'off' (the
            original).
        literal: with 'truncate', features and rois through half to double, as published; it moves
            large boxes and warns so.
        allow_untested: patch versions outside the tested range too, mmcv 2.1; the environment
            variable TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for 'snap', for unknown modes, and for `literal` in another mode.
        TruncdetError: outside the tested range, or if somebody else has replaced one of mmcv's
            functions, such as roi_align; nothing is changed then.
    """
    chosen = recipe(mode, literal, f"{_ME}.patch")
    CLAIMS.set("mmcv", chosen, allow_untested=allow_untested)


def unpatch() -> bool:
    """Puts mmcv back exactly as it was; returns False if it was not patched from here.

    While mmdet is patched mmcv stays so: mmdet's layers are mmcv's.

    Example:
        >>> import truncdet.integrations.mmcv
        >>> truncdet.integrations.mmcv.unpatch()
        False
    """
    held = CLAIMS.of("mmcv") != OFF
    CLAIMS.set("mmcv", OFF)
    return held


@contextmanager
def patched(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> Iterator[None]:
    """Patches within a `with` block; blocks nest, and each puts the mode before it back.

    Example:
        >>> import truncdet.integrations.mmcv
        >>> with truncdet.integrations.mmcv.patched("truncate"):
        ...     truncdet.integrations.mmcv.mode()
        'truncate'

    Args:
        mode: as for `patch`.
        literal: as for `patch`.
        allow_untested: as for `patch`.

    Raises:
        ValueError: as `patch`.
        TruncdetError: as `patch`.
    """
    chosen = recipe(mode, literal, f"{_ME}.patched")
    with CLAIMS.scope("mmcv", chosen, allow_untested=allow_untested):
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != OFF


def mode() -> str:
    """Returns the mode in force: 'fixed_point', 'truncate' or 'off'."""
    return _PATCH.mode.mode


def _plan(chosen: Recipe) -> Plan:
    module = vars(importlib.import_module(_OPS))
    replacement = _replacement()
    check_original(_OPS, _is_original, replacement, _ME)
    _FUNCTIONS[chosen] = (
        make_function(from_mmcv(replacement.__wrapped__), chosen),
        make_function(from_torchvision(_torchvision), chosen),
    )
    _NOTICES.forget()
    return Plan(
        (
            *(site for held in _held() for site in sites_of(held, replacement)),
            Site(_OPS, "RoIAlignFunction.apply", apply_of(module["RoIAlignFunction"], replacement)),
            Site(_OPS, "RoIAlign.forward", _forward(vars(module["RoIAlign"])["forward"])),
            *(_OTHERS.sites() if chosen.mode == "fixed_point" else ()),
        )
    )


@functools.cache
def _replacement() -> Any:
    """The one function that takes the place of `roi_align`; it obeys the mode in force when it is
    called, so a reference taken while patched turns into the original after `unpatch`."""
    # Whatever stands in for it just now: `roi_align` is this method, bound to its class. Past a
    # patched `apply`, which is an attribute of that class alone.
    layer = vars(importlib.import_module(_OPS))["RoIAlignFunction"]
    original = super(layer, layer).apply

    def roi_align(
        input: Any,
        rois: Any,
        output_size: Any,
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        pool_mode: str = "avg",
        aligned: bool = True,
    ) -> Any:
        reason = declined(input, rois) if is_patched() else ""
        if reason is not None:
            _NOTICES.say(reason)
            rois = for_original(input, rois)
            return original(
                input, rois, output_size, spatial_scale, sampling_ratio, pool_mode, aligned
            )
        function = _FUNCTIONS[_PATCH.mode][0]
        return function(input, rois, output_size, spatial_scale, sampling_ratio, aligned, pool_mode)

    roi_align.__wrapped__ = original  # type: ignore[attr-defined]
    # By this name it is found again: what is pickled while patched loads without us.
    roi_align.__module__, roi_align.__qualname__ = _OPS, "roi_align"
    return roi_align


def _is_original(found: Any) -> bool:
    layer = vars(sys.modules[_OPS])["RoIAlignFunction"]
    original = super(layer, layer).apply
    return isinstance(found, (MethodType, BuiltinMethodType)) and found == original


def _held() -> list[Any]:
    """The function as module globals hold it; every look-up of a bound method makes a new object.

    One object as a rule; two where somebody has put another one in its place.
    """
    names = (_OPS, "mmcv.ops")
    found = [vars(sys.modules[name]).get("roi_align") for name in names]
    return list({id(value): value for value in found if _is_original(value)}.values())


def _forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, input: Any, rois: Any) -> Any:
        if not (self.use_torchvision and is_patched()):
            return original(self, input, rois)  # it calls the global roi_align, which is ours
        reason = declined(input, rois)
        if reason is not None:
            _NOTICES.say(reason)
            return original(self, input, for_original(input, rois))
        # Like the original, this ignores pool_mode: torchvision only averages.
        function = _FUNCTIONS[_PATCH.mode][1]
        return function(
            input, rois, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned
        )

    return forward


def _torchvision(*arguments: Any) -> Any:
    from torchvision.ops import roi_align  # at the call, as mmcv does

    return roi_align(*arguments)


_PATCH = Patch(_ME, "mmcv", TESTED, _plan, off=OFF)
_OTHERS = Substitution(_ME, "mmcv.ops", TABLE, lambda: mode() == "fixed_point")
CLAIMS = Claims(_PATCH)
