"""One training run of the demo: everything in it follows from seed and mode."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import truncdet
from truncdet._demo_batches import Samples, batches
from truncdet._demo_eval import evaluate
from truncdet._demo_memory import peak_bytes, reset_peak
from truncdet._demo_model import build_model
from truncdet._demo_options import DemoError, DemoOptions
from truncdet._demo_record import RunRecord, is_usable

LEARNING_RATE = 2e-3
WARM_UP = 20
GRADIENT_NORM = 5.0


def shuffle_seed(options: DemoOptions, device: torch.device, repeat: int) -> int | None:
    """The seed of the RoI order in run B on a CPU; None where the order is left alone."""
    return options.seed + 1 if device.type == "cpu" and repeat == 1 else None


def train_and_evaluate(
    record: RunRecord,
    options: DemoOptions,
    training: Samples,
    held_out: Samples,
    device: torch.device,
    keep_going: Callable[[], bool],
    on_step: Callable[[RunRecord], None],
) -> None:
    """Fills `record` with one run; returns early, the record valid, once `keep_going()` is False.

    Modes differ in one thing only, the RoIAlign: seeds, data order, cudnn.deterministic and the
    cuBLAS workspace are set alike, in mode `off` too.
    """
    with _one_thread(), truncdet.deterministic(mode=record.mode, seed=options.seed):
        reset_peak(device)
        model = build_model(
            len(training.data.categories),
            options.image_size,
            shuffle_seed(options, device, record.repeat),
        ).to(device)
        _train(model, record, options, training, device, keep_going, on_step)
        record.peak_bytes = peak_bytes(device)
        if record.steps < options.steps:
            return
        figures = evaluate(model, held_out, device, keep_going)
        if figures is not None:
            record.ap, record.ap50 = figures
            record.complete = True


@contextmanager
def _one_thread() -> Iterator[None]:
    """One CPU thread: the steps are too small to share, and busy cores make sharing a loss.

    torch's own sums also depend on the number of threads; so runs can be compared across machines.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _train(
    model: nn.Module,
    record: RunRecord,
    options: DemoOptions,
    samples: Samples,
    device: torch.device,
    keep_going: Callable[[], bool],
    on_step: Callable[[RunRecord], None],
) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factors(options.steps))
    source = batches(samples, options.batch, options.seed)
    while record.steps < options.steps and keep_going():
        images, targets = next(source)
        start = time.perf_counter()
        images = [image.to(device) for image in images]
        targets = [{key: value.to(device) for key, value in t.items()} for t in targets]
        parts: dict[str, Tensor] = model(images, targets)
        total = torch.stack(list(parts.values())).sum()
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
        loss = total.item()
        if not is_usable(loss):
            raise DemoError(
                f"truncdet demo: the loss must stay finite, got {loss} in run {record.name}"
                f" at step {record.steps}"
            )
        # Outside the clock: the digests are the demo's, not the training's.
        record.loss_digests.append(truncdet.digest(total.detach()).hex)
        record.weights_digests.append(truncdet.digest(model.state_dict()).hex)
        record.step_ms.append(1e3 * elapsed)
        record.losses.append(loss)
        on_step(record)


def _factors(steps: int) -> Callable[[int], float]:
    """Linear warm-up, then half a cosine down to zero at the last step."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return factor
