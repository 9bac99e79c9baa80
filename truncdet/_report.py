"""One self-contained page about a comparison: verdict, steps, the culprit, losses, what to do."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from truncdet._remedies import remedy
from truncdet._report_curves import curves
from truncdet._report_tree import tree
from truncdet._trace_file import Trace
from truncdet._version import __version__

if TYPE_CHECKING:
    from truncdet._audit_runs import Outcome

_STYLE = """
:root { color-scheme: light dark; --ok: #2a7d4f; --bad: #c2410c; --dim: #6b7280; --line: #d1d5db; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid var(--dim); padding: .6rem 1rem; font-size: 1.1rem; }
.verdict.equal { border-color: var(--ok); } .verdict.different { border-color: var(--bad); }
.strip { display: flex; flex-wrap: wrap; gap: 2px; }
.strip span { width: 10px; height: 18px; background: var(--ok); }
.strip .first { background: var(--bad); } .strip .after { background: var(--line); }
code, .tree { font-family: ui-monospace, monospace; font-size: .9rem; }
.tree ul { list-style: none; padding-left: 1.2rem; border-left: 1px solid var(--line); }
.tree .culprit { color: var(--bad); font-weight: bold; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
svg { width: 100%; height: auto; } .dim { color: var(--dim); }
"""


def page(outcome: Outcome) -> str:
    """The page as HTML; nothing in it is loaded from elsewhere.

    Args:
        outcome: of `truncdet audit` or `truncdet compare`.
    """
    verdict = outcome.verdict
    state = {True: "equal", False: "different", None: "unknown"}[verdict.equal]
    word = {True: "Equal", False: "Different", None: "Could not tell"}[verdict.equal]
    parts = [
        f'<h1>{word}</h1><p class="verdict {state}">{escape(verdict.reason)}</p>',
        _facts(outcome),
        _strip(outcome),
    ]
    place = verdict.place
    if place is not None and outcome.traces:
        step = next((s for s in outcome.traces[0].steps if s.number == place.step), None)
        if step is not None:
            parts.append(f"<h2>Step {place.step}</h2>{tree(step, place)}")
    parts.append(curves(outcome.traces))
    if place is not None:
        advice = remedy(place.key.op) or (
            "Nothing is known about this operator. <code>truncdet.audit(step)</code> repeats every "
            "operator of one step, and <code>--level op</code> names the line that called it."
        )
        text = advice if advice.startswith("Nothing") else escape(advice)
        parts.append(f'<h2>What to do about it</h2><p id="advice">{text}</p>')
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>truncdet: {word.lower()}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'{body}\n<p class="dim">truncdet {__version__}</p>\n</body>\n</html>\n'
    )


def _facts(outcome: Outcome) -> str:
    verdict, place = outcome.verdict, outcome.verdict.place
    rows = [("steps compared", str(verdict.steps)), ("runs", str(len(outcome.traces)))]
    if place is not None:
        key = place.key
        rows += [
            ("first difference", f"step {place.step}, {key.phase}"),
            ("module", key.module or "(the whole model)"),
            ("operator", key.op),
            ("tensor", f"{key.kind} {key.slot} {key.layout}".strip()),
        ]
        if key.source:
            rows.append(("called at", key.source))
        if verdict.equal_inputs:
            rows.append(("still equal", "its inputs " + ", ".join(verdict.equal_inputs)))
    if (found := verdict.difference) is not None:
        ulp = "" if found.max_ulp is None else f", up to {found.max_ulp} ulp"
        index = "" if not found.first_index else f", the first at {list(found.first_index)}"
        rows.append(("elements", f"{found.elements}{index}{ulp}"))
    cells = "".join(f"<tr><th>{a}</th><td><code>{escape(b)}</code></td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _strip(outcome: Outcome) -> str:
    """A mark for every step: equal, the first that differs, and those after it."""
    if not outcome.traces:
        return ""
    place = outcome.verdict.place
    marks = []
    for number in _steps(outcome.traces):
        kind, title = "", f"step {number}: equal"
        if place is not None and number >= place.step:
            kind = "first" if number == place.step else "after"
            title = f"step {number}: {'different' if kind == 'first' else 'after the first'}"
        marks.append(f'<span class="{kind}" title="{title}"></span>')
    return f'<h2>Steps</h2><div class="strip">{"".join(marks)}</div>'


def _steps(traces: list[Trace]) -> list[int]:
    return sorted({step.number for trace in traces for step in trace.steps})
