"""Which images make up which batch: a function of the seed alone, the same in all frameworks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Entry = tuple[int, bool]  # the index of an image, and whether it is mirrored
T = TypeVar("T")

REMEMBERED = 1024  # prepared images kept in memory: all of a small set, both ways round


def order(images: int, batch: int, seed: int) -> Iterator[list[Entry]]:
    """Batches without end: every image once in a pass, shuffled, mirrored or not by a coin."""
    generator = torch.Generator().manual_seed(seed)

    def entries() -> Iterator[Entry]:
        while True:
            for index in torch.randperm(images, generator=generator).tolist():
                yield index, bool(torch.rand((), generator=generator) < 0.5)

    endless = entries()
    while True:
        yield list(itertools.islice(endless, batch))


class Remembered(Generic[T]):
    """A function of an entry that is computed once; the value must not be changed by its user."""

    def __init__(self, function: Callable[[int, bool], T], limit: int = REMEMBERED) -> None:
        self._function = function
        self._limit = limit
        self._values: dict[Entry, T] = {}

    def __call__(self, index: int, mirrored: bool) -> T:
        entry = (index, mirrored)
        if entry in self._values:
            return self._values[entry]
        value = self._function(index, mirrored)
        # A set that does not fit is read anew in every pass; what is here stays.
        if len(self._values) < self._limit:
            self._values[entry] = value
        return value
