"""A step as a tree of modules, the culprit marked, as a part of a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from truncdet._trace_file import Step
from truncdet._trace_recorder import Place


@dataclass
class _Branch:
    """A module: its operators and its parts."""

    path: str = ""
    ops: dict[str, None] = field(default_factory=dict)
    parts: dict[str, _Branch] = field(default_factory=dict)


def tree(step: Step, place: Place) -> str:
    """The modules of the step with the operators of its phase; the path to the culprit is open."""
    root = _Branch()
    for key in step.keys:
        if key.phase in (place.key.phase, "forward"):
            branch = root
            for name in filter(None, key.module.split(".")):
                path = f"{branch.path}.{name}" if branch.path else name
                branch = branch.parts.setdefault(name, _Branch(path))
            if key.phase == place.key.phase:
                branch.ops[key.op] = None
    return f'<div class="tree">{_drawn(root, "model", place)}</div>'


def _drawn(branch: _Branch, name: str, place: Place) -> str:
    here = branch.path == place.key.module
    ops = ", ".join(
        f'<span class="culprit" id="culprit">{escape(op)}</span>'
        if here and op == place.key.op
        else escape(op)
        for op in branch.ops
    )
    label = f"{escape(name)} <span class='dim'>{ops}</span>" if ops else escape(name)
    if not branch.parts:
        return f"<div>{label}</div>"
    # The parts of a long list of modules stay folded unless the culprit is among them.
    open_ = " open" if here or _above(branch.path, place.key.module) else ""
    parts = "".join(f"<li>{_drawn(b, n, place)}</li>" for n, b in branch.parts.items())
    return f"<details{open_}><summary>{label}</summary><ul>{parts}</ul></details>"


def _above(path: str, other: str) -> bool:
    return not path or other == path or other.startswith(f"{path}.")
