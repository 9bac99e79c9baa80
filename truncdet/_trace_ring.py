"""Digests of many tensors, kept on their device until a step is over: nothing waits for a kernel.

A tensor's digest is the sum of `_digest` over its words in the order of memory; dtype, shape and
strides are kept beside it by whoever asks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truncdet._bits import bits

_CAPACITY = 4096  # slots of one buffer; a step takes as many buffers as it needs


@dataclass
class _Buffers:
    """The buffers of one device that a step has filled."""

    full: list[Tensor] = field(default_factory=list)
    used: int = _CAPACITY


class Pending:
    """Digests of a finished step on their way to the host."""

    def __init__(self, copies: dict[torch.device, Tensor], events: list[torch.cuda.Event]) -> None:
        self._copies, self._events = copies, events

    def read(self) -> dict[torch.device, list[int]]:
        """The slots of each device; waits for the copies."""
        for event in self._events:
            event.synchronize()
        return {device: copy.tolist() for device, copy in self._copies.items()}


class Ring:
    """Takes tensors and hands out slots; thread-safe, since autograd has threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[torch.device, _Buffers] = {}

    def add(self, tensor: Tensor) -> int:
        """The slot, of the tensor's device, that will hold its digest; nothing waits."""
        device = tensor.device
        with self._lock:
            buffers = self._of.get(device)
            if buffers is None:
                buffers = self._of[device] = _Buffers()
            if buffers.used == _CAPACITY:
                buffers.full.append(self._buffer(device))
                buffers.used = 0
            sums, slot = buffers.full[-1], buffers.used
            buffers.used += 1
            number = (len(buffers.full) - 1) * _CAPACITY + slot
        plain = tensor.detach()
        if plain.is_complex() or plain.is_conj() or plain.is_neg() or not _dense(plain):
            plain = bits(plain).contiguous()
        torch.ops.truncdet._digest_words(plain, sums, slot, 0)
        return number

    def take(self) -> Pending:
        """Ends the step: what was added so far is sent to the host, and slots begin at 0 again."""
        with self._lock:
            filled, self._of = self._of, {}
        copies, events = {}, []
        for device, buffers in filled.items():
            whole = torch.cat(buffers.full) if len(buffers.full) > 1 else buffers.full[0]
            if device.type != "cuda":
                copies[device] = whole.cpu()
                continue
            # Only into pinned memory does a copy not wait.
            copies[device] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            copies[device].copy_(whole, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return Pending(copies, events)

    @staticmethod
    def _buffer(device: torch.device) -> Tensor:
        return torch.zeros(_CAPACITY, dtype=torch.int64, device=device)


def _dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    sizes = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.size(), strict=True)
        if size != 1
    )
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def layout(tensor: Tensor) -> str:
    """What the words alone do not say: dtype, shape, and strides where they are not the usual."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout != torch.strided or tensor.is_contiguous() or not _dense(tensor):
        return text
    return f"{text} strides {list(tensor.stride())}"
