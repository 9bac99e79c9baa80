"""State of a model and its optimizer, each kind observed by one call: a few launches for all."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from truncdet._trace_file import Key
from truncdet._trace_recorder import Recorder
from truncdet._trace_site import Site
from truncdet._trace_values import tensors

# What is observed by name, and the phase whose result it is.
_PHASES = {
    "initial parameter": "data",
    "gradient": "backward",
    "buffer": "buffer",
    "parameter": "optimizer",
}
Named = list[tuple[Site, str]]


class _Known(NamedTuple):
    """A list of tensors that all could be observed, and its keys."""

    named: Named
    geometry: list[Any]
    keys: list[Key]
    device: torch.device


class State:
    """Observes parameters, gradients, buffers, generators and what an optimizer keeps."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._modules: list[nn.Module] = []
        self._parts: list[Any] = []
        self._parameters: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._named: dict[str, Named] = {}
        self._known: dict[str, _Known] = {}
        self._random = Site("data", "", "random state", "state")

    def refresh(self) -> None:
        """To be called when a step begins: lists what the model has if that has changed."""
        parts: list[Any] = [p for m in self._modules for p in m._modules.values()]
        parts += [key for m in self._modules for key in (*m._parameters, *m._buffers)]
        if (
            not self._modules
            or len(parts) != len(self._parts)
            or any(map(operator.is_not, parts, self._parts))
        ):
            self._list()

    def see(self, what: str) -> None:
        """Observes 'initial parameter', 'gradient', 'buffer' or 'parameter', by name."""
        if self._recorder.on:
            own = self._buffers if what == "buffer" else self._parameters
            values = [part.get(name) for part, name in own]
            if what == "gradient":
                values = [None if value is None else value.grad for value in values]
            self._see(what, self._named[what], values)

    def see_random(self) -> None:
        """Observes the generators of the CPU and of the model's CUDA devices."""
        found = [(self._random, "cpu", torch.get_rng_state())]
        values = (part.get(name) for part, name in self._parameters)
        devices = {v.device for v in values if v is not None and v.is_cuda}
        for device in sorted(devices, key=str):
            found.append((self._random, str(device), torch.cuda.get_rng_state(device)))
        self._recorder.see(found)

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Observes what an optimizer keeps for each parameter."""
        if not self._recorder.on:
            return
        name = type(optimizer).__name__
        states = list(optimizer.state.values())
        what = f"state of {name}"
        keys = [key for state in states for key in (0, *state)]  # 0: where each begins
        old = self._named.get(f"{what}, keys")
        if old != keys:
            self._named[f"{what}, keys"] = keys
            sites = [Site("optimizer", "", name, "state") for _ in states]
            self._named[what] = [
                (site, f"[{number}][{key!r}]")
                for number, (site, state) in enumerate(zip(sites, states, strict=True))
                for key in state
            ]
        values = [value for state in states for value in state.values()]
        self._see(what, self._named[what], values)

    def _see(self, what: str, named: Named, values: list[Any]) -> None:
        """Observes a list that is much the same in every step."""
        try:
            geometry = [
                None if v is None else (v.dtype, v.shape, v.stride(), v.device, v.is_neg())
                for v in values
            ]
        except (AttributeError, RuntimeError):  # a number, or a tensor without strides
            geometry = []
        known = self._known.get(what)
        if (
            known is not None
            and known.named is named
            and known.geometry == geometry
            and self._recorder.keep is None
        ):
            present = [value for value in values if value is not None]
            self._recorder.see_same(known.keys, present, known.device)
            return
        found = [
            (site, slot, tensor)
            for (site, first), value in zip(named, values, strict=True)
            for slot, tensor in tensors(value, first)
        ]
        self._recorder.see(found)
        self._remember(what, named, geometry, found)

    def _remember(
        self, what: str, named: Named, geometry: list[Any], found: list[tuple[Site, str, Tensor]]
    ) -> None:
        """Remembers the keys if nothing was left out and all can be read as it lies there."""
        self._known.pop(what, None)
        present = [one for one in geometry if one is not None]
        made = [
            site.known.get((slot, *one[:-1]))
            for (site, slot, _), one in zip(found, present, strict=False)
        ]
        whole = len(made) == len(present) == len(found) > 0
        if whole and all(one is not None and one[1] for one in made):
            devices = {one[3] for one in present}
            if len(devices) == 1 and not any(one[-1] for one in present):
                keys = [one[0] for one in made if one is not None]
                self._known[what] = _Known(named, geometry, keys, devices.pop())

    def _list(self) -> None:
        self._modules, self._parameters, self._buffers = [], [], []
        sites: dict[str, Named] = {what: [] for what in _PHASES}
        done: set[int] = set()
        for path, module in self._model.named_modules():
            self._modules.append(module)
            for whats, part, mine in (
                (("buffer",), module._buffers, self._buffers),
                (
                    ("initial parameter", "gradient", "parameter"),
                    module._parameters,
                    self._parameters,
                ),
            ):
                for what in whats:
                    site = Site(_PHASES[what], path, what, "state")
                    sites[what] += ((site, name) for name in part if id(part[name]) not in done)
                mine += ((part, name) for name in part if id(part[name]) not in done)
                done.update(id(value) for value in part.values() if value is not None)
        self._named |= sites
        self._parts = [p for m in self._modules for p in m._modules.values()]
        self._parts += [key for m in self._modules for key in (*m._parameters, *m._buffers)]
