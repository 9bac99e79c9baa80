"""Results of the stories as markdown tables."""

from __future__ import annotations

from typing import Any

from _markdown import table

Result = dict[str, Any]


def story(result: Result) -> str:
    """Distinct weights and scores of runs from equal seeds."""
    rows = []
    for mode, found in result["modes"].items():
        low, high = found["lowest_score"], found["highest_score"]
        first = found["first_difference"]
        rows.append(
            [
                mode,
                str(found["runs"]),
                str(found["distinct_weights"]),
                str(found["distinct_scores"]),
                f"{low:.6f}" if low == high else f"{low:.6f} to {high:.6f}",
                "never" if first is None else str(first),
                f"{found['ms_per_step']:.2f}",
            ]
        )
    header = (
        "runs from one seed",
        "runs",
        "different weights",
        f"different values of {_of(result)}",
    )
    return table((*header, result["score"], "losses differ from step", "ms a step"), rows)


def _of(result: Result) -> str:
    return f"the {result['score']}"


def batch_norm(result: Result) -> str:
    """Trainings by dimensions and normalisation, and the operators one by one."""
    rows = [
        [
            f"{row['dimensions']}-D",
            "batch" if row["batch_norm"] else "none",
            row["setting"],
            f"{row['distinct_weights']} of {row['runs']}",
            "never" if row["first_difference"] is None else str(row["first_difference"]),
        ]
        for row in result["trainings"]
    ]
    header = ("network", "normalisation", "cuDNN's choice", "different weights")
    trainings = table((*header, "losses differ from step"), rows)
    operators = [
        [
            row["operator"],
            row["setting"],
            f"{row['moving']} of {row['cases']}",
            ", ".join(row["which"]) or "-",
        ]
        for row in result["operators"]
    ]
    header = ("operator", "cuDNN's choice", "cases whose bits move", "which")
    return f"{trainings}\n\n{table(header, operators)}\n\n{result['verdict']}"
