"""Hooks that observe a model: its batches, what modules take and give, its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from truncdet._trace_backward import Owners
from truncdet._trace_recorder import Recorder
from truncdet._trace_values import tensors

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


def attach(model: nn.Module, recorder: Recorder, owners: Owners) -> list[Undo]:
    """Registers the hooks and returns what removes them."""
    undo: list[Undo] = []
    for path, module in units(model):
        if isinstance(module, torch.jit.ScriptModule) and path:
            continue  # takes no hooks that see keyword arguments
        before = functools.partial(_before, recorder, owners, model, path)
        after = functools.partial(_after, recorder, owners, path)
        hooks = [
            module.register_forward_pre_hook(_eager(before), with_kwargs=True),
            # The last to see the output, past hooks that change it.
            module.register_forward_hook(_eager(after), with_kwargs=True),
        ]
        undo += [hook.remove for hook in hooks]
    return undo


# What is observed by name, and the phase whose result it is.
_PHASES = {
    "initial parameter": "data",
    "gradient": "backward",
    "buffer": "buffer",
    "parameter": "optimizer",
}


def see_state(model: nn.Module, recorder: Recorder, what: str) -> None:
    """Observes parameters, their gradients or buffers, by name."""
    phase = _PHASES[what]
    for name, value in _state(model, what):
        module, _, own = name.rpartition(".")
        recorder.see_tensor(phase, module, what, "state", own, value)


def see_random_state(recorder: Recorder, model: nn.Module) -> None:
    """Observes the generators of the CPU and of the model's CUDA devices."""
    recorder.see_tensor("data", "", "random state", "state", "cpu", torch.get_rng_state())
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for device in sorted(devices, key=str):
        state = torch.cuda.get_rng_state(device)
        recorder.see_tensor("data", "", "random state", "state", str(device), state)


def _state(model: nn.Module, what: str) -> Iterator[tuple[str, Tensor]]:
    if what == "buffer":
        yield from model.named_buffers()
        return
    for name, parameter in model.named_parameters():
        if what != "gradient":
            yield name, parameter
        elif parameter.grad is not None and parameter.grad.layout == torch.strided:
            yield name, parameter.grad


def _before(
    recorder: Recorder,
    owners: Owners,
    model: nn.Module,
    path: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not path:
        recorder.inside.clear()
        _open_step(recorder, model)
    recorder.inside.append(path)
    if not recorder.on:
        return
    phase = "forward" if path else "data"
    op = type(module).__name__ if path else "batch"
    for slot, tensor in tensors((args, kwargs)):
        recorder.see_tensor(phase, path, op, "in", slot, tensor, known=True)
        owners.border(tensor)


def _after(
    recorder: Recorder,
    owners: Owners,
    path: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    # An exception in a module's forward leaves it, and those inside, on the list.
    while recorder.inside and recorder.inside.pop() != path:
        pass
    if not recorder.on:
        return
    for slot, tensor in tensors(output):
        op = type(module).__name__
        recorder.see_tensor("forward", path, op, "out", slot, tensor, known=True)
        owners.claim(path, tensor)
        if not path:
            recorder.see_loss(slot.strip("[]'\"") or "output", tensor)
    if not path:
        see_state(module, recorder, "buffer")


def _open_step(recorder: Recorder, model: nn.Module) -> None:
    if recorder.opened:
        return
    recorder.opened = True
    if recorder.on:
        if recorder.number == 0:
            see_state(model, recorder, "initial parameter")
        see_random_state(recorder, model)


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, but not inside of what torch.compile traces."""

    def guarded(*arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*arguments)

    return guarded


def _is_one_unit(module: nn.Module) -> bool:
    compiled = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
    return (
        compiled
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )
