"""`record`: batches, activations, gradients and state of a training as digests, to compare."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from truncdet import _trace_backward as backward
from truncdet import _trace_modules as modules
from truncdet._trace_file import Trace
from truncdet._trace_ops import OpRecorder, Sources
from truncdet._trace_recorder import Place, Recorder
from truncdet._trace_state import State
from truncdet._trace_steps import attach_steps
from truncdet._version import __version__

LEVELS = ("module", "op")


@contextmanager
def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    level: str = "module",
    every: int = 1,
    *,
    path: str | Path | None = None,
    keep: Place | None = None,
) -> Iterator[Trace]:
    """Records a training loop as digests; two recordings are compared by `compare`.

    A step begins with the model's forward and ends with the optimizer's `step`, or, without an
    optimizer, with the next forward. In it are observed: the random state and the batch, what every
    module takes and gives, the gradients that each node of the backward takes and gives, those of
    the parameters, parameters and optimizer state after the step, and buffers. Kernels outside
    PyTorch's dispatcher are seen by what the modules, functions and nodes around them take and
    give. What torch.compile made is one unit. Nothing waits for the device before a step is over.
    A step of the optimizer that raises ends the recorded one, too; one that is never made, as where
    a `GradScaler` skips it, leaves the recorded one open, and what follows is part of it.

    Example:
        >>> import torch, truncdet
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with truncdet.record(model, optimizer) as trace:
        ...     for _ in range(2):
        ...         model(torch.ones(3, 2)).sum().backward()
        ...         optimizer.step()
        >>> len(trace.steps), trace.complete
        (2, True)

    Args:
        model: what is trained.
        optimizer: observed after each of its steps.
        level: 'module', or 'op' for each operator of the dispatcher too, with its source line.
        every: record each so manieth step, from step 0.
        path: file that every step is appended to when it is over, so that a crash leaves those
            before it; there must be no file of that name yet. None keeps the trace in memory.
        keep: observation whose values are kept beside its digest, as `Verdict.place` names it.

    Yields:
        The trace, which grows; it is complete after the block, unless an exception ended that.

    Raises:
        TypeError: `model` or `optimizer` is none.
        ValueError: an unknown level, `every` below 1, or a path that exists.
    """
    _check(model, optimizer, level, every, path)
    head = {
        "level": level,
        "every": every,
        "truncdet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    recorder = Recorder(head, None if path is None else Path(path), every, keep)
    sources, state = Sources(), State(recorder, model)
    of_node = sources.of_node if level == "op" else _nowhere
    owners = backward.Owners(backward.NodeHooks(recorder, of_node))
    complete = False
    try:
        with ExitStack() as undo:
            for remove in modules.attach(model, recorder, owners, state):
                undo.callback(remove)
            for remove in attach_steps(model, optimizer, recorder, owners, state):
                undo.callback(remove)
            undo.enter_context(backward.observed(recorder, owners))
            if level == "op":
                undo.enter_context(OpRecorder(recorder, owners, sources))
            yield recorder.trace
        complete = True
    finally:
        recorder.finish(complete)


def _nowhere(node: object) -> str:
    """The source line of a node where lines are not noted."""
    return ""


def _check(
    model: object, optimizer: object, level: object, every: object, path: str | Path | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: model must be an nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"record: optimizer must be a torch.optim.Optimizer or None, got {kind}")
    if level not in LEVELS:
        raise ValueError(f"record: level must be one of {', '.join(LEVELS)}, got {level!r}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"record: every must be an int of at least 1, got {every!r}")
    if path is not None and Path(path).exists():
        raise ValueError(f"record: path must name no file yet, got {str(path)!r}")
