"""Losses, nms and topk: PyTorch's and torchvision's operators, and truncdet.

A loss is timed with its gradient. No limit is set on times: what has to hold is that bits repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import _measure as measure
import torch
import torchvision
from _checks import Check, holds
from torch import Tensor
from torch.nn import functional

import truncdet

Call = Callable[[], Sequence[Tensor]]
EQUAL_REPEATS = 20  # two blocks that change places may leave the same sum


def _with_gradient(loss: Callable[[Tensor], Tensor], input: Tensor) -> Call:
    leaf = input.detach().requires_grad_()

    def call() -> Sequence[Tensor]:
        value = loss(leaf)
        return value.detach(), *torch.autograd.grad(value, leaf)

    return call


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Logits of this shape against classes, or against probabilities of classes."""

    shape: tuple[int, ...]
    target: str = "classes"

    @property
    def name(self) -> str:
        return f"cross_entropy, {'x'.join(map(str, self.shape))}, {self.target}"

    def tiny(self) -> CrossEntropy:
        return dataclasses.replace(self, shape=tuple(max(2, size // 32) for size in self.shape))

    def calls(self, device: torch.device) -> dict[str, Call]:
        torch.manual_seed(0)
        logits = torch.randn(self.shape, device=device)
        places = (self.shape[0], *self.shape[2:])
        target = torch.randint(0, self.shape[1], places, device=device)
        if self.target == "probabilities":
            target = torch.randn(self.shape, device=device).softmax(1)
        sides = (("PyTorch", functional.cross_entropy), ("truncdet", truncdet.cross_entropy))
        return {name: _with_gradient(lambda x, op=op: op(x, target), logits) for name, op in sides}


@dataclasses.dataclass(frozen=True)
class Ctc:
    """Sequences that are all as long as can be, against targets of half as many labels as fit."""

    items: int
    times: int
    classes: int
    labels: int

    @property
    def name(self) -> str:
        return f"ctc_loss, {self.items} of {self.times}x{self.classes}, {self.labels} labels"

    def tiny(self) -> Ctc:
        return Ctc(2, self.times // 10, self.classes // 10, self.labels // 10)

    def calls(self, device: torch.device) -> dict[str, Call]:
        torch.manual_seed(0)
        shape = (self.times, self.items, self.classes)
        probs = torch.randn(shape, device=device).log_softmax(2)
        targets = torch.randint(1, self.classes, (self.items, self.labels), device=device)
        lengths = ((self.times,) * self.items, (self.labels,) * self.items)
        sides = (("PyTorch", functional.ctc_loss), ("truncdet", truncdet.ctc_loss))
        return {
            name: _with_gradient(lambda x, op=op: op(x, targets, *lengths), probs)
            for name, op in sides
        }


@dataclasses.dataclass(frozen=True)
class Nms:
    """Boxes of an image, with many scores that are equal; alone, or of 80 groups."""

    boxes: int
    groups: int = 0

    @property
    def name(self) -> str:
        return f"batched_nms, {self.boxes} boxes" if self.groups else f"nms, {self.boxes} boxes"

    def tiny(self) -> Nms:
        return dataclasses.replace(self, boxes=self.boxes // 50)

    def calls(self, device: torch.device) -> dict[str, Call]:
        torch.manual_seed(0)
        corners = torch.rand(self.boxes, 2) * torch.tensor([1088.0, 800.0])
        boxes = torch.cat([corners, corners + 16 + 200 * torch.rand(self.boxes, 2)], 1).to(device)
        scores = ((torch.rand(self.boxes) * 1000).round() / 1000).to(device)
        groups = torch.randint(0, max(self.groups, 1), (self.boxes,)).to(device)
        sides = (("torchvision", torchvision.ops), ("truncdet", truncdet))
        if self.groups:
            return {
                name: lambda of=of: [of.batched_nms(boxes, scores, groups, 0.5)]
                for name, of in sides
            }
        return {name: lambda of=of: [of.nms(boxes, scores, 0.7)] for name, of in sides}


@dataclasses.dataclass(frozen=True)
class TopK:
    """The proposals of a detector: the best of all anchors of every image."""

    images: int
    anchors: int
    k: int

    @property
    def name(self) -> str:
        return f"topk, {self.k} of {self.images}x{self.anchors}"

    def tiny(self) -> TopK:
        return TopK(self.images, self.anchors // 100, self.k // 100)

    def calls(self, device: torch.device) -> dict[str, Call]:
        torch.manual_seed(0)
        # Scores under autocast have so few bits that many are equal.
        scores = torch.randn(self.images, self.anchors).half().float().to(device)

        def by_sort() -> Sequence[Tensor]:
            order = torch.sort(scores, dim=1, descending=True, stable=True)
            return [x[:, : self.k] for x in order]

        return {
            "PyTorch": lambda: torch.topk(scores, self.k),
            "stable sort": by_sort,
            "truncdet": lambda: truncdet.topk(scores, self.k),
        }


CASES: tuple[CrossEntropy | Ctc | Nms | TopK, ...] = (
    CrossEntropy((2, 19, 512, 1024)),
    CrossEntropy((8192, 81)),
    CrossEntropy((2, 19, 512, 1024), "probabilities"),
    Ctc(32, 200, 64, 50),
    Nms(2000),
    Nms(10_000),
    Nms(10_000, 80),
    TopK(2, 250_000, 2000),
)


def measure_loss(
    case: CrossEntropy | Ctc | Nms | TopK, device: torch.device, repeats: int
) -> dict[str, Any]:
    """One row of the result; the first of the calls is the native one."""
    calls = case.calls(device)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        found[name] = {
            "ms": measure.median_ms(call, device, repeats),
            "peak_bytes": measure.peak_bytes(call, device),
            "bits_equal": all(
                measure.repeats_equal(lambda call=call, part=part: call()[part], EQUAL_REPEATS)
                for part in range(len(call()))
            ),
        }
    ours = found.pop("truncdet")
    native = next(iter(found))
    return {
        "name": case.name,
        "native": found,
        "native_name": native,
        "truncdet": ours,
        "ratio": ours["ms"] / found[native]["ms"],
    }


def check_loss(row: dict[str, Any], with_limits: bool = False) -> list[Check]:
    """Bits in every row."""
    return [holds(f"{row['name']}: bits repeat", row["truncdet"]["bits_equal"])]
