"""Custom autograd functions under `audit`: their kernels may be outside the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from truncdet._trace_entries import entries, nodes
from truncdet._trace_values import tensors

if TYPE_CHECKING:
    from truncdet._audit import Ledger


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
        result = original(cls, *args, **kwargs)
        if ledger.busy or torch.compiler.is_compiling():
            return result
        _repeat_forward(ledger, original, cls, args, kwargs, result)
        return result

    def prepare(roots: tuple[Tensor, ...]) -> list[Any]:
        custom = (node for node in nodes(roots) if isinstance(node, BackwardCFunction))
        return [node.register_hook(_repeat_backward(ledger, node)) for node in custom]

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
        ledger.skip(cls.__name__, "it gives back, or writes to, what it took")
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


def _repeat_backward(ledger: Ledger, node: Any) -> Any:
    def hook(given: tuple[Tensor | None, ...], taken: tuple[Tensor | None, ...]) -> None:
        if ledger.busy:
            return

        def again() -> Any:
            found = node.apply(*taken)
            found = found if isinstance(found, tuple) else (found,)
            # What needs no gradient was dropped from what the node gave.
            return [new if old is not None else None for old, new in zip(given, found, strict=True)]

        with ledger.repeating(), torch.no_grad():
            ledger.check(node.name(), "backward", "", list(given), again)

    return hook
