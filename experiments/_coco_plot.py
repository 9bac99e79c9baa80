"""The picture of coco_map.py: how far two equal runs part, and the AP of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _picture import save_png
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from truncdet._demo_plot import COLOURS, draw_gaps

SPREAD = 0.5  # of the seeds of a mode along the horizontal axis


def save_picture(path: Path, result: Mapping[str, Any]) -> bool:
    """Writes the PNG and returns True, or returns False if no mode has two runs to compare."""
    lines = _gaps(result["runs"])
    if not lines:
        return False
    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_gaps(left, lines)
    seed = result["runs"][0]["seed"]
    left.set_title(f"Two runs of seed {seed}: how far their losses part", loc="left", fontsize=11)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)
    kind = result["iou_types"][-1]
    _dots(right, result["modes"], kind)
    right.set_title(f"AP of every run ({kind})", loc="left", fontsize=11)
    name = f"{result['framework']} {result['model']}, {result['data']['name']}, {result['device']}"
    figure.suptitle(name, x=0.01, ha="left", fontsize=9, color="#555555")
    save_png(path, figure, "truncdet experiments")
    return True


def _gaps(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """|loss A - loss B| by mode, of the first two runs of the first seed; gaps at NaN are zero."""
    lines = {}
    for mode in COLOURS:
        pair = [r for r in runs if r["mode"] == mode and r["seed"] == runs[0]["seed"]]
        if len(pair) > 1:
            losses = (run["losses"] for run in sorted(pair, key=lambda r: r["repeat"])[:2])
            pairs = zip(*losses, strict=True)
            lines[mode] = [0.0 if None in (a, b) else abs(a - b) for a, b in pairs]
    return lines


def _dots(axes: Axes, modes: Mapping[str, Mapping[str, Any]], kind: str) -> None:
    """A dot for every run, those of one seed above each other and joined; the mean with its
    interval beside them."""
    for place, (mode, found) in enumerate(modes.items()):
        seeds = list(found["seeds"].values())
        for index, of_seed in enumerate(seeds):
            x = place + SPREAD * ((index + 0.5) / len(seeds) - 0.5)
            values = [value for value in of_seed["ap"][kind] if value is not None]
            style: dict[str, Any] = {
                "color": COLOURS[mode],
                "linewidth": 1.0,
                "markersize": 5,
                "alpha": 0.8,
            }
            axes.plot([x] * len(values), values, marker="o", **style)
        mean = found["mean_ap"][kind]
        if mean and mean["low"] is not None:
            ends = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            axes.errorbar([place + 0.38], [mean["mean"]], ends, fmt="_", color="#333333", capsize=4)
    axes.set_xticks(range(len(modes)), list(modes))
    axes.set_xlim(-0.6, len(modes) - 0.4)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
