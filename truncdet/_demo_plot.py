"""The picture of the demo: |loss A - loss B| per step, one line per mode."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from truncdet._atomic import write_bytes
from truncdet._demo_record import RunRecord
from truncdet._demo_report import PROGRAM

# Vermilion, blue and green of Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"off": "#d55e00", "fixed_point": "#0072b2", "truncate": "#009e73"}
LABELS = {"off": "off (plain RoIAlign)"}


def gaps(a: RunRecord, b: RunRecord) -> list[float]:
    """|loss A - loss B| of the steps both runs have."""
    steps = min(a.steps, b.steps)
    return [abs(x - y) for x, y in zip(a.losses[:steps], b.losses[:steps], strict=True)]


def save_picture(path: Path, runs: list[RunRecord], subtitle: str) -> bool:
    """Writes the PNG and returns True, or returns False if no mode has two runs to compare."""
    pairs = {run.mode: [r for r in runs if r.mode == run.mode] for run in runs}
    lines = {mode: gaps(*pair) for mode, pair in pairs.items() if len(pair) == 2}
    lines = {mode: values for mode, values in lines.items() if values}
    if not lines:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    # Without pyplot: no global state, no window, no display needed.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_gaps(axes, lines)
    axes.set_title("How far two equal training runs part", loc="left", fontsize=12, pad=22)
    axes.annotate(
        subtitle, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=8, color="#555555"
    )
    # Above the plot, where no line can run behind it.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1.01), ncols=1, frameon=False, fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": PROGRAM})
    write_bytes(path, content.getvalue())
    return True


def draw_gaps(axes: Axes, lines: Mapping[str, Sequence[float]]) -> None:
    """Draws |loss A - loss B| by step, one line for each mode, with zero on the same axis."""
    low, high = _decades([value for values in lines.values() for value in values])
    for mode, values in lines.items():
        label = LABELS.get(mode, mode)
        if not any(values):
            label += ": zero at every step"
        axes.plot(values, color=COLOURS[mode], linewidth=1.6, label=label, clip_on=False, zorder=3)
    # Linear below the smallest decade: the only way to have zero on a logarithmic axis.
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.6)
    axes.set_ylim(0.0, 10.0**high)
    powers = range(low, high + 1)
    axes.yaxis.set_major_locator(FixedLocator([0.0, *(10.0**power for power in powers)]))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, max(max(len(values) for values in lines.values()) - 1, 1))
    axes.set_xlabel("step")
    axes.set_ylabel("|loss A - loss B|")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _decades(values: list[float]) -> tuple[int, int]:
    """Exponents of the powers of ten around all values that are not zero."""
    found = [math.log10(value) for value in values if value > 0]
    if not found:
        return -8, 0
    low = math.floor(min(found))
    return low, max(math.ceil(max(found)), low + 1)


def _tick(value: float, position: int) -> str:
    return "0" if value == 0 else f"$10^{{{round(math.log10(value))}}}$"
