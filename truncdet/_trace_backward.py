"""The backward pass, node by node: what each gives on, and which module's forward made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from truncdet._trace_entries import Node, entries, root_node
from truncdet._trace_recorder import Recorder
from truncdet._trace_site import Site
from truncdet._trace_values import readable


class Owners:
    """Which module a node of the graph belongs to: the innermost whose forward made it.

    It is noted on the nodes, so that graphs live no longer than they would. `found` is called once
    with each node that runs operators, and the path of its module.
    """

    def __init__(self, found: Callable[[Node, str], None]) -> None:
        self._found = found
        self._mine, self._input = object(), object()  # names of our own among a node's notes
        self._cut: list[Node] = []  # where claims ended, at what made a module's input

    def border(self, tensor: Tensor) -> None:
        """What made a module's input is not that module's."""
        node: Node = tensor.grad_fn
        if node is not None and self._mine not in node.metadata:
            node.metadata[self._input] = True
            self._cut.append(node)

    def claim(self, path: str, output: Tensor) -> None:
        """Gives the nodes behind a module's output to it, up to its inputs and its parts."""
        node: Node = output.grad_fn
        if node is None or self._mine in node.metadata:
            return
        self._take(node, path)
        self._walk(node, path, self._input)

    def rest(self, roots: Iterable[Any]) -> None:
        """Gives what no module's forward made, as a loss beside it, to none."""
        cut, self._cut = self._cut, []
        for node in [*map(root_node, roots), *cut]:
            if node is not None and self._mine not in node.metadata:
                self._take(node, "")
                self._walk(node, "", None)

    def of(self, node: Node) -> str:
        path: str = node.metadata.get(self._mine, "")
        return path

    def forget(self) -> None:
        """Lets go of the nodes of a step."""
        self._cut.clear()

    def _walk(self, node: Node, path: str, end: object) -> None:
        """Takes what is behind a node, up to what is taken already, or noted as an `end`."""
        stack = [node]
        while stack:
            for child, _ in stack.pop().next_functions:
                if child is not None:
                    notes = child.metadata
                    if self._mine not in notes and end not in notes:
                        self._take(child, path)
                        stack.append(child)

    def _take(self, node: Node, path: str) -> None:
        node.metadata[self._mine] = path
        self._found(node, path)


@contextmanager
def observed(recorder: Recorder, owners: Owners) -> Iterator[None]:
    """While it lasts, nodes that no module made are found when a backward starts."""

    def prepare(roots: tuple[Any, ...]) -> list[Any]:
        if recorder.on:
            if len(roots) == 1 and isinstance(roots[0], Tensor):
                recorder.see_loss("loss", roots[0])
            owners.rest(roots)
        return []

    with entries(prepare):
        yield


class NodeHooks:
    """Observes what nodes of a backward take and give.

    The hooks stay with the graph. After the recording they do nothing.

    Args:
        recorder: told of the gradients.
        source: tells the source line behind a node, or ''.
    """

    def __init__(self, recorder: Recorder, source: Callable[[Node], str]) -> None:
        self._recorder, self._source = recorder, source
        self._hooks: dict[tuple[str, str, str], Callable[..., None]] = {}

    def __call__(self, node: Node, path: str) -> None:
        name = node.name()
        if name.endswith("AccumulateGrad"):  # gradients of leaves are observed as such
            return
        source = self._source(node)
        hook = self._hooks.get((path, name, source))
        if hook is None:
            one, other = (Site("backward", path, name, kind, source) for kind in ("in", "out"))
            hook = self._hooks[path, name, source] = _hook(self._recorder, one, other)
        node.register_hook(hook)


_SLOTS = tuple(map(str, range(4096)))  # more gradients than a node takes or gives


def _hook(recorder: Recorder, taken: Site, given: Site) -> Callable[..., None]:
    def see(gives: tuple[Tensor | None, ...], takes: tuple[Tensor | None, ...]) -> None:
        if recorder.on:
            found = [
                (site, slot, gradient)
                for site, gradients in ((taken, takes), (given, gives))
                for slot, gradient in zip(_SLOTS, gradients, strict=False)
                if gradient is not None and readable(gradient)
            ]
            recorder.see(found, known=True)

    return see
