"""`compare`: the first observation in which two recordings differ, and what that says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truncdet._trace_file import Key, Step, Trace, read
from truncdet._trace_recorder import Place
from truncdet._trace_ulp import Difference, difference

SCHEMA = 1


@dataclass(frozen=True)
class Verdict:
    """Whether two recordings are equal, and where they first part.

    Attributes:
        equal: True, False, or None where it could not be told, as after a crash.
        reason: one sentence.
        place: the first observation that differs; its key has phase, module, op, kind, slot,
            layout and source line.
        equal_inputs: what the same operator took, observed before and still equal: the fault is
            then in the operator, not in what fed it.
        difference: elements, first index and distance in ulp, where both recordings kept values.
        steps: how many steps were compared.
    """

    equal: bool | None
    reason: str
    place: Place | None = None
    equal_inputs: tuple[str, ...] = ()
    difference: Difference | None = None
    steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON's types, schema 1."""
        key = self.place.key if self.place else None
        found = self.difference
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "reason": self.reason,
            "step": self.place.step if self.place else None,
            "phase": key.phase if key else None,
            "module": key.module if key else None,
            "op": key.op if key else None,
            "kind": key.kind if key else None,
            "slot": key.slot if key else None,
            "layout": key.layout if key else None,
            "source": (key.source or None) if key else None,
            "occurrence": self.place.occurrence if self.place else None,
            "equal_inputs": list(self.equal_inputs),
            "elements": found.elements if found else None,
            "first_index": list(found.first_index) if found else None,
            "max_ulp": found.max_ulp if found else None,
            "steps_compared": self.steps,
        }

    def __str__(self) -> str:
        return self.reason


def compare(trace_a: Trace | str | Path, trace_b: Trace | str | Path) -> Verdict:
    """Compares two recordings of the same training and names their first difference.

    Example:
        >>> import torch, truncdet
        >>> def run(first):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(2, 1)
        ...     with truncdet.record(model) as trace:
        ...         model(torch.tensor([[first, 1.0]]))
        ...     return trace
        >>> truncdet.compare(run(1.0), run(1.0)).equal
        True
        >>> truncdet.compare(run(1.0), run(2.0)).place.key.phase
        'data'

    Args:
        trace_a: a trace that `record` gave, or the path of its file.
        trace_b: the same.

    Returns:
        The verdict. Observations are compared by key and occurrence within a step, and "first" is
        by the order of `trace_a`.

    Raises:
        ValueError: a file is no trace, or the two were recorded with other settings.
        TypeError: an argument is neither a trace nor a path.
    """
    a, b = _trace(trace_a, "trace_a"), _trace(trace_b, "trace_b")
    for setting in ("level", "every"):
        if a.head.get(setting) != b.head.get(setting):
            raise ValueError(
                f"compare: trace_b must be recorded with {setting}={a.head.get(setting)!r} as "
                f"trace_a, got {b.head.get(setting)!r}"
            )
    steps = 0
    for one, other in zip(a.steps, b.steps, strict=False):
        if one.number != other.number:
            break
        found = _first(one, other)
        if found is not None:
            return _explained(found, one, other, a, b, steps + 1)
        steps += 1
    return _without_difference(a, b, steps)


def _trace(value: object, name: str) -> Trace:
    if isinstance(value, Trace):
        return value
    if isinstance(value, (str, Path)):
        return read(value)
    raise TypeError(f"compare: {name} must be a Trace or a path, got {type(value).__name__}")


def _numbered(step: Step) -> Iterator[tuple[Key, int]]:
    seen: Counter[Key] = Counter()
    for key in step.keys:
        yield key, seen[key]
        seen[key] += 1


def _first(one: Step, other: Step) -> tuple[Place, str] | None:
    """The first observation that differs, and how: 'value', 'missing' or 'extra'."""
    if one.keys == other.keys and one.digests == other.digests:
        return None
    mine = dict(zip(_numbered(one), one.digests, strict=True))
    theirs = dict(zip(_numbered(other), other.digests, strict=True))
    apart = next((where for where, digest in mine.items() if theirs.get(where) != digest), None)
    # What only the other run has came first if it did so there.
    for where in theirs:
        if where == apart:
            break
        if where not in mine:
            return Place(one.number, *where), "extra"
    if apart is None:
        return None
    return Place(one.number, *apart), "value" if apart in theirs else "missing"


def _explained(
    found: tuple[Place, str], one: Step, other: Step, a: Trace, b: Trace, steps: int
) -> Verdict:
    place, how = found
    key = place.key
    name = _name(key)
    if how != "value":
        whose = "first" if how == "missing" else "second"
        reason = f"step {place.step}, {key.phase}: only the {whose} run has {name} {key.layout}"
        return Verdict(False, reason, place, steps=steps)
    inputs = _inputs(one, place) if key.kind == "out" else ()
    if key.kind == "in" and key.phase != "data":
        blame = f"what {name} takes ({key.slot}) differs already, changed by something unrecorded"
    elif key.phase == "data":
        blame = f"the {key.op} differs{f' ({key.slot})' if key.slot else ''}"
    elif inputs:
        blame = f"{name} gives other bits from equal inputs"
    else:
        blame = f"{name} differs"
    line = f", at {key.source}" if key.source else ""
    return Verdict(
        False,
        f"step {place.step}, {key.phase}: {blame}{line}",
        place,
        inputs,
        _difference(a, b, place),
        steps,
    )


def _inputs(step: Step, place: Place) -> tuple[str, ...]:
    """Slots of the 'in' observations of the same call: those just before the output."""
    number = list(_numbered(step)).index((place.key, place.occurrence))
    found: list[str] = []
    for key in reversed(step.keys[:number]):
        if key[:3] != place.key[:3] or key.kind == "state":
            if found or key.phase != place.key.phase:
                break
            continue
        if key.kind == "in":
            found.append(key.slot)
        elif found:
            break
    return tuple(reversed(found))


def _difference(a: Trace, b: Trace, place: Place) -> Difference | None:
    kept = [trace.kept for trace in (a, b)]
    if any(one is None or one["place"] != place for one in kept):
        return None
    return difference(kept[0]["values"], kept[1]["values"])  # type: ignore[index]


def _without_difference(a: Trace, b: Trace, steps: int) -> Verdict:
    whole = a.complete and b.complete
    if steps == 0:
        return Verdict(None, "could not tell: no step was recorded in both runs")
    if not whole or len(a.steps) != len(b.steps):
        short = "a" if len(a.steps) < len(b.steps) or not a.complete else "b"
        return Verdict(
            None,
            f"could not tell: trace_{short} ends after {steps} steps, equal until there",
            steps=steps,
        )
    return Verdict(True, f"equal in all {steps} steps", steps=steps)


def _name(key: Key) -> str:
    return f"{key.op} of {key.module}" if key.module else key.op
