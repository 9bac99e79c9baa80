"""Time, memory and repeatability of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 5
REPEATS = 20
EQUAL_REPEATS = 5
WAKE_S = 0.5
BUDGET_S = 1.0  # of one measurement; a slow call is repeated less, one beyond it not at all

# About 10 ms: the host queues the calls meanwhile, so that launching them is not what is timed.
_HEAD_START_CYCLES = 20_000_000

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median duration of a call in milliseconds: between events on a GPU, by the clock on a CPU."""
    first = _seconds(call, device)
    again = _seconds(call, device)
    if first >= BUDGET_S:
        return 1000 * again
    repeats = max(3, min(repeats, int(BUDGET_S / max(again, 1e-9))))
    for _ in range(min(WARM_UP, repeats)):
        call()
    if device.type != "cuda":
        return 1000 * statistics.median(_seconds(call, device) for _ in range(repeats))
    pairs = []
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def wake(device: torch.device) -> None:
    """Keeps a GPU busy until its clocks are up, so that what is timed first is not timed slower."""
    if device.type == "cuda":
        matrix = torch.ones(4096, 4096, device=device)
        end = time.perf_counter() + WAKE_S
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
            torch.cuda.synchronize(device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes allocated during the call beyond what was allocated before it, result included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def repeats_equal(call: Callable[[], Tensor], repeats: int = EQUAL_REPEATS) -> bool:
    """Whether every repetition gives the bits of the first."""
    first = words(call())
    return all(torch.equal(words(call()), first) for _ in range(repeats - 1))


def words(value: Tensor) -> Tensor:
    """The tensor's bits as integers: as floats, -0.0 equals 0.0 and a NaN differs from itself."""
    return value.view(_WORDS[value.element_size()])


def errors(value: Tensor, exact: Tensor) -> dict[str, float]:
    """Error against `exact`, relative to its largest magnitude and to its Euclidean norm."""
    difference = value.to(exact.dtype) - exact
    return {
        "max": float(difference.abs().max() / exact.abs().max()),
        "l2": float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact)),
    }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
