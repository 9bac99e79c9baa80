"""Hooks that observe a model: its batches, what modules take and give, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from truncdet._trace_backward import Owners
from truncdet._trace_hook import Hook
from truncdet._trace_recorder import Recorder
from truncdet._trace_site import Site
from truncdet._trace_state import State
from truncdet._trace_values import arguments, tensors

Undo = Callable[[], object]


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are observed, by path: a compiled or scripted one without its parts."""
    closed: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{above}.") if above else True for above in closed):
            continue
        yield path, module
        if _is_one_unit(module):
            closed.append(path)


def attach(model: nn.Module, recorder: Recorder, owners: Owners, state: State) -> list[Undo]:
    """Registers the hooks and returns what removes them."""
    undo: list[Undo] = []
    start = _first(recorder, state)
    for path, module in units(model):
        if isinstance(module, torch.jit.ScriptModule) and path:
            continue  # takes no hooks that see keyword arguments
        op = type(module).__name__
        before = _before(recorder, owners, path, op, None if path else start)
        after = _after(recorder, owners, path, op, None if path else state)
        hooks = [
            module.register_forward_pre_hook(Hook(before), with_kwargs=True),
            # The last to see the output, past hooks that change it.
            module.register_forward_hook(Hook(after), with_kwargs=True),
        ]
        undo += [hook.remove for hook in hooks]
    return undo


def _before(
    recorder: Recorder, owners: Owners, path: str, op: str, start: Callable[[], None] | None
) -> Callable[..., None]:
    site = Site("forward", path, op, "in") if path else Site("data", "", "batch", "in")
    inside = recorder.inside

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # what is traced is one unit
            return
        if start is not None:
            inside.clear()
            start()
        inside.append(path)
        if recorder.on:
            taken = arguments(args, kwargs)
            recorder.see([(site, slot, tensor) for slot, tensor in taken], known=True)
            for _, tensor in taken:
                owners.border(tensor)

    return before


def _after(
    recorder: Recorder, owners: Owners, path: str, op: str, state: State | None
) -> Callable[..., None]:
    site = Site("forward", path, op, "out")
    inside = recorder.inside

    def after(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        # An exception in a module's forward leaves it, and those inside, on the list.
        while inside and inside.pop() != path:
            pass
        if not recorder.on:
            return
        given = tensors(output)
        recorder.see([(site, slot, tensor) for slot, tensor in given], known=True)
        for _, tensor in given:
            owners.claim(path, tensor)
        if state is not None:
            for slot, tensor in given:
                recorder.see_loss(slot.strip("[]'\"") or "output", tensor)
            state.see("buffer")

    return after


def _first(recorder: Recorder, state: State) -> Callable[[], None]:
    """What is observed at the first call of the model in a step."""

    def start() -> None:
        if recorder.opened:
            return
        recorder.opened = True
        if recorder.on:
            state.refresh()
            if recorder.number == 0:
                state.see("initial parameter")
            state.see_random()

    return start


def _is_one_unit(module: nn.Module) -> bool:
    compiled = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
    return (
        compiled
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )
