"""The picture of the four ways: one group of bars an operator, by the native time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _picture import save_png
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Grey and three of Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"native": "#999999", "truncdet": "#0072b2", "trick": "#009e73", "switch": "#d55e00"}
LABELS = {
    "native": "native (does not repeat)",
    "truncdet": "truncdet",
    "trick": "trick (truncate, float64)",
    "switch": "official switch",
}


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the PNG."""
    figure = Figure(figsize=(9, 1.6 + 0.75 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / len(COLOURS)
    for number, (way, colour) in enumerate(COLOURS.items()):
        for place, row in enumerate(rows):
            where = place + number * height
            ms, native = row["ms"][way], row["ms"]["native"]
            if ms is None:
                axes.text(0.052, where, "none" if row["why"] else "-", va="center", fontsize=8)
                continue
            label = LABELS[way] if place == 0 else None
            axes.barh(where, ms / native, height, color=colour, label=label)
            axes.text(1.03 * ms / native, where, f"{ms:.3g} ms", va="center", fontsize=8)
    axes.set_yticks([place + 0.3 for place in range(len(rows))], [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.05)
    axes.set_xlabel("time by the native one's, forward and backward")
    axes.axvline(1, color="#555555", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8)
    save_png(path, figure)
