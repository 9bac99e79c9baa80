"""Level 'op': every operator of the dispatcher, with the line of the user's code that called it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from truncdet._trace_backward import Owners
from truncdet._trace_recorder import Recorder
from truncdet._trace_site import Site
from truncdet._trace_values import tensors

_autograd: Any = torch.autograd
_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
# They only look at memory that others have written, or give memory that nobody has.
UNSEEN = frozenset(
    ("detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
     "resize_", "set_", "_local_scalar_dense", "is_pinned", "_pin_memory", "record_stream")
)  # fmt: skip
# They overwrite their first argument without looking at it.
_OVERWRITING = frozenset(
    ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
     "log_normal_", "cauchy_", "geometric_")
)  # fmt: skip


# What they give and take besides as bytes is scratch space, parts of which nobody writes.
_WITH_SCRATCH = ("rnn", "batch_norm")


class Sources:
    """Lines of the user's code, by the number that autograd gives the nodes made there."""

    def __init__(self) -> None:
        self._of: dict[int, str] = {}

    def note(self) -> str:
        """The line that is running; nodes made by the operator it calls get the next number."""
        line = _line()
        self._of[_autograd._get_sequence_nr()] = line
        return line

    def of_node(self, node: Any) -> str:
        number = getattr(node, "_sequence_nr", None)
        return self._of.get(number(), "") if callable(number) else ""


class OpRecorder(TorchDispatchMode):
    """Observes what operators take and give; autograd's threads inherit it."""

    def __init__(self, recorder: Recorder, owners: Owners, sources: Sources) -> None:
        super().__init__()
        self._recorder, self._owners, self._sources = recorder, owners, sources
        self._sites: dict[tuple[str, ...], Site] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        short = name.rpartition("::")[2]
        if not self._recorder.on or short in UNSEEN or name.startswith("truncdet::_digest"):
            return func(*args, **kwargs)
        where = self._where()
        read = args[1:] if short in _OVERWRITING else args
        written = {a.name for a in func._schema.arguments if a.is_out}
        asked = {key: value for key, value in kwargs.items() if key not in written}
        self._see(where, name, "in", (read, asked))
        result = func(*args, **kwargs)
        self._see(where, name, "out", result)
        return result

    def _where(self) -> tuple[str, str, str]:
        """Phase, module path and source line of what runs now."""
        if torch._C._current_graph_task_id() == -1:
            inside = self._recorder.inside
            return "forward", inside[-1] if inside else "", self._sources.note()
        node = torch._C._current_autograd_node()
        if node is None:  # between two nodes: gradients are added
            return "backward", "", ""
        return "backward", self._owners.of(node), self._sources.of_node(node)

    def _see(self, where: tuple[str, str, str], name: str, kind: str, value: Any) -> None:
        phase, module, source = where
        with self._recorder.working():
            found = results(name, value)
        about = phase, module, name, kind, source
        site = self._sites.get(about)
        if site is None:
            site = self._sites[about] = Site(*about)
        self._recorder.see([(site, slot, tensor) for slot, tensor in found])


def results(op: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors in what an operator takes or gives, without memory that it leaves unwritten."""
    found = tensors(value)
    if any(part in op for part in _WITH_SCRATCH):
        found = [(slot, tensor) for slot, tensor in found if tensor.dtype != torch.uint8]
    return found


def _line() -> str:
    """The innermost line outside torch and truncdet, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OWN)) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
