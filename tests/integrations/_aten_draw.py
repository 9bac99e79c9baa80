"""Random arguments for aten under the patch, and what becomes of a call that may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from truncdet.integrations import aten


class Draw:
    """Random arguments, wrong ones among them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def shape(self, *near: int) -> list[int]:
        """`near`, or something close to it."""
        shape = list(near)
        for _ in range(self.one_of(0, 0, 1)):
            change = self.number(0, 2)
            if change == 0 and shape:
                shape[self.number(0, len(shape) - 1)] = self.number(0, 4)
            elif change == 1:
                shape.append(self.number(0, 2))
            elif shape:
                shape.pop()
        return shape

    def tensor(self, shape: list[int], *dtypes: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=self.generator).to(self.one_of(*dtypes))
        return x.t() if x.dim() == 2 and self.number(0, 4) == 0 else x

    def index(self, shape: list[int], size: int) -> Tensor:
        high = max(size + self.one_of(*[0] * 9, 1), 1)
        x = torch.randint(0, high, shape, generator=self.generator)
        return x.to(self.one_of(*[torch.int64] * 6, torch.int32, torch.int16, torch.float32))


def outcome(call: Callable[[], Tensor]) -> Tensor | Exception:
    """What a call returns or raises."""
    try:
        return call()
    except Exception as error:
        return error


def assert_same_kind(call: Callable[[], Tensor], what: object) -> bool:
    """Checks that the patched call raises where the plain one does, and agrees where not."""
    plain = outcome(call)
    with aten.patched():
        found = outcome(call)
    if isinstance(plain, Exception):
        assert isinstance(found, (type(plain), ValueError, TypeError)), (what, plain, found)
        return False
    assert isinstance(found, Tensor), (what, plain, found)
    assert (found.stride(), found.dtype) == (plain.stride(), plain.dtype), what
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2, equal_nan=True, msg=str(what))
    return True


def assert_same_error(call: Callable[[], Tensor]) -> None:
    """Checks that a wrong call raises the very error that it raises without the patch."""
    plain = outcome(call)
    with aten.patched():
        found = outcome(call)
    assert isinstance(plain, Exception) and (type(found), str(found)) == (type(plain), str(plain))
