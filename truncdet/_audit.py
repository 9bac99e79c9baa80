"""`audit`: one run in which every operator is computed again, to see whose bits move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from truncdet._audit_functions import observed_functions
from truncdet._remedies import remedy
from truncdet._trace_ops import UNSEEN, Sources
from truncdet._trace_ulp import difference
from truncdet._trace_values import tensors

# What normalisations write without saying so in their schema.
_UNDECLARED = frozenset(("running_mean", "running_var"))


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


def audit(step_fn: Callable[[], object], repeats: int = 3) -> Audit:
    """Runs a step once and each of its operators several times, on the same inputs, as it happens.

    Forward and backward; no second training run is needed. Operators of the dispatcher are
    repeated, with the random state that the first run had, and so are custom autograd functions,
    whose kernels may be outside the dispatcher. What the step does to the model and the optimizer
    is done once. It waits for the device at every operator: for debugging, a step or a few.

    Example:
        >>> import torch, truncdet
        >>> model = torch.nn.Linear(4, 2)
        >>> print(truncdet.audit(lambda: model(torch.ones(3, 4)).sum().backward()).equal)
        True

    Args:
        step_fn: called once without arguments: forward, backward and, if wanted, the optimizer.
        repeats: how often each operator runs in all, at least 2.

    Returns:
        The report: `findings`, `equal`, `as_dict()`, and a text with remedies.

    Raises:
        TypeError: `step_fn` is not callable.
        ValueError: `repeats` is below 2.
    """
    if not callable(step_fn):
        raise TypeError(f"audit: step_fn must be callable, got {type(step_fn).__name__}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 2:
        raise ValueError(f"audit: repeats must be an int of at least 2, got {repeats!r}")
    ledger = Ledger(repeats)
    with ExitStack() as undo:
        undo.enter_context(observed_functions(ledger))
        undo.enter_context(_Repeater(ledger))
        step_fn()
    return ledger.report()


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
        """Runs `again` the remaining times and compares the tensors in what it gives."""
        entry = self._found.setdefault((op, phase, source), Finding(op, phase, source))
        entry.calls += 1
        expected = [tensor for _, tensor in tensors(first)]
        moved = False
        for _ in range(self.repeats - 1):
            for one, other in zip(expected, (t for _, t in tensors(again())), strict=True):
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


class _Repeater(TorchDispatchMode):
    """Runs every operator again; autograd's threads inherit it."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, ledger = func._schema.name, self._ledger
        if ledger.busy or name.rpartition("::")[2] in UNSEEN or func.is_view:
            return func(*args, **kwargs)
        if any(tensor.is_meta for _, tensor in tensors((args, kwargs))):
            return func(*args, **kwargs)
        with ledger.repeating():
            return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self._ledger
        arguments = func._schema.arguments
        names = [a.name for a in arguments]
        changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        changed |= _UNDECLARED.intersection(names)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        state = _random_state(args, kwargs) if seeded else None

        def copied() -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (
                tuple(_copy(v) if n in changed else v for n, v in zip(names, args, strict=False)),
                {n: _copy(v) if n in changed else v for n, v in kwargs.items()},
            )

        before = copied() if changed else (args, kwargs)
        result = func(*args, **kwargs)
        after = _random_state(args, kwargs) if seeded else None
        in_backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if in_backward else None
        source = ledger.sources.of_node(node) if in_backward else ledger.sources.note()

        def again() -> Any:
            if state is not None:
                _restore(state)
            if not changed:
                return func(*before[0], **before[1])
            fresh = (tuple(map(_copy, before[0])), {k: _copy(v) for k, v in before[1].items()})
            value = func(*fresh[0], **fresh[1])
            return value, [v for n, v in zip(names, fresh[0], strict=False) if n in changed]

        expected: Any = result
        if changed:
            expected = result, [v for n, v in zip(names, args, strict=False) if n in changed]
        ledger.check(name, "backward" if in_backward else "forward", source, expected, again)
        if after is not None:
            _restore(after)
        return result


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copy, value))
    return value


def _random_state(args: Any, kwargs: Any) -> list[tuple[torch.device, Tensor]]:
    devices = {tensor.device for _, tensor in tensors((args, kwargs))}
    device = kwargs.get("device")
    devices |= {torch.device(device)} if device is not None else set()
    states = [(torch.device("cpu"), torch.get_rng_state())]
    cuda = sorted((d for d in devices if d.type == "cuda"), key=str)
    return states + [(d, torch.cuda.get_rng_state(d)) for d in cuda]


def _restore(states: list[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
