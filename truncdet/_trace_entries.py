"""Where a backward starts, and the graph behind it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any  # torch.autograd.graph.Node; accumulators of leaves have no name of their own


# What to call with the roots of every backward, by whoever observes just now.
_observers: list[Callable[[tuple[Any, ...]], list[Any]]] = []
_originals: list[Any] = []
_lock = threading.Lock()


@contextmanager
def entries(prepare: Callable[[tuple[Any, ...]], list[Any]]) -> Iterator[None]:
    """While it lasts, torch.autograd's two entries call `prepare` with what they start from,
    tensors or edges, and remove the hooks that it returns afterwards.

    Observers may end in any order; the entries are what they were when the last has ended.
    """
    autograd: Any = torch.autograd
    with _lock:
        if not _observers:
            _originals[:] = autograd.backward, autograd.grad
            # Attributes that Tensor.backward looks up at every call.
            autograd.backward, autograd.grad = map(_entry, _originals)
        _observers.append(prepare)
    try:
        yield
    finally:
        with _lock:
            _observers.remove(prepare)
            if not _observers:
                autograd.backward, autograd.grad = _originals


def _entry(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiler takes gradients of stand-ins, which have no bits.
        if torch._guards.TracingContext.try_get() is not None:
            return original(*args, **kwargs)
        given: Any = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        # An edge is a tuple, too; other iterables could be read once only.
        listed = isinstance(given, (list, tuple)) and not isinstance(given, GradientEdge)
        roots = tuple(given) if listed else (given,)
        hooks = [hook for prepare in list(_observers) for hook in prepare(roots)]
        try:
            return original(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    return run


def root_node(root: Any) -> Node | None:
    """Where a backward from a tensor or an edge starts."""
    if isinstance(root, GradientEdge):
        return root.node
    return root.grad_fn if isinstance(root, Tensor) else None


def nodes(roots: Iterable[Any]) -> Iterator[Node]:
    """Every node behind tensors or edges, once."""
    seen: set[Node] = set()
    stack = [root_node(root) for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += (child for child, _ in node.next_functions)
