"""Digests of many tensors, kept on their device until a step is over: nothing waits for a kernel.

A tensor's digest is the sum of `_digest` over its words in the order of memory; dtype, shape and
strides are kept beside it by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from truncdet._bits import bits
from truncdet._digest_many import digest_many

_CAPACITY = 4096  # slots of one buffer; a step takes as many buffers as it needs


class _Lane:
    """The buffers of one device that a step has filled, and the tensors whose launch is due."""

    __slots__ = ("buffers", "due", "used")

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.used = _CAPACITY  # slots of the last buffer
        self.due: list[Tensor] = []


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
    """Takes tensors and hands out slots; whoever calls it holds a lock.

    Tensors that are observed at one moment are digested by one launch: `put` them all, then
    `flush`. Between the two nobody may change them, so the caller does nothing else in between.

    Args:
        unseen: a scope for operators that are not to be observed.
    """

    def __init__(self, unseen: Callable[[], AbstractContextManager[None]]) -> None:
        self._unseen = unseen
        self._lanes: dict[torch.device, _Lane] = {}

    def put(self, tensor: Tensor, device: torch.device) -> int:
        """The slot, of the tensor's device, that will hold the digest of a tensor that is `plain`
        or was made so."""
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = _Lane()
        if lane.used == _CAPACITY:
            self._launch(lane)
            with self._unseen():
                lane.buffers.append(torch.zeros(_CAPACITY, dtype=torch.int64, device=device))
            lane.used = 0
        lane.due.append(tensor)
        lane.used += 1
        return (len(lane.buffers) - 1) * _CAPACITY + lane.used - 1

    def flush(self) -> None:
        """Launches what was put; nothing waits for it."""
        for lane in self._lanes.values():
            self._launch(lane)

    def _launch(self, lane: _Lane) -> None:
        if lane.due:
            due, lane.due = lane.due, []
            digest_many(due, lane.buffers[-1], lane.used - len(due))

    def take(self) -> Pending:
        """Ends the step: what was added so far is sent to the host, and slots begin at 0 again."""
        self.flush()
        filled, self._lanes = self._lanes, {}
        copies, events = {}, []
        for device, lane in filled.items():
            whole = torch.cat(lane.buffers) if len(lane.buffers) > 1 else lane.buffers[0]
            whole = whole[: (len(lane.buffers) - 1) * _CAPACITY + lane.used]
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


def plain(tensor: Tensor) -> bool:
    """Whether its words can be read as they lie in memory; a negative view looks plain."""
    return not (tensor.is_complex() or tensor.is_conj()) and _dense(tensor)


def made_plain(tensor: Tensor) -> Tensor:
    """The words of a tensor that is not, in row-major order."""
    return bits(tensor.detach()).contiguous()


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
