"""The picture of the batch-norm story: how far runs part, by network and cuDNN's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _conv_cases import SETTINGS
from _picture import save_png
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = dict(zip(SETTINGS, ("#d55e00", "#cc79a7", "#0072b2"), strict=True))
_LINEAR_BELOW = 1e-9  # zero has no place on a logarithmic axis


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes the PNG: one panel a network, one line a setting, the farthest of all runs."""
    figure = Figure(figsize=(11, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for row in result["trainings"]:
        axes = panels[row["dimensions"] - 2][0 if row["batch_norm"] else 1]
        first, *others = row["losses"]
        farthest = [
            max(abs(x - y) for y in at_step)
            for x, *at_step in zip(first, *others, strict=True)
            if None not in (x, *at_step)
        ]
        axes.plot(farthest, color=_COLOURS[row["setting"]], linewidth=1.4, label=row["setting"])
        norm = "with batch norm" if row["batch_norm"] else "without batch norm"
        axes.set_title(f"{row['dimensions']}-D, {norm}", loc="left", fontsize=11)
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[1]:
        axes.set_xlabel("step")
    for axes in panels[:, 0]:
        axes.set_ylabel("largest |loss difference|")
    panels[0][0].legend(frameon=False, fontsize=9)
    save_png(path, figure)
