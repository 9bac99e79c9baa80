"""The hook that makes a whole mmdet model repeatable, from a config or from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from mmengine.hooks import Hook
from mmengine.model.wrappers import is_model_wrapper
from truncdet.integrations._convert import convert
from truncdet.integrations._mmdet_options import check_keys, check_recipe
from truncdet.integrations._mmdet_table import table

import truncdet
from truncdet import _strict
from truncdet._switch import Hold

_WHO = "TruncdetHook"
_KEYS = ("mode", "strict", "literal", "verbose")
_HASH_SEED = "PYTHONHASHSEED"


class TruncdetHook(Hook):  # type: ignore[misc]
    """Swaps the RoI layers of the runner's model, and sets what else a repeatable run needs.

    Before the run (training, validation or test): every RoI layer of the built model becomes
    reproducible in place, PyTorch's own operators and mmcv's functions are patched
    (truncdet.integrations.aten and .mmcv), cuDNN's and cuBLAS's switches are set, worker processes
    that mmengine spawns get a hash seed, and what now holds is logged as a table. Each checkpoint's
    `meta['truncdet']` records version, mode, literal and strict. After the run kernels, switches
    and environment are what they were; the layers stay swapped.

    Example:
        >>> from mmengine.registry import HOOKS
        >>> import truncdet.integrations.mmdet  # custom_imports in a config
        >>> HOOKS.build(dict(type="TruncdetHook", mode="fixed_point")).mode
        'fixed_point'

    Args:
        mode: 'fixed_point' (same bits always), 'truncate' (probable; PyTorch's own operators and
            mmcv's functions stay as they are), or 'off', with which the hook does nothing at all.
            It also holds for extractors that have a mode of their own.
        strict: True raises when a CUDA operator runs that is known to differ from run to run and
            is not covered; 'warn' warns once per operator.
        literal: with 'truncate', the published recipe as it is written: RoIs in half too.
        verbose: log the table.
        unknown: any other key is an error that lists these.

    Raises:
        ValueError: for an unknown key, mode or level, and for literal without 'truncate'.
        TypeError: for a value of a wrong type.
        TruncdetError: before the run, if torch's or mmcv's version is outside the tested range.
    """

    # First, so that hooks that copy the model before the run copy the swapped layers.
    priority = "VERY_HIGH"

    def __init__(
        self,
        mode: str = "fixed_point",
        strict: bool | str = False,
        literal: bool = False,
        verbose: bool = True,
        **unknown: object,
    ) -> None:
        check_keys(unknown, _KEYS, _WHO)
        self.mode, self.literal = check_recipe(mode, literal, _WHO)
        self.strict = _strict.check_level(strict, _WHO)
        if not isinstance(verbose, bool):
            raise TypeError(f"{_WHO}: verbose must be True or False, got {verbose!r}")
        self.verbose = verbose
        self._scope: Hold | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: everything but the open scope, which is this object's to end."""
        return {**vars(self), "_scope": None}

    def before_run(self, runner: Any) -> None:
        """Swaps the layers and opens the scope; after an exception the scope is closed again."""
        self.close()  # of a run that an exception ended
        if self.mode == "off":
            return
        model = runner.model
        while is_model_wrapper(model):
            model = model.module
        # RoI layers are swapped in this model alone. What has no layer to swap, PyTorch's own
        # operators and mmcv's functions, nms above all, is patched while the run lasts.
        patches = ("torch", "mmcv") if self.mode == "fixed_point" else ("torch",)
        self._scope = Hold(mode=self.mode, strict=self.strict, frameworks=patches)
        try:
            _seed_hashes(runner.seed, self._scope)
            conversion = convert(model, self.mode, literal=self.literal)
            if self.verbose:
                notes = "".join(f"\nnote: {note}" for note in _seed_notes(runner))
                text = table(model, conversion, truncdet.status())
                runner.logger.info(f"truncdet:\n{text}{notes}")
        except BaseException:
            self.close()
            raise

    def after_run(self, runner: Any) -> None:
        """Puts kernels, switches and environment back."""
        self.close()

    def close(self) -> None:
        """Does what `after_run` does, for a run that an exception ended; twice does no harm."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Records version, mode, literal and strict: plain values, which any loader reads."""
        if self.mode != "off":
            settings = {"version": truncdet.__version__, **self._settings()}
            if checkpoint.get("meta") is None:
                checkpoint["meta"] = {}
            if isinstance(checkpoint["meta"], MutableMapping):
                checkpoint["meta"]["truncdet"] = settings

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Warns where a run is resumed with other settings than it began with."""
        if self.mode == "off" or not getattr(runner, "_resume", False):
            return
        meta = checkpoint.get("meta")
        found = meta.get("truncdet") if isinstance(meta, Mapping) else None
        found = {"mode": "off"} if found is None else found  # it was written without us
        if not isinstance(found, Mapping):
            runner.logger.warning(
                f"truncdet: the checkpoint's meta['truncdet'] must be a dict, got {found!r}: "
                "whether this run continues the bits of that one is unknown"
            )
            return
        mine = self._settings()
        odd = {key: found[key] for key in mine if key in found and not _same(found[key], mine[key])}
        if odd:
            runner.logger.warning(
                f"truncdet: the checkpoint was written with {odd}, this run has "
                f"{ {key: mine[key] for key in odd} }: its bits are not those of an uninterrupted "
                "run"
            )

    def _settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "literal": self.literal, "strict": self.strict}


def _same(found: object, mine: object) -> bool:
    # By type first: comparing whatever a file holds, an array for example, may have no truth value.
    return type(found) is type(mine) and found == mine


def _seed_hashes(seed: int, scope: Hold) -> None:
    """Fixes the order of sets in spawned workers; in this process and forked ones it is too late.

    mmengine's `randomness` seeds everything else: Python, NumPy and torch, workers included.
    """
    found = os.environ.get(_HASH_SEED)
    if found not in (None, "", "random"):
        return
    os.environ[_HASH_SEED] = str(seed % 2**32)
    if found is None:
        scope.callback(os.environ.pop, _HASH_SEED, None)
    else:
        scope.callback(os.environ.__setitem__, _HASH_SEED, found)


def _seed_notes(runner: Any) -> list[str]:
    if getattr(runner, "_randomness_cfg", {}).get("seed") is not None:
        return []
    return [
        f"no seed is configured, and mmengine drew {runner.seed}: to repeat this run set "
        f"randomness=dict(seed={runner.seed}), or --cfg-options randomness.seed={runner.seed}"
    ]
