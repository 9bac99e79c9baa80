"""The result of record_cost as a markdown table."""

from __future__ import annotations

from typing import Any

from _markdown import table

MIB = 1 << 20


def record_cost(result: dict[str, Any]) -> str:
    """Cost at module level and the two verdicts."""
    more = result.get("more_bytes")
    row = [
        f"{result['plain']['ms_per_step']:.1f}",
        f"{result['recorded']['ms_per_step']:.1f}",
        f"{result['ratio']:.3f}",
        "-" if more is None else f"{more / MIB:.1f}",
        str(result["observations_per_step"]),
        result["plain_verdict"]["reason"],
        result["truncdet_verdict"]["reason"],
    ]
    header = ("step, plain, ms", "recorded, ms", "ratio", "more at the peak, MiB")
    verdicts = ("two plain runs", "two runs under truncdet")
    return table((*header, "observations a step", *verdicts), [row])
