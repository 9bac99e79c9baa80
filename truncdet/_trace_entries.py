"""Where a backward starts, and the graph behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node; accumulators of leaves have no name of their own


@contextmanager
def entries(prepare: Callable[[tuple[Tensor, ...]], list[Any]]) -> Iterator[None]:
    """While it lasts, torch.autograd's two entries call `prepare` with the tensors they start
    from first, and remove the hooks that it returns afterwards."""
    autograd: Any = torch.autograd
    before = autograd.backward, autograd.grad

    def entry(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            # A compiler takes gradients of stand-ins, which have no bits.
            if torch._guards.TracingContext.try_get() is not None:
                return original(tensors, *args, **kwargs)
            hooks = prepare(roots)
            try:
                return original(tensors, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        return run

    # Attributes that Tensor.backward looks up at every call.
    autograd.backward, autograd.grad = map(entry, before)
    try:
        yield
    finally:
        autograd.backward, autograd.grad = before


def nodes(roots: Iterable[Tensor]) -> Iterator[Node]:
    """Every node behind the tensors, once."""
    seen: set[Node] = set()
    stack = [root.grad_fn for root in roots if isinstance(root, Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += (child for child, _ in node.next_functions)
