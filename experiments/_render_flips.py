"""The result of flip_rate as markdown tables."""

from __future__ import annotations

from typing import Any

from _flip_count import expected_flips
from _markdown import table

Result = dict[str, Any]


def flip_rate(result: Result) -> str:
    """Pairs that differ by scene and number of bits, measured and by the model."""
    rows = []
    for scene in result["scenes"]:
        for row in scene["rows"]:
            low, high = row["interval"]
            rows.append(
                [
                    scene["scene"],
                    str(row["bits"]),
                    f"{row['pairs_differing']} of {scene['pairs']}",
                    f"{low:.1e} to {high:.1e}",
                    f"{expected_flips(scene, row['bits']):.1e}",
                    f"{row['unproved_cells']:.1f}",
                ]
            )
    header = ("scene", "bits", "pairs that differ", "95 % interval", "model, cells a pair")
    measured = table((*header, "unproved cells a backward"), rows)
    return f"{measured}\n\n{_steps(result)}"


def _steps(result: Result) -> str:
    parts = []
    for bits, found in result["first_flip"].items():
        # The fastest rate gives the fewest steps.
        ends = " to ".join("no bound" if x is None else f"{x:,.0f}" for x in _ends(found))
        steps = "none seen" if found["steps"] is None else f"{found['steps']:,.0f}"
        parts.append(f"{bits} bits: {steps} ({ends})")
    return (
        "Steps to the first flip, one box-head and one mask-head backward a step, extrapolated "
        f"from 24 bits, 95 % interval in parentheses: {'; '.join(parts)}. "
        f"A schedule has {result['schedule_steps']:,} steps."
    )


def _ends(found: dict[str, Any]) -> tuple[float | None, float | None]:
    return found["low"], found["high"]


def literal_cast(result: Result) -> str:
    """Gradient underflow, overflow of features and moved boxes."""
    kept = [
        [f"{r['scale']:.0e}", f"{100 * r['literal']:.1f} %", f"{100 * r['truncate']:.1f} %"]
        for r in result["underflow"]
    ]
    finite = [
        [f"{r['largest']:.0e}", f"{100 * r['literal']:.1f} %", f"{100 * r['truncate']:.1f} %"]
        for r in result["overflow"]
    ]
    moved = [
        [str(r["image"]), f"{r['largest_shift']:.2f}", f"{r['smallest_iou']:.3f}"]
        for r in result["moved_boxes"]
    ]
    return "\n\n".join(
        (
            table(("gradient scale", "non-zero kept, literal cast", "truncate"), kept),
            table(("largest feature", "finite, literal cast", "truncate"), finite),
            table(("image, px", "largest shift of a box, px", "smallest IoU"), moved),
        )
    )
