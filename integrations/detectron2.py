"""detectron2: ROIAlign, ROIPooler, mask targets and the models built of them; config node and hook.

Two layers. Names: detectron2's `roi_align` is torchvision's function under names of its own; every
module global under `detectron2` that is this function becomes ours, so layers built before and
after the patch both use it. Precision: `ROIAlign.forward` casts RoIs to the features' type, which
under autocast rounds coordinates to half; the call of the layer hands that forward, and no other,
boxes that such a cast leaves alone. In mode 'fixed_point' the rotated layer and deformable
convolutions of _detectron2_table.py have their names replaced too.

Importing this module does not import detectron2; `TruncdetHook`, whose base class is detectron2's,
is made when it is asked for. Users of LazyConfig have `TruncdetHook` too, or `truncdet.convert` for
the one model that `instantiate` returned.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from truncdet.integrations import torchvision
from truncdet.integrations._detectron2_config import add_truncdet_config as add_truncdet_config
from truncdet.integrations._detectron2_table import TABLE
from truncdet.integrations._patch import Patch, Plan, Site, sites_of
from truncdet.integrations._precise import inherits
from truncdet.integrations._precision import keep_rois, would_round
from truncdet.integrations._roi import (
    OFF,
    Notices,
    Recipe,
    declined,
    for_original,
    from_torchvision,
    make_function,
    recipe,
)
from truncdet.integrations._substitute import Substitution

from truncdet._errors import TruncdetError

if TYPE_CHECKING:
    from truncdet.integrations._detectron2_hook import TruncdetHook as TruncdetHook

# The official main of 2024 calls itself 0.6 as the release of 2021 does; packages of it 0.7.
TESTED = ((0, 6), (0, 8))

_ME = "truncdet.integrations.detectron2"
_LAYER = "detectron2.layers.roi_align"  # in sys.modules; the attribute of that name is the function
_NOTICES = Notices(
    f"{_ME}: {{reason}} uses torchvision's own roi_align, whose gradient differs from run to run"
)


def patch(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> None:
    """Makes detectron2's operators reproducible until `unpatch`; another mode switches to it.

    Example:
        >>> from truncdet.integrations import detectron2 as d2
        >>> d2.patch()
        >>> d2.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable, ROIAlign alone) or 'off' (the
            original).
        literal: with 'truncate', the published recipe as it is written: RoIs in half too.
        allow_untested: patch versions outside the tested range too, 0.6 to 0.7; the environment
            variable TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for 'snap' and unknown modes, and literal without 'truncate'.
        TruncdetError: outside the tested range, or if somebody else has replaced a function of
            detectron2's, such as roi_align; nothing is changed then.
    """
    _PATCH.apply(recipe(mode, literal, f"{_ME}.patch"), allow_untested=allow_untested)


def unpatch() -> bool:
    """Puts detectron2 back exactly as it was; returns False if it was not patched."""
    return _PATCH.undo()


@contextmanager
def patched(
    mode: str = "fixed_point", *, literal: bool = False, allow_untested: bool = False
) -> Iterator[None]:
    """Patches within a `with` block; blocks nest, and each puts the mode before it back.

    Example:
        >>> from truncdet.integrations import detectron2 as d2
        >>> with d2.patched("truncate"):
        ...     d2.mode()
        'truncate'

    Args:
        mode: as for `patch`.
        literal: as for `patch`.
        allow_untested: as for `patch`.

    Raises:
        ValueError: as `patch`.
        TruncdetError: as `patch`.
    """
    wanted = recipe(mode, literal, f"{_ME}.patched")
    with _PATCH.scope(wanted, allow_untested=allow_untested):
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != OFF


def mode() -> str:
    """Returns the mode in force: 'fixed_point', 'truncate' or 'off'."""
    return _PATCH.mode.mode


def build_hook(cfg: Any) -> TruncdetHook | None:
    """Returns the hook that cfg.MODEL.TRUNCDET asks for, or None if it is not enabled.

    detectron2's `register_hooks` passes over None, so a script needs no condition. Register it
    after the hooks of the trainer: the evaluation at the end of a training then runs inside it.

    Example:
        >>> from detectron2.config import get_cfg
        >>> from truncdet.integrations import detectron2 as d2
        >>> cfg = get_cfg()
        >>> d2.add_truncdet_config(cfg)
        >>> d2.build_hook(cfg) is None  # trainer.register_hooks([d2.build_hook(cfg)])
        True

    Args:
        cfg: a CfgNode after `add_truncdet_config`; its SEED, if not negative, is the hook's.

    Returns:
        A `TruncdetHook`, or None.

    Raises:
        ValueError: an unknown key or value in the node, also if it is not enabled.
        TypeError: cfg is not a CfgNode.
    """
    from truncdet.integrations._detectron2_hook import build_hook as build

    return build(cfg)


def __getattr__(name: str) -> Any:
    if name == "TruncdetHook":
        return importlib.import_module("truncdet.integrations._detectron2_hook").TruncdetHook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _plan(wanted: Recipe) -> Plan:
    importlib.import_module("detectron2.layers")
    replacement, theirs = _replacement(), torchvision._replacement()
    original = theirs.__wrapped__
    # What was imported while torchvision was patched holds torchvision's replacement.
    sites = sites_of(original, replacement, "detectron2")
    sites += sites_of(theirs, replacement, "detectron2")
    if Site(_LAYER, "roi_align", replacement) not in sites:
        found = vars(sys.modules[_LAYER])["roi_align"]
        raise TruncdetError(
            f"{_ME}: {_LAYER}.roi_align must be torchvision's roi_align to be patched, "
            f"got {found!r}"
        )
    replacement.function = make_function(from_torchvision(original), wanted)
    _NOTICES.forget()
    others = _OTHERS.sites() if wanted.mode == "fixed_point" else ()
    return Plan((*sites, Site(_LAYER, "ROIAlign.__call__", _precise_call()), *others))


@functools.cache
def _replacement() -> Any:
    """The one function that takes the place of `roi_align`; it obeys the mode in force when it is
    called, so a reference taken while patched turns into the original after `unpatch`."""
    original = torchvision._replacement().__wrapped__

    @functools.wraps(original)
    def roi_align(
        input: Any,
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
        function = roi_align.function  # type: ignore[attr-defined]
        return function(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)

    def prepare_scriptable() -> Any:
        if is_patched():
            _NOTICES.say("torch.jit.script")
        return original

    # torch.jit asks a function for this before it compiles it.
    roi_align.__prepare_scriptable__ = prepare_scriptable  # type: ignore[attr-defined]
    return roi_align


@functools.cache
def _precise_call() -> Any:
    # Both found here: the compiler looks into the call, and past the cache of `_replacement`.
    base, replacement = vars(sys.modules[_LAYER])["ROIAlign"], _replacement()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # A forward of somebody else may use the boxes it casts for anything.
        if inherits(self, base, "forward") and would_round(args, kwargs):
            if torch.compiler.is_compiling() and is_patched() and not _has_hooks(self):
                return pooled(self, *args, **kwargs)
            args, kwargs = keep_rois(self, args, kwargs) or (args, kwargs)
        return super(base, self).__call__(*args, **kwargs)

    def pooled(self: Any, input: Any, rois: Any) -> Any:
        # What the layer's forward does but for the cast: the compiler cannot follow boxes that
        # only pretend to be cast, and would break the graph.
        assert rois.dim() == 2 and rois.size(1) == 5
        return replacement(
            input,
            rois,
            self.output_size,
            self.spatial_scale,
            self.sampling_ratio,
            self.aligned,
        )

    return __call__


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks or module._backward_hooks)


_PATCH: Patch[Recipe] = Patch(_ME, "detectron2", TESTED, _plan, off=OFF)
_OTHERS = Substitution(_ME, "detectron2.layers", TABLE, lambda: mode() == "fixed_point")
