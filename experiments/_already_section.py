"""Operators of PyTorch that may repeat as they are: do they, and what do they take?

Calls that the switch `truncdet.enable()` replaces although PyTorch's own kernels use no float
atomics for them, or only for part of the sizes. truncdet's bits are the same on every device and in
every order, which is more than repeating.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import _measure as measure
import torch
from _checks import Check, holds
from torch import Tensor
from torch.nn import functional
from truncdet.integrations import aten

_TINY = 64  # what the tiny sizes are divided by
_REPEATS = 20  # equal ones before it is said that an operator repeats

Call = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `operator` is the function of truncdet that has the bits of the patched call, if
    there is one; `make` gets the sizes and the device."""

    operator: str
    case: str
    sizes: tuple[int, ...]
    make: Callable[..., Call]
    patched: bool = True

    def tiny(self) -> Case:
        return dataclasses.replace(self, sizes=tuple(max(2, n // _TINY) for n in self.sizes))

    def call(self, device: torch.device) -> Call:
        torch.manual_seed(0)
        return self.make(*self.sizes, device=device)


def _gradient(out: Tensor, leaf: Tensor) -> Call:
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]


def _table(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(rows, width, device=device, requires_grad=True)


def _picked(rows: int, number: int, device: torch.device) -> Tensor:
    return torch.randint(rows, (number,), device=device)


def indexed(number: int, rows: int, width: int, *, device: torch.device) -> Call:
    """The backward of x[index]."""
    leaf = _table(rows, width, device)
    return _gradient(leaf[_picked(rows, number, device)], leaf)


def embedded(number: int, rows: int, width: int, *, device: torch.device) -> Call:
    """The backward of a look-up."""
    leaf = _table(rows, width, device)
    return _gradient(functional.embedding(_picked(rows, number, device), leaf), leaf)


def bagged(mode: str) -> Callable[..., Call]:
    """The backward of bags of 32 rows."""

    def make(bags: int, rows: int, width: int, *, device: torch.device) -> Call:
        leaf = _table(rows, width, device)
        index = _picked(rows, 32 * bags, device).reshape(bags, 32)
        return _gradient(functional.embedding_bag(index, leaf, mode=mode), leaf)

    return make


def classified(number: int, classes: int, *, device: torch.device) -> Call:
    """A loss of single labels, forward."""
    scores = torch.randn(number, classes, device=device).log_softmax(1)
    labels = _picked(classes, number, device)
    return lambda: functional.nll_loss(scores, labels)


def segmented(number: int, segments: int, width: int, *, device: torch.device) -> Call:
    """Sums of consecutive rows."""
    data = torch.randn(number, width, device=device)
    lengths = torch.bincount(_picked(segments, number, device), minlength=segments)
    return lambda: torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)


def counted(number: int, bins: int, *, device: torch.device) -> Call:
    """A histogram."""
    data = torch.rand(number, device=device)
    return lambda: torch.histc(data, bins, 0, 1)


CASES = (
    Case("index_put", "x[index], 2000000 x 64 into 100000", (2_000_000, 100_000, 64), indexed),
    Case("index_put", "x[index], 512 x 784 into 40960", (512, 40_960, 784), indexed),
    Case("embedding", "3072 x 256 into 50000", (3072, 50_000, 256), embedded),
    Case("embedding", "100000 x 256 into 50000", (100_000, 50_000, 256), embedded),
    Case("embedding_bag", "sum, 4096 x 32 x 256 into 50000", (4096, 50_000, 256), bagged("sum")),
    Case("embedding_bag", "mean, 4096 x 32 x 256 into 50000", (4096, 50_000, 256), bagged("mean")),
    Case("nll_loss", "8192 labels of 91", (8192, 91), classified, patched=False),
    Case("segment_reduce", "1000000 x 64 to 10000", (1_000_000, 10_000, 64), segmented),
    Case("histc", "16000000 in 100 bins", (16_000_000, 100), counted, patched=False),
)


def measure_already(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    call = case.call(device)
    row: dict[str, Any] = {"operator": case.operator, "case": case.case}
    for side, mode in (("native", "off"), ("truncdet", "fixed_point")):
        ours = side == "truncdet"
        row[f"{side}_ms"] = row[f"{side}_bits_equal"] = None
        if ours and not case.patched:
            continue
        with aten.patched(mode):
            row[f"{side}_ms"] = measure.median_ms(call, device, repeats)
            row[f"{side}_bits_equal"] = measure.repeats_equal(call, _REPEATS)
    return row


def check_already(row: dict[str, Any], with_limits: bool = False) -> list[Check]:
    """truncdet's bits repeat; whether PyTorch's do is what is looked for."""
    if row["truncdet_bits_equal"] is None:
        return []
    return [holds(f"{row['operator']}, {row['case']}: bits repeat", row["truncdet_bits_equal"])]
