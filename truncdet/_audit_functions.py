"""Custom autograd functions under `audit`: their kernels may be outside the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from truncdet._audit_ledger import Ledger
from truncdet._trace_entries import entries, nodes
from truncdet._trace_values import tensors

_WRITES = "it gives back, or writes to, what it took"


@contextmanager
def observed_functions(ledger: Ledger) -> Iterator[None]:
    """While it lasts, every `Function.apply` runs its forward again, and every node of a custom
    function its backward; an `apply` that was taken from its class before gives the latter only."""
    function: Any = torch.autograd.Function
    own = function.__dict__.get("apply")
    # Of the class that it is called on: inherited from C++, or torch's own classmethod.
    bound = function.apply if own is None else own

    def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return bound.__get__(None, cls)(*args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if ledger.busy or torch.compiler.is_compiling():
            return original(cls, *args, **kwargs)
        before = _versions((args, kwargs))
        result = original(cls, *args, **kwargs)
        if before == _versions((args, kwargs)):
            _repeat_forward(ledger, original, cls, args, kwargs, result)
        else:
            ledger.skip(cls.__name__, _WRITES)
        return result

    def prepare(roots: tuple[Any, ...]) -> list[Any]:
        custom = (node for node in nodes(roots) if isinstance(node, BackwardCFunction))
        return [handle for node in custom for handle in _repeat_backward(ledger, node)]

    function.apply = classmethod(apply)
    try:
        with entries(prepare):
            yield
    finally:
        if own is None:
            del function.apply
        else:
            function.apply = own


def _repeat_forward(
    ledger: Ledger, original: Any, cls: Any, args: Any, kwargs: Any, result: Any
) -> None:
    taken = {tensor.data_ptr() for _, tensor in tensors((args, kwargs)) if tensor.numel()}
    if any(tensor.data_ptr() in taken for _, tensor in tensors(result)):
        ledger.skip(cls.__name__, _WRITES)
        return
    state = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def again() -> Any:
        return original(cls, *args, **kwargs)

    with ledger.repeating(), torch.no_grad():
        try:
            ledger.check(cls.__name__, "forward", ledger.sources.note(), result, again)
        finally:
            torch.set_rng_state(state)
            if gpu:
                torch.cuda.set_rng_state_all(gpu)


def _repeat_backward(ledger: Ledger, node: Any) -> list[Any]:
    """Hooks before and after a node: a backward may write to the gradients that it takes."""
    kept: list[tuple[Tensor | None, ...]] = []
    saved: list[list[int]] = []

    def before(taken: tuple[Tensor | None, ...]) -> None:
        if not ledger.busy:
            with ledger.repeating(), torch.no_grad():
                # In place of those of a run that an exception ended.
                kept[:], saved[:] = [_clones(taken)], [_versions(_saved(node))]

    def after(given: tuple[Tensor | None, ...], taken: tuple[Tensor | None, ...]) -> None:
        if ledger.busy or not kept:
            return
        inputs, versions = kept.pop(), saved.pop()
        if versions != _versions(_saved(node)):
            ledger.skip(node.name(), _WRITES)
            return
        needed, edges = node.needs_input_grad, node.next_functions
        expected = [g for g, (child, _) in zip(given, edges, strict=True) if child is not None]

        def again() -> Any:
            found = node.apply(*_clones(inputs))
            found = found if isinstance(found, tuple) else (found,)
            # One for each argument, tensor or not; `given` has those of tensors alone.
            found = [new for new, need in zip(found, needed, strict=False) if need]
            return [_as_given(old, new) for old, new in zip(expected, found, strict=True)]

        with ledger.repeating(), torch.no_grad():
            ledger.check(node.name(), "backward", "", expected, again)

    return [node.register_prehook(before), node.register_hook(after)]


def _as_given(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """What a function returned, as autograd hands it on: in the shape and dtype of its input."""
    if old is None or new is None:
        return None
    return new.sum_to_size(old.shape).to(old.dtype)


def _clones(values: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if value is None else value.clone() for value in values)


def _saved(node: Any) -> Any:
    try:
        return node.saved_tensors
    except RuntimeError:  # it let go of them, or somebody has written to one
        return None


def _versions(value: Any) -> list[int]:
    """How often each tensor in a value has been written to; none for tensors of inference mode."""
    return [t._version for _, t in tensors(value) if not t.is_inference()]
