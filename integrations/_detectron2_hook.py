"""The hook for detectron2's trainers. Imported on demand: its base class is detectron2's."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from truncdet.integrations import detectron2 as patch_module
from truncdet.integrations._detectron2_config import check_literal, read
from truncdet.integrations._roi import checked

import truncdet
from truncdet import _seed, _strict
from truncdet._switch import Hold

# detectron2 sends its own loggers to the screen and to log.txt; this one is their child.
_logger = logging.getLogger("detectron2.truncdet")
_ME = "truncdet.integrations.detectron2"
_KEYS = ("mode", "strict", "literal", "seed", "verbose")
_PARTS = ("torch", "torchvision", "detectron2")


class TruncdetHook(HookBase):  # type: ignore[misc]
    """Makes one training run repeatable, from `before_train` to `after_train`, then undoes it all.

    It patches detectron2, the torchvision functions it calls and PyTorch's own operators
    (truncdet.integrations.aten), sets cuDNN's and cuBLAS's switches, seeds the generators if nobody
    did, and logs the status table. Whatever ends the training, an exception included, everything is
    put back. Checkpoints that include the trainer, as DefaultTrainer's do, record version, mode,
    literal and strict.

    Example:
        >>> from truncdet.integrations.detectron2 import TruncdetHook
        >>> hook = TruncdetHook(mode="fixed_point")
        >>> hook.state_dict()["mode"]
        'fixed_point'

    Args:
        mode: 'fixed_point', 'truncate', which leaves PyTorch's own operators alone, or 'off', with
            which the hook does nothing at all.
        strict: True raises when a CUDA operator runs that is known to differ from run to run and
            is not covered; 'warn' warns once per operator.
        literal: with 'truncate', the published recipe as it is written: RoIs in half too.
        seed: cfg.SEED. If the generators are not seeded with it (plus the rank, as
            `default_setup` does), they are at the start of the training. None seeds nothing.
        verbose: log the status table and the notes in the main process.
        unknown: any other argument is an error that lists these.

    Raises:
        ValueError: an unknown argument, mode or level, or literal without 'truncate'.
        TypeError: a value of a wrong type.
    """

    def __init__(
        self,
        mode: str = "fixed_point",
        *,
        strict: bool | str = False,
        literal: bool = False,
        seed: int | None = None,
        verbose: bool = True,
        **unknown: object,
    ) -> None:
        where = f"{_ME}.TruncdetHook"
        for key in unknown:
            raise ValueError(f"{where}: arguments must be among {', '.join(_KEYS)}, got {key!r}")
        self.mode = checked(mode, where)
        self.strict = _strict.check_level(strict, where)
        for name, value in (("literal", literal), ("verbose", verbose)):
            if not isinstance(value, bool):
                raise TypeError(f"{where}: {name} must be True or False, got {value!r}")
        self.literal, self.verbose = literal, verbose
        self.seed = None if seed is None else _seed.check_seed(seed, where)
        check_literal(literal, mode, where)
        self._scope: Hold | None = None

    def before_train(self) -> None:
        """Opens the scope; after an exception nothing of it is left."""
        self.after_train()  # of a run that nobody ended
        if self.mode == "off":
            return
        seed, notes = self._seeding()
        self._scope = Hold(seed=seed, mode=self.mode, strict=self.strict, frameworks=_PARTS)
        try:
            if self.literal:
                self._scope.enter(patch_module.patched(self.mode, literal=True))
            if self.verbose and comm.is_main_process():
                lines = [str(truncdet.status()), *(f"note: {note}" for note in notes)]
                _logger.info("%s", "\n".join(lines))
        except BaseException:
            self.after_train()
            raise
        if self.trainer is not None:
            self._end_whatever_happens(self.trainer)

    def after_train(self) -> None:
        """Undoes what `before_train` did; a second call does nothing."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint records: plain values, so that `weights_only` loads them."""
        if self.mode == "off":
            return {}
        return {"version": truncdet.__version__, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warns if the checkpoint comes from other settings: the run then has other bits."""
        mine = self._settings()
        odd = {key: state.get(key) for key in mine if state.get(key) != mine[key]}
        if odd:
            _logger.warning(
                "the checkpoint was written with %s, this run has %s: its bits are not those of "
                "an uninterrupted run",
                odd,
                {key: mine[key] for key in odd},
            )

    def _end_whatever_happens(self, trainer: Any) -> None:
        """Ends the scope after the trainer's `after_train`, in which detectron2 calls the hooks one
        after the other: if one raises, an evaluation for example, those behind it are left out."""
        end, before = trainer.after_train, vars(trainer).get("after_train")

        def after_train() -> None:
            if before is None:
                del trainer.after_train
            else:
                trainer.after_train = before
            try:
                end()
            finally:
                self.after_train()

        trainer.after_train = after_train

    def _settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "literal": self.literal, "strict": self.strict}

    def _seeding(self) -> tuple[int | None, list[str]]:
        """Returns the seed that is left to set, if any, and what is to be said about seeds."""
        if self.seed is None:
            return None, ["no seed was given: weights and order of the data are as seeded before"]
        wanted = self.seed + comm.get_rank()
        notes = []
        if os.environ.get("PYTHONHASHSEED") == str(wanted):
            # truncdet's own note about the variable is silent then.
            notes.append(
                "PYTHONHASHSEED counts only if it was set before Python started; default_setup "
                "sets it for child processes"
            )
        if torch.initial_seed() == wanted:
            return None, notes
        notes.append(
            f"the generators were not seeded with {wanted} and are from here on; weights and order "
            "of the data were drawn before: call default_setup before building the trainer"
        )
        return wanted, notes


def build_hook(cfg: Any) -> TruncdetHook | None:
    """Returns the hook that cfg.MODEL.TRUNCDET asks for; see truncdet.integrations.detectron2."""
    settings = read(cfg, "build_hook")
    if not settings.enabled:
        return None
    return TruncdetHook(
        settings.mode,
        strict=settings.strict,
        literal=settings.literal,
        seed=cfg.SEED if cfg.SEED >= 0 else None,
    )
