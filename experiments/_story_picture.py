"""The picture of a story: how far equal-seed runs part, and the score that each ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _picture import save_png
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Vermilion and blue of Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"plain": "#d55e00", "truncdet": "#0072b2"}
_LINEAR_BELOW = 1e-9  # zero has no place on a logarithmic axis


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes the PNG."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for place, (mode, colour) in enumerate(COLOURS.items()):
        runs = [run for run in result["runs"] if run["mode"] == mode]
        for number, run in enumerate(runs[1:]):
            label = mode if number == 0 else None
            left.plot(_gaps(runs[0], run), color=colour, linewidth=0.8, label=label)
        right.plot([place] * len(runs), [run["score"] for run in runs], "o", color=colour)
    left.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    left.set_ylim(bottom=0)
    left.set_xlabel("step")
    left.set_ylabel("|loss - loss of the first run|")
    left.set_title("How far runs from equal seeds part", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    right.set_xticks(range(len(COLOURS)), list(COLOURS))
    right.set_xlim(-0.5, len(COLOURS) - 0.5)
    right.set_ylabel(result["score"])
    right.set_title("Where they end", loc="left", fontsize=11)
    for axes in (left, right):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    save_png(path, figure)


def _gaps(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    pairs = zip(one["losses"], other["losses"], strict=True)
    return [float("nan") if None in (a, b) else abs(a - b) for a, b in pairs]
