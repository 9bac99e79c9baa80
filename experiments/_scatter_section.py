"""scatter_add and index_add: atomics, the deterministic switch, and truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import _measure as measure
import torch
from _checks import Check, holds
from torch import Tensor

import truncdet


@dataclasses.dataclass(frozen=True)
class Scatter:
    """`rows` rows of `width` numbers are added into `cells` rows."""

    operator: str
    indices: str
    rows: int
    width: int
    cells: int

    def tiny(self) -> Scatter:
        return dataclasses.replace(self, rows=256, width=8, cells=min(self.cells, 64))


_SHAPE = (1 << 20, 64, 1 << 14)
CASES = tuple(
    Scatter(operator, indices, *_SHAPE)
    for operator in ("index_add", "scatter_add")
    for indices in ("uniform", "crowded")
)


def make_index(case: Scatter) -> Tensor:
    """uniform: every cell alike; crowded: half of the rows go to the first sixteen cells."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(case.cells, (case.rows,), generator=generator)
    if case.indices == "crowded":
        index[: case.rows // 2] %= 16
    return index[torch.randperm(case.rows, generator=generator)]


@contextmanager
def deterministic_switch() -> Iterator[None]:
    """PyTorch's own switch with all its defaults; the previous state comes back."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def measure_scatter(case: Scatter, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    torch.manual_seed(0)
    index = make_index(case).to(device)
    source = torch.randn(case.rows, case.width, device=device)
    target = torch.zeros(case.cells, case.width, device=device)
    if case.operator == "scatter_add":
        index = index[:, None].expand(-1, case.width)

    def of(library: Any) -> Callable[[], Tensor]:
        return lambda: getattr(library, case.operator)(target, 0, index, source)

    native, ours = of(torch), of(truncdet)
    row: dict[str, Any] = dataclasses.asdict(case)
    row["native_ms"] = measure.median_ms(native, device, repeats)
    row["native_bits_equal"] = measure.repeats_equal(native)
    with deterministic_switch():
        try:
            row["deterministic_ms"] = measure.median_ms(native, device, repeats)
            row["deterministic_bits_equal"] = measure.repeats_equal(native, 2)
        except RuntimeError as error:  # the operator has no deterministic form
            row["deterministic_ms"] = row["deterministic_bits_equal"] = None
            row["deterministic_error"] = str(error).partition("\n")[0]
    row["truncdet_ms"] = measure.median_ms(ours, device, repeats)
    row["truncdet_bits_equal"] = measure.repeats_equal(ours)
    row["ratio"] = row["truncdet_ms"] / row["native_ms"]
    return row


def check_scatter(row: dict[str, Any]) -> list[Check]:
    """There is no limit on the time: the table says what it is."""
    return [holds(f"{row['operator']}, {row['indices']}: bits repeat", row["truncdet_bits_equal"])]
