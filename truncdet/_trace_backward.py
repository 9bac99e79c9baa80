"""The backward pass, node by node: what each gives on, and which module's forward made it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from truncdet._trace_recorder import Recorder

Node = Any  # torch.autograd.graph.Node; accumulators of leaves have no name of their own


class Owners:
    """Which module a node of the graph belongs to: the innermost whose forward made it."""

    def __init__(self) -> None:
        self._of: dict[Node, str] = {}
        self._border: set[Node] = set()

    def border(self, tensor: Tensor) -> None:
        """What made a module's input is not that module's."""
        if tensor.grad_fn is not None:
            self._border.add(tensor.grad_fn)

    def claim(self, path: str, output: Tensor) -> None:
        """Gives the nodes behind a module's output to it, up to its inputs and its parts."""
        stack = [output.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in self._of:
                continue
            if node in self._border and node is not output.grad_fn:
                continue
            self._of[node] = path
            stack += (child for child, _ in node.next_functions)

    def of(self, node: Node) -> str:
        return self._of.get(node, "")

    def forget(self) -> None:
        """Lets go of the graph, which would otherwise stay in memory."""
        self._of.clear()
        self._border.clear()


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


@contextmanager
def observed(recorder: Recorder, owners: Owners, source: Callable[[Node], str]) -> Iterator[None]:
    """While it lasts, what each node of a backward takes and gives is observed.

    `source` tells the source line behind a node, or ''.
    """

    def prepare(roots: tuple[Tensor, ...]) -> list[Any]:
        if not recorder.on:
            return []
        if len(roots) == 1:
            recorder.see_loss("loss", roots[0])
        hooks = []
        for node in nodes(roots):
            name = node.name()
            if not name.endswith("AccumulateGrad"):  # gradients of leaves are observed as such
                watch = functools.partial(_see, recorder, owners.of(node), name, source(node))
                hooks.append(node.register_hook(watch))
        return hooks

    with entries(prepare):
        yield


def _see(
    recorder: Recorder,
    path: str,
    name: str,
    source: str,
    given: tuple[Tensor | None, ...],
    taken: tuple[Tensor | None, ...],
) -> None:
    for kind, gradients in (("in", taken), ("out", given)):
        for slot, gradient in enumerate(gradients):
            if gradient is not None and gradient.layout == torch.strided:
                recorder.see_tensor(
                    "backward", path, name, kind, str(slot), gradient, known=True, source=source
                )
