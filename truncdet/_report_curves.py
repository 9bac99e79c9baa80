"""The losses of the runs as curves, as a part of a page."""

from __future__ import annotations

from html import escape

from truncdet._trace_file import Trace

_WIDTH, _HEIGHT, _EDGE = 900, 260, 46
# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_PREFERRED = "loss"


def curves(traces: list[Trace]) -> str:
    """One line a run, of the loss that backward started from, or the first scalar there is."""
    name = _name(traces)
    if name is None:
        return ""
    runs = [
        [(s.number, v) for s in t.steps if (v := s.losses.get(name)) is not None] for t in traces
    ]
    points = [point for run in runs for point in run]
    if not points:
        return ""
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] for p in points), max(p[1] for p in points)

    def at(step: int, value: float) -> str:
        x = _EDGE + (_WIDTH - 2 * _EDGE) * (step - first) / max(last - first, 1)
        y = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (value - low) / ((high - low) or 1.0)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        # Later runs thinner, so that equal ones show through.
        width = max(1.0, 4.0 - 1.5 * number)
        where = " ".join(at(*point) for point in run)
        lines.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{where}">'
            f"<title>run {number}</title></polyline>"
            f'<text x="{_WIDTH - _EDGE + 4}" y="{_EDGE + 18 * number}" fill="{colour}">run {number}'
            "</text>"
        )
    labels = (
        f'<text x="0" y="{_HEIGHT - _EDGE}">{low:.4g}</text>'
        f'<text x="0" y="{_EDGE}">{high:.4g}</text>'
        f'<text x="{_EDGE}" y="{_HEIGHT - 10}">step {first}</text>'
        f'<text x="{_WIDTH - 2 * _EDGE}" y="{_HEIGHT - 10}">step {last}</text>'
    )
    return (
        f'<h2>{escape(name)}</h2><svg viewBox="0 0 {_WIDTH + 20} {_HEIGHT}" role="img" '
        f'aria-label="{escape(name)} by step" font-size="13" fill="currentColor">'
        f"{''.join(lines)}{labels}</svg>"
    )


def _name(traces: list[Trace]) -> str | None:
    names = [name for trace in traces for step in trace.steps for name in step.losses]
    return _PREFERRED if _PREFERRED in names else next(iter(names), None)
