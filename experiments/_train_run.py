"""One training run: its losses, digests, step times and peak memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from _mask_rcnn import SEED
from torch import Tensor, nn
from truncdet.integrations.torchvision import patched

import truncdet

DTYPES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODES = ("off", "fixed_point")
LEARNING_RATE = 1e-3
RISE = 50  # steps in which the learning rate rises to it
SETTLE = 10  # first steps, left out of the step times

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class StepClock:
    """Durations between marks: events on a GPU, which wait for nothing; a clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._gpu:
            torch.cuda.synchronize()
            return [float(a.elapsed_time(b)) for a, b in pairs]
        return [1000 * (b - a) for a, b in pairs]


def train(
    model: nn.Module, batch: Batch, precision: str, mode: str, repeat: int, steps: int
) -> dict[str, Any]:
    """Trains a copy of a torchvision model on `batch`: the run as the result file has it."""
    images, targets = batch
    run = train_copy(
        model,
        lambda copied: copied(images, targets),
        images[0].device,
        patched(mode) if mode != "off" else contextlib.nullcontext(),
        steps,
        precision,
    )
    return {"precision": precision, "mode": mode, "repeat": repeat, **run}


def train_copy(
    model: nn.Module,
    losses_of: Callable[[nn.Module], Mapping[str, Tensor]],
    device: torch.device,
    scope: contextlib.AbstractContextManager[None],
    steps: int,
    precision: str = "float32",
) -> dict[str, Any]:
    """Trains a copy of `model` inside `scope`, from the same seed in every call.

    `losses_of` is one forward pass of the model on its batch: scalars by name.
    """
    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(SEED)
    model = copy.deepcopy(model).to(device)
    before = truncdet.digest(dict(model.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
    clock, kept = StepClock(device), []
    clock.mark()
    with scope:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RISE)
            kept.append(one_step(model, losses_of, DTYPES[precision], optimizer, scaler))
            clock.mark()
    times = clock.milliseconds()
    losses = torch.stack(kept).cpu()
    totals = losses.sum(1).tolist()
    finite = bool(losses.isfinite().all())
    return {
        "finite": finite,
        "trained": truncdet.digest(dict(model.named_parameters())) != before,
        "losses": [loss if loss - loss == 0 else None for loss in totals],
        "loss_digests": [truncdet.digest(row).hex for row in losses],
        "weights_digest": truncdet.digest(model.state_dict()).hex,
        "ms_per_step": statistics.median(times[min(SETTLE, steps // 2) :]),
        "step_ms": [round(ms, 3) for ms in times],
        "peak_bytes": int(torch.cuda.max_memory_allocated(device)) if gpu else None,
    }


def one_step(
    model: nn.Module,
    losses_of: Callable[[nn.Module], Mapping[str, Tensor]],
    dtype: torch.dtype | None,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    longest: float | None = None,
) -> Tensor:
    """Returns the losses in the order of their names, still on the device.

    A gradient longer than `longest` is cut to that length.
    """
    kind = next(model.parameters()).device.type
    with torch.autocast(kind, dtype=dtype) if dtype else contextlib.nullcontext():
        parts = losses_of(model)
        total = torch.stack([parts[name].float() for name in sorted(parts)])
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(total.sum()).backward()
    if longest is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), longest)
    scaler.step(optimizer)
    scaler.update()
    return total.detach()
