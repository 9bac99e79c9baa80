"""Seeds: Python, NumPy and torch, and what was there before them.

DataLoader workers need nothing of ours: torch seeds `random`, `torch` and `numpy.random` in every
worker process from one number that the loader draws from its generator in the parent. What is left
to the user is that draw: it moves with every other use of the global generator, so a loader that
should shuffle alike whatever else changed gets its own, `DataLoader(..., generator=generator(0))`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch


def generator(seed: int) -> torch.Generator:
    """Returns a seeded CPU generator for a DataLoader, independent of the global one.

    Example:
        >>> import truncdet
        >>> truncdet.generator(0).initial_seed()
        0

    Args:
        seed: an integer in [0, 2^63).

    Returns:
        A generator; the loader's shuffling and its workers' seeds follow from it.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is outside the range.
    """
    return torch.Generator().manual_seed(check_seed(seed, "generator"))


def check_seed(seed: object, where: str) -> int:
    """Returns the seed if it is an integer that every generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{where}: seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{where}: seed must be in [0, 2^63), got {seed}")
    return seed


def seed_all(seed: int) -> None:
    """Seeds the global generators of Python, NumPy (if installed) and torch on CPU and CUDA."""
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # NumPy's legacy generator takes 32 bits
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)  # queued until CUDA is initialised


def saved_states() -> Callable[[], None]:
    """Returns a function that puts the present state of the same generators back."""
    restore_host = saved_host_states()
    cpu_seed = torch.initial_seed()
    cuda: Any = torch.cuda
    cuda_states = cuda.get_rng_state_all() if cuda.is_initialized() else None

    def restore() -> None:
        restore_host()
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        else:
            # CUDA had no state yet, only a seed waiting for it: that of torch.manual_seed.
            torch.cuda.manual_seed_all(cpu_seed)

    return restore


def saved_host_states() -> Callable[[], None]:
    """As `saved_states`, without CUDA's generators."""
    python_state = random.getstate()
    numpy = _numpy()
    numpy_state = None if numpy is None else numpy.random.get_state()
    cpu_state = torch.get_rng_state()

    def restore() -> None:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)

    return restore


def hash_seed_note() -> str | None:
    """Returns what to say when the hashes of strings change from process to process."""
    if (os.environ.get("PYTHONHASHSEED") or "random") != "random":
        return None
    return (
        "PYTHONHASHSEED is not set: the order of sets of strings differs between processes; "
        "it can only be set before Python starts"
    )


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
