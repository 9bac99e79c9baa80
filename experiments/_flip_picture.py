"""The picture of flip_rate: how often two orders round apart, and what the literal cast keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _flip_count import expected_flips
from _picture import save_png
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes the PNG: left shares with intervals and the model, right the underflow."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for colour, scene in zip(COLOURS, result["scenes"], strict=False):
        rows = [row for row in scene["rows"] if row["pairs_differing"]]
        shares = [row["probability"] for row in rows]
        spans = [
            [row["probability"] - row["interval"][0] for row in rows],
            [row["interval"][1] - row["probability"] for row in rows],
        ]
        bits = [row["bits"] for row in rows]
        left.errorbar(bits, shares, spans, fmt="o", color=colour, capsize=3, label=scene["scene"])
        places = range(11, 25)
        left.plot(places, [expected_flips(scene, t) for t in places], color=colour, linewidth=1)
    if any(row["pairs_differing"] for scene in result["scenes"] for row in scene["rows"]):
        left.set_yscale("log")
    left.set_xlabel("significant bits of the returned gradient")
    left.set_ylabel("share of pairs that differ (lines: model)")
    left.set_title("Two orders of one double sum", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    scales = [row["scale"] for row in result["underflow"]]
    for colour, name, label in (
        (COLOURS[0], "literal", "literal cast to half"),
        (COLOURS[1], "truncate", "truncate, 11 bits"),
    ):
        kept = [100 * row[name] for row in result["underflow"]]
        right.plot(scales, kept, "o-", color=colour, label=label)
    right.set_xscale("log")
    right.invert_xaxis()
    right.set_xlabel("scale of the incoming gradient")
    right.set_ylabel("non-zero entries kept, %")
    right.set_title("Gradient underflow", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    save_png(path, figure)
