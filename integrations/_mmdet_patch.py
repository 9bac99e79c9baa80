"""mmdet's patch: that of mmcv, whose operator it uses, and boxes that keep their precision.

`SingleRoIExtractor.forward` casts the RoIs to the features' type, which under autocast rounds
coordinates to half. It is handed boxes that such a cast leaves alone, if all that it does with them
is known: its own methods map and rescale them, and layers that this patch covers pool them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from truncdet.integrations import mmcv
from truncdet.integrations._patch import Patch, Plan, Site
from truncdet.integrations._precise import precise_forward
from truncdet.integrations._roi import OFF, Recipe, recipe

TESTED = ((3, 3), (3, 4))
TESTED_MMENGINE = ((0, 10), (0, 11))

_ME = "truncdet.integrations.mmdet"
_OWNER = "mmdet"
_SINGLE = "mmdet.models.roi_heads.roi_extractors.single_level_roi_extractor"


def patch(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> None:
    """Makes mmdet's RoIAlign reproducible until `unpatch`; another mode switches to it.

    Models built before and after the patch, mask targets and code of yours that calls mmcv's
    `roi_align` are all changed, since mmcv is patched as well.

    Example:
        >>> from truncdet.integrations import mmdet as mm
        >>> mm.patch()
        >>> mm.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable) or 'off' (the original).
        literal: with 'truncate', the published recipe as it is written: RoIs in half too.
        allow_untested: patch versions outside the tested ranges too; the environment variable
            TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for 'snap' and unknown modes, and literal without 'truncate'.
        TruncdetError: outside the tested range of mmdet, mmengine or mmcv; nothing is changed.
    """
    chosen = recipe(mode, literal, f"{_ME}.patch")
    if chosen == OFF:
        unpatch()
        return
    _MMENGINE.check_version(allow_untested)
    with mmcv.CLAIMS.lock:
        before = mmcv.CLAIMS.of(_OWNER)
        mmcv.CLAIMS.set(_OWNER, chosen, allow_untested=allow_untested)
        try:
            _PATCH.apply(chosen, allow_untested=allow_untested)
        except BaseException:
            mmcv.CLAIMS.set(_OWNER, before, allow_untested=True)
            raise


def unpatch() -> bool:
    """Puts mmdet and mmcv back exactly as they were; returns False if mmdet was not patched.

    Where mmcv has a patch of its own, that one holds again.
    """
    with mmcv.CLAIMS.lock:
        was_patched = is_patched()
        _PATCH.undo()
        mmcv.CLAIMS.set(_OWNER, OFF)
        return was_patched


@contextmanager
def patched(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> Iterator[None]:
    """Patches within a `with` block; blocks nest, and each puts the mode before it back.

    Example:
        >>> from truncdet.integrations import mmdet as mm
        >>> with mm.patched("truncate"):
        ...     mm.mode()
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
    if chosen != OFF:
        _MMENGINE.check_version(allow_untested)
    with ExitStack() as undo:
        if chosen != OFF or mmcv.is_patched():  # with 'off' mmcv need not even be imported
            undo.enter_context(mmcv.CLAIMS.scope(_OWNER, chosen, allow_untested=allow_untested))
        undo.enter_context(_PATCH.scope(chosen, allow_untested=allow_untested))
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != OFF


def mode() -> str:
    """Returns the mode in force, which is that of mmcv: 'fixed_point', 'truncate' or 'off'."""
    return mmcv.mode() if is_patched() else "off"


def _plan(chosen: Recipe) -> Plan:
    original = vars(vars(importlib.import_module(_SINGLE))["SingleRoIExtractor"])["forward"]
    return Plan((Site(_SINGLE, "SingleRoIExtractor.forward", precise_forward(original)),))


_PATCH = Patch(_ME, "mmdet", TESTED, _plan, off=OFF)
_MMENGINE = Patch(_ME, "mmengine", TESTED_MMENGINE, lambda mode: Plan(), off=OFF)
