"""scatter_add and its relatives: atomics, the deterministic switch, and truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import _measure as measure
import torch
from _checks import Check, at_most, holds
from torch import Tensor

import truncdet


@dataclasses.dataclass(frozen=True)
class Scatter:
    """`rows` rows of `width` numbers are added into `cells` rows; vectors if the width is one."""

    operator: str
    indices: str
    rows: int
    width: int
    cells: int
    limit: float | None = None  # our time by the atomics'
    switch_limit: float | None = None  # our time by the deterministic switch's

    def tiny(self) -> Scatter:
        width, cells = min(self.width, 8), min(self.cells, 64)
        return dataclasses.replace(self, rows=256, width=width, cells=cells)


LIMIT = 1.3
INDEX_VECTORS = 4
ALLOCATOR_SLACK = 4 * (2 << 20)  # blocks that the allocator rounds up
_SHAPE = (1 << 20, 64, 1 << 14)
CASES = (
    *(
        Scatter(operator, indices, *_SHAPE)
        for operator in ("index_add", "scatter_add")
        for indices in ("uniform", "crowded")
    ),
    Scatter("scatter_add", "uniform", 50_000_000, 1, 100_000, LIMIT, 1 / 8),
    Scatter("index_add", "uniform", 2_000_000, 64, 100_000, LIMIT),
    Scatter("index_put", "uniform", 2_000_000, 64, 100_000, LIMIT),
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


def calls(case: Scatter, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """The operator of both libraries, and what adds by atomics: PyTorch's index_put sorts."""
    torch.manual_seed(0)
    index = make_index(case).to(device)
    shape = (case.width,) if case.width > 1 else ()
    source = torch.randn(case.rows, *shape, device=device)
    target = torch.zeros(case.cells, *shape, device=device)
    wide = index[:, None].expand(-1, case.width) if case.width > 1 else index

    def of(library: Any, operator: str) -> Callable[[], Tensor]:
        function = getattr(library, operator)
        if operator == "index_put":
            return lambda: function(target, (index,), source, accumulate=True)
        along = wide if operator == "scatter_add" else index
        return lambda: function(target, 0, along, source)

    atomic = "index_add" if case.operator == "index_put" else case.operator
    return {
        "native": of(torch, atomic),
        "deterministic": of(torch, case.operator),
        "truncdet": of(truncdet, case.operator),
    }


def measure_scatter(case: Scatter, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    of = calls(case, device)
    row: dict[str, Any] = dataclasses.asdict(case)
    row["native_ms"] = measure.median_ms(of["native"], device, repeats)
    row["native_bits_equal"] = measure.repeats_equal(of["native"])
    with deterministic_switch():
        try:
            row["deterministic_ms"] = measure.median_ms(of["deterministic"], device, repeats)
            row["deterministic_bits_equal"] = measure.repeats_equal(of["deterministic"], 2)
        except RuntimeError as error:  # the operator has no deterministic form
            row["deterministic_ms"] = row["deterministic_bits_equal"] = None
            row["deterministic_error"] = str(error).partition("\n")[0]
    row["truncdet_ms"] = measure.median_ms(of["truncdet"], device, repeats)
    row["truncdet_bits_equal"] = measure.repeats_equal(of["truncdet"])
    row["truncdet_peak_bytes"] = measure.peak_bytes(of["truncdet"], device)
    # index_put turns its indices into one vector of cells, with a few more on the way.
    row["indices_bytes"] = INDEX_VECTORS * 8 * case.rows if case.operator == "index_put" else 0
    row["ratio"] = row["truncdet_ms"] / row["native_ms"]
    return row


def check_scatter(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row; times where the case has a limit, and memory, in full-size rows."""
    name = (
        f"{row['operator']}, {row['rows']} x {row['width']} into {row['cells']}, {row['indices']}"
    )
    checks = [holds(f"{name}: bits repeat", row["truncdet_bits_equal"])]
    if not with_limits:
        return checks
    if row["limit"] is not None:
        checks.append(at_most(f"{name}: time by the atomics'", row["ratio"], row["limit"]))
    if row["switch_limit"] is not None and row["deterministic_ms"] is not None:
        ratio = row["truncdet_ms"] / row["deterministic_ms"]
        checks.append(at_most(f"{name}: time by the switch's", ratio, row["switch_limit"]))
    # The result and two words of eight bytes a cell, one of them for the sums.
    allowed = (4 + 16) * row["cells"] * row["width"] + ALLOCATOR_SLACK
    extra = row["indices_bytes"]
    checks.append(at_most(f"{name}: peak bytes", row["truncdet_peak_bytes"] - extra, allowed))
    return checks
