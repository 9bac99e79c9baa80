"""`audit`: one run in which every operator is computed again, to see whose bits move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from truncdet._audit_functions import observed_functions
from truncdet._audit_ledger import Audit as Audit
from truncdet._audit_ledger import Finding as Finding
from truncdet._audit_ledger import Ledger
from truncdet._trace_ops import UNSEEN
from truncdet._trace_values import readable, tensors

# What normalisations write without saying so in their schema.
_UNDECLARED = frozenset(("running_mean", "running_var"))


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

        before = _copies(args, kwargs, names, changed) if changed else (args, kwargs)
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
            fresh_args, fresh_kwargs = _copies(*before, names, changed)
            value = func(*fresh_args, **fresh_kwargs)
            return value, _written(fresh_args, fresh_kwargs, names, changed)

        expected: Any = result
        if changed:
            expected = result, _written(args, kwargs, names, changed)
        ledger.check(name, "backward" if in_backward else "forward", source, expected, again)
        if after is not None:
            _restore(after)
        return result


def _copies(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], changed: set[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with copies of those that are written to and of all that share their memory;
    one tensor given twice stays one."""
    given = [*zip(names, args, strict=False), *kwargs.items()]
    written = {_memory(t) for n, v in given if n in changed for _, t in tensors(v)}
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not readable(value) or _memory(value) not in written:
                return value
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(copy, value))
        return value

    return tuple(map(copy, args)), {name: copy(value) for name, value in kwargs.items()}


def _written(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], changed: set[str]
) -> list[Any]:
    return [v for n, v in (*zip(names, args, strict=False), *kwargs.items()) if n in changed]


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _random_state(args: Any, kwargs: Any) -> list[tuple[Any, Tensor]]:
    """Generators and devices an operator may draw from, and their states."""
    own = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    devices = {tensor.device for _, tensor in tensors((args, kwargs))}
    device = kwargs.get("device")
    devices |= {torch.device(device)} if device is not None else set()
    cuda = sorted((d for d in devices if d.type == "cuda"), key=str)
    states: list[tuple[Any, Tensor]] = [(generator, generator.get_state()) for generator in own]
    states.append((torch.device("cpu"), torch.get_rng_state()))
    return states + [(d, torch.cuda.get_rng_state(d)) for d in cuda]


def _restore(states: list[tuple[Any, Tensor]]) -> None:
    for owner, state in states:
        if isinstance(owner, torch.Generator):
            owner.set_state(state)
        elif owner.type == "cuda":
            torch.cuda.set_rng_state(state, owner)
        else:
            torch.set_rng_state(state)
