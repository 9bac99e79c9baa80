"""Trainings from equal seeds, plain and with truncdet: how many different ones come out?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from _compare import first_difference
from torch import Tensor, nn

import truncdet

SEED = 0
MODES = ("plain", "truncdet")


@contextlib.contextmanager
def scope(mode: str) -> Iterator[None]:
    """Equal seeds in both modes; `truncdet.enable` besides in one. cuDNN may choose freely."""
    if mode == "plain":
        torch.manual_seed(SEED)
        yield
        return
    with truncdet.deterministic(seed=SEED):
        yield


class Progress:
    """Losses, weights and the score of one training, kept on the device until its end."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._losses: list[Tensor] = []

    def step(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().float())

    def finish(self, model: nn.Module, score: Tensor | float) -> dict[str, Any]:
        """The run as the result file has it; `score` is an accuracy or the like."""
        losses = torch.stack(self._losses).cpu()
        seconds = time.perf_counter() - self._start  # the copy has waited for the device
        return {
            "losses": [loss if loss - loss == 0 else None for loss in losses.tolist()],
            "loss_digests": [truncdet.digest(loss).hex for loss in losses],
            "weights_digest": truncdet.digest(model.state_dict()).hex,
            "score": float(score),
            "ms_per_step": 1000 * seconds / len(losses),
        }


def repeat(train: Callable[[], dict[str, Any]], mode: str, repeats: int) -> list[dict[str, Any]]:
    """So many runs of `train` from the same seed."""
    runs = []
    for number in range(repeats):
        with scope(mode):
            runs.append({"mode": mode, "repeat": number, **train()})
    return runs


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is different among runs of one mode."""
    first, *others = runs
    firsts = [first_difference(first["loss_digests"], run["loss_digests"]) for run in others]
    seen = [step for step in firsts if step is not None]
    scores = [run["score"] for run in runs]
    return {
        "runs": len(runs),
        "distinct_weights": len({run["weights_digest"] for run in runs}),
        "distinct_scores": len(set(scores)),
        "lowest_score": min(scores),
        "highest_score": max(scores),
        "first_difference": min(seen) if seen else None,
        "ms_per_step": min(run["ms_per_step"] for run in runs),
    }
