"""What `audit` counts while operators run again, and the report that it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from truncdet._remedies import remedy
from truncdet._trace_ops import Sources, results
from truncdet._trace_ulp import difference


@dataclass
class Finding:
    """An operator that ran again, summed over its calls from one place.

    Attributes:
        op: name of the operator, or of the autograd function.
        phase: 'forward' or 'backward'.
        source: line of the user's code, where known.
        calls: how often it ran.
        moved: in how many of these some repetition gave other bits.
        elements: most elements that differed in one repetition.
        max_ulp: largest distance in units in the last place, None where there is none.
    """

    op: str
    phase: str
    source: str
    calls: int = 0
    moved: int = 0
    elements: int = 0
    max_ulp: int | None = None


@dataclass(frozen=True)
class Audit:
    """What `audit` found.

    Attributes:
        findings: operators whose bits moved, those with most moved calls first.
        operators: how many operators were repeated, by name.
        calls: how many calls were.
        skipped: operators that were not repeated, and why.
    """

    findings: tuple[Finding, ...]
    operators: int
    calls: int
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing moved."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        return asdict(self) | {"schema": 1, "equal": self.equal}

    def __str__(self) -> str:
        if self.equal:
            return f"{self.calls} calls of {self.operators} operators repeated: no bit moved"
        lines = [f"{self.calls} calls of {self.operators} operators repeated; bits moved in:"]
        for found in self.findings:
            ulp = "" if found.max_ulp is None else f", up to {found.max_ulp} ulp"
            where = f" at {found.source}" if found.source else ""
            lines.append(
                f"  {found.op} ({found.phase}){where}: {found.moved} of {found.calls} calls, "
                f"up to {found.elements} elements{ulp}"
            )
            if (advice := remedy(found.op)) is not None:
                lines.append(f"    {advice}")
        return "\n".join(lines)


class Ledger:
    """Counts, by operator and place; and what runs while operators are repeated is not itself."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.busy = False
        self.sources = Sources()
        self._found: dict[tuple[str, str, str], Finding] = {}
        self._skipped: dict[str, str] = {}

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While an operator runs again."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def skip(self, op: str, why: str) -> None:
        self._skipped.setdefault(op, why)

    def check(self, op: str, phase: str, source: str, first: Any, again: Callable[[], Any]) -> None:
        """Runs `again` the remaining times and compares the tensors in what it gives.

        An operator that cannot run again, because it let go of what it needs, is skipped.
        """
        expected = [tensor for _, tensor in results(op, first)]
        try:
            # All before any comparison: what fails half-way has not been counted.
            others = [[t for _, t in results(op, again())] for _ in range(self.repeats - 1)]
        except Exception as error:
            self.skip(op, f"it ran once and not again: {type(error).__name__}: {error}")
            return
        entry = self._found.setdefault((op, phase, source), Finding(op, phase, source))
        entry.calls += 1
        moved = False
        for repetition in others:
            for one, other in zip(expected, repetition, strict=True):
                found = difference(one, other)
                if found.elements:
                    moved = True
                    entry.elements = max(entry.elements, found.elements)
                    if found.max_ulp is not None:
                        entry.max_ulp = max(entry.max_ulp or 0, found.max_ulp)
        entry.moved += moved

    def report(self) -> Audit:
        found = sorted(self._found.values(), key=lambda entry: -entry.moved)
        return Audit(
            tuple(entry for entry in found if entry.moved),
            len({entry.op for entry in found}),
            sum(entry.calls for entry in found),
            dict(self._skipped),
        )
