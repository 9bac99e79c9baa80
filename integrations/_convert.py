"""`convert`: the known layers of one model, in place; nothing outside the model changes."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from truncdet.integrations._alive import remember
from truncdet.integrations._conversion import Change, Left
from truncdet.integrations._conversion import Conversion as Conversion
from truncdet.integrations._layers import KINDS, Kind, kind_of, source_of
from truncdet.integrations._patch import Patch, Plan
from truncdet.integrations._precise import convertible
from truncdet.integrations._precision import keep_rois
from truncdet.integrations._roi import OFF, Recipe, recipe
from truncdet.integrations._swap import NOTICES, SubclassError, Swap, make_swap, swap_of

from truncdet._errors import TruncdetError

# Other layers whose CUDA kernels add floats with atomics, by framework; found by class name.
_HOLES = {
    "mmcv": "RiRoIAlignRotated PrRoIPool DeformRoIPool SimpleRoIAlign RoIAwarePool3d BorderAlign "
    "BezierAlign CARAFENaive QueryAndGroup",
}


def convert(
    model: nn.Module,
    mode: str = "fixed_point",
    *,
    literal: bool = False,
    allow_untested: bool = False,
) -> Conversion:
    """Makes the detection layers of one model reproducible, in place, whatever their framework.

    Covers torchvision's RoIAlign and MultiScaleRoIAlign, mmcv's RoIAlign (and so mmdet's
    extractors) and detectron2's ROIAlign (and so its poolers), in wrapped models too (DDP,
    torch.compile); with 'fixed_point' also the other pooling layers that truncdet has an operator
    for, deformable convolutions, mmcv's MultiScaleDeformableAttention and DynamicScatter.
    Checkpoints load both ways, copies and pickles stay converted, and RoIAlign's coordinates stay
    float32 under autocast. Nothing else in the process changes: use it for one model, and
    `truncdet.enable` or an integration's `patch` for a whole program. Functions that a model calls
    by name are not covered; the gradient of RoIAlign in detectors is in the layers.

    Example:
        >>> model = torch.nn.Sequential(torchvision.ops.RoIAlign(7, 0.25, 2))
        >>> [change.name for change in truncdet.convert(model)]
        ['0']
        >>> len(truncdet.convert(model, "off"))
        1

    Args:
        model: any module; a layer that occurs twice in it is converted once, at both places.
        mode: 'fixed_point' (same bits always), 'truncate' (probable, RoIAlign alone), or 'off',
            which makes every layer what it was. Another mode switches.
        literal: with 'truncate' only: features and rois through half to double, exactly the
            published recipe, which moves large boxes; it warns.
        allow_untested: convert layers of untested framework versions too; the environment variable
            TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Returns:
        A `Conversion`: what changed, which of these layers were skipped and why, and which other
        layers are known to vary from run to run and are not covered.

    Raises:
        TypeError: if model is not an nn.Module.
        ValueError: for 'snap' and unknown modes, and for literal without 'truncate'.
        TruncdetError: for framework versions outside the tested range; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    found = _Findings(recipe(mode, literal, "convert"))
    for name, module in model.named_modules():
        found.look(name, module)
    if mode != "off":
        for framework in sorted({kind.framework for _, kind, _ in found.swaps}):
            _check_version(framework, allow_untested)
    return found.apply(model)


class _Findings:
    """A walk over a model: everything is found, and every new class made, before any change."""

    def __init__(self, wanted: Recipe) -> None:
        self.wanted = wanted
        self.swaps: list[tuple[nn.Module, Kind, type]] = []
        self.changed: list[Change] = []
        self.skipped: list[Left] = []
        self.not_covered: list[Left] = []

    def look(self, name: str, module: nn.Module) -> None:
        kind = kind_of(module)
        if kind is not None:
            self._look_at_layer(name, module, kind)
        elif _is_hole(module):
            self.not_covered.append(Left(name, "not covered", _class_name(type(module))))
        elif _scripted_layer(module):
            self.skipped.append(Left(name, "it is TorchScript", str(module.original_name)))

    def _look_at_layer(self, name: str, layer: nn.Module, kind: Kind) -> None:
        swap = swap_of(layer)
        original = type(layer) if swap is None else swap.original
        reason = _why_not(layer, original, kind)
        if reason is not None:
            self.skipped.append(Left(name, reason, _class_name(original)))
            return
        was, wanted = OFF if swap is None else swap.recipe, kind.recipe(self.wanted)
        if wanted != self.wanted:
            why = f"'{self.wanted.mode}' covers RoIAlign alone"
            self.not_covered.append(Left(name, why, _class_name(original)))
        if was == wanted:
            return
        new = original
        if wanted != OFF:
            try:
                new = make_swap(original, kind.mixin, wanted, source_of(layer, kind)).converted
            except SubclassError as error:
                self.skipped.append(Left(name, str(error), _class_name(original)))
                return
        self.swaps.append((layer, kind, new))
        self.changed.append(Change(name, _label(was), _label(wanted), _class_name(original)))

    def apply(self, model: nn.Module) -> Conversion:
        # After an exception, such as that of a class which will not let go of its layers, the exit
        # of this block undoes what was done.
        with ExitStack() as undo:
            for layer, _, new in self.swaps:
                was = type(layer)
                layer.__class__ = new
                undo.callback(setattr, layer, "__class__", was)
            for module in model.modules():
                _save_hooks(module, undo)
                if self.wanted.mode == "off":
                    _forget_check(module)
            precise = tuple(
                name for name, module in model.named_modules() if _keep_precision(module)
            )
            undo.pop_all()
        for layer, _, _ in self.swaps:
            remember(layer)
        if self.swaps:
            NOTICES.forget()
        return Conversion(
            tuple(self.changed), tuple(self.skipped), tuple(self.not_covered), precise
        )


def _why_not(layer: nn.Module, original: type, kind: Kind) -> str | None:
    """Returns why a layer cannot be converted: what runs would not be what we replace."""
    if swap_of(layer) is None and isinstance(getattr(original, "_swap", None), Swap):
        return "its class was changed after it was converted"
    for method in dict.fromkeys(("forward", *kind.methods)):
        if method in vars(layer):
            return f"the object has a {method} of its own"
        if getattr(original, method) is not getattr(kind.found(), method):
            return f"its class has a {method} of its own"
    return None


def _is_hole(module: nn.Module) -> bool:
    return any(
        base.__name__ in _HOLES.get(base.__module__.split(".")[0], "").split()
        for base in type(module).__mro__
    )


def check_layers(module: nn.Module, args: object) -> None:
    """A forward pre-hook of modules that were promised to stay converted; 'off' removes it.

    Raises:
        TruncdetError: if none of the module's RoI layers is converted, or some are not.
    """
    layers = [(layer, kind_of(layer)) for layer in module.modules()]
    recipes = {swap.recipe for swap in (swap_of(layer) for layer, _ in layers) if swap is not None}
    plain = {
        type(layer).__name__
        for layer, kind in layers
        if kind and swap_of(layer) is None and _why_not(layer, type(layer), kind) is None
        if not recipes or any(kind.recipe(recipe) != OFF for recipe in recipes)
    }
    if plain or not recipes:
        found = ", ".join(sorted(plain)) or "none that is"
        raise TruncdetError(
            f"{type(module).__name__}: RoI layers must be those that were made deterministic when "
            f"it was constructed, got {found}: they were replaced since; build them before the "
            "constructor of the base class returns, or use truncdet.convert on the finished model"
        )


def _forget_check(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is check_layers]:
        del hooks[key]


def _save_hooks(module: nn.Module, undo: ExitStack) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
        undo.callback(_put_back, hooks, dict(hooks))


def _put_back(found: dict[Any, Any], before: dict[Any, Any]) -> None:
    found.clear()
    found.update(before)


def _scripted_layer(module: nn.Module) -> bool:
    names = {kind.name for kind in KINDS}
    return isinstance(module, torch.jit.ScriptModule) and module.original_name in names


def _keep_precision(module: nn.Module) -> bool:
    """Brings the hook of an mmdet extractor in line with its layers; returns whether it has one.

    Only where all layers are converted, since any other kernel needs boxes of the features' type,
    and where the forward is SingleRoIExtractor's: another one may need what it casts elsewhere.
    """
    wanted = convertible(module)
    # By value: a copied or unpickled extractor has the hook but nobody its handle.
    present = [key for key, hook in module._forward_pre_hooks.items() if hook is keep_rois]
    if wanted and not present:
        module.register_forward_pre_hook(keep_rois, with_kwargs=True)
    if not wanted:
        for key in present:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    return wanted


def _check_version(framework: str, allow_untested: bool) -> None:
    tested = importlib.import_module(f"truncdet.integrations.{framework}").TESTED
    Patch("truncdet.convert", framework, tested, lambda mode: Plan()).check_version(allow_untested)


def _label(recipe: Recipe) -> str:
    return f"{recipe.mode} (literal)" if recipe.literal else recipe.mode


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
