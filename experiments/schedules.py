"""Times every schedule of the position-sensitive pools' backward against the native kernel.

    python experiments/schedules.py --out DIR

Needs a GPU: schedules are those of CUDA kernels. All must give the bits of the operator itself.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _measure as measure
import torch
from _environment import describe, write_result
from _roi_section import CASES, Calls, Pooling
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

# Channels of a block, bytes of its sums (0: the usual ones) and threads of a RoI.
Schedule = tuple[int, int, int]
USUAL: Schedule = (0, 0, 1)
SCHEDULES: tuple[Schedule, ...] = tuple(
    itertools.product((0,), (0, 24 << 10, 16 << 10), (1, 2, 4, 8, 16))
)


def pick_cases() -> list[Pooling]:
    """The cases of overhead.py whose operator has schedules that are not covered elsewhere."""
    return [case for case in CASES if case.operator.startswith("ps_")]


def run_scheduled(calls: Calls, schedule: Schedule) -> Tensor:
    case, pooling = calls.pooling.case, calls.pooling
    scheduled = getattr(torch.ops.truncdet, f"_{pooling.operator}_backward_scheduled")
    geometry = (*pooling.shape, case.bins, case.bins, case.spatial_scale, *pooling.options)
    result: Tensor = scheduled(calls.grad, calls.boxes, *geometry, False, *schedule)
    return result


def measure_case(pooling: Pooling, device: torch.device) -> dict[str, Any]:
    """One row: the native time, and time and equality of bits of every schedule."""
    calls = Calls.make(pooling, device)
    expected = measure.words(calls.backward("truncdet")())
    times = []
    for schedule in SCHEDULES:
        equal = torch.equal(measure.words(run_scheduled(calls, schedule)), expected)
        ms = measure.median_ms(partial(run_scheduled, calls, schedule), device)
        times.append({"schedule": list(schedule), "backward_ms": ms, "bits_equal": equal})
    native = measure.median_ms(calls.backward("native"), device)
    return {"name": pooling.name, "native_ms": native, "schedules": times}


def best(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest schedule of a row among those whose bits are right."""
    right = [time for time in row["schedules"] if time["bits_equal"]]
    if not right:
        raise ValueError(f"schedules: {row['name']} must have a schedule of equal bits, got none")
    fastest: dict[str, Any] = min(right, key=lambda time: time["backward_ms"])
    return fastest


def unequal(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What gave other bits."""
    return [
        f"{row['name']}: {time['schedule']}"
        for row in rows
        for time in row["schedules"]
        if not time["bits_equal"]
    ]


def tabulate(rows: Sequence[dict[str, Any]]) -> Table:
    """Ratios to the native kernel: of the usual schedule, and of the best."""
    table = Table("case", "native ms", "usual", "best", "channels, bytes, lanes")
    for row in rows:
        usual = next(time for time in row["schedules"] if time["schedule"] == list(USUAL))
        fastest, native = best(row), row["native_ms"]
        ratios = [f"{time['backward_ms'] / native:.3f}" for time in (usual, fastest)]
        table.add_row(row["name"], f"{native:.4f}", *ratios, str(fastest["schedule"]))
    return table


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("schedules: a GPU must be present, got none")
    device = torch.device("cuda")
    console = Console(stderr=True)
    measure.wake(device)
    rows = [measure_case(case, device) for case in track(pick_cases(), "timing", console=console)]
    result = {**describe("schedules", arguments, device), "rows": rows}
    if options.out is not None:
        print("written:", write_result(options.out, result).name)
    wrong = unequal(rows)
    for name in wrong:
        print("other bits:", name)
    if len(wrong) == 0:
        Console().print(tabulate(rows))
    return int(len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
