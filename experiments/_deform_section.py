"""Deformable convolution, forward and whole backward: torchvision's kernels and truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import _measure as measure
import torch
import torchvision
from _checks import Check, at_most, holds
from torch import Tensor

import truncdet
from truncdet._deform_chunks import chunk_images

assert torchvision, truncdet  # imported for the operators that they register

LIMIT = 1.5  # our backward by torchvision's time
SCRATCH_PER_CELL = 16  # bytes a cell of the input's gradient, beyond columns
ALLOCATOR_SLACK = 4 * (2 << 20)
_TINY = 8  # what the tiny sizes are divided by

Call = Callable[[], Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class Deform:
    """A 3x3 kernel, padding 1; `kind` is plain, or modulated (with a mask)."""

    kind: str
    groups: int = 1
    offset_groups: int = 1
    images: int = 2
    channels: int = 256
    height: int = 100
    width: int = 168

    @property
    def name(self) -> str:
        shape = f"{self.images}x{self.channels}x{self.height}x{self.width}"
        return f"{self.kind}, {shape}, groups {self.groups}, offset groups {self.offset_groups}"

    def tiny(self) -> Deform:
        sizes = (self.channels // _TINY, self.height // _TINY, self.width // _TINY)
        return Deform(self.kind, self.groups, self.offset_groups, self.images, *sizes)

    @property
    def cells(self) -> int:
        return self.images * self.channels * self.height * self.width

    @property
    def scratch_limit(self) -> int:
        """Bytes: a chunk's columns, its copy of the gradient, and two words a cell."""
        image = self.channels * self.height * self.width
        chunk = min(self.images, chunk_images(9 * image))
        return 4 * chunk * 10 * image + SCRATCH_PER_CELL * self.cells + ALLOCATOR_SLACK

    def calls(self, device: torch.device) -> dict[str, tuple[Call, Call]]:
        """Forward and backward of both sides."""
        torch.manual_seed(0)
        size = (self.height, self.width)
        input = torch.randn(self.images, self.channels, *size, device=device)
        grad = torch.randn_like(input)
        weight = torch.randn(self.channels, self.channels // self.groups, 3, 3, device=device)
        bias = torch.randn(self.channels, device=device)
        # Offsets of a trained network: a few cells, and about the same for neighbouring places.
        planes = 9 * self.offset_groups
        coarse = 2 * torch.randn(self.images, 2 * planes, *(n // 4 + 1 for n in size))
        offset = torch.nn.functional.interpolate(coarse, size, mode="bilinear").to(device)
        masked = self.kind == "modulated"
        mask = torch.rand(self.images, planes, *size, device=device)
        placeholder = mask if masked else torch.zeros(self.images, 1, device=device)
        given = (input, weight, offset, placeholder, bias)
        rest = (*(1,) * 6, self.groups, self.offset_groups, masked)
        native, ours = torch.ops.torchvision, torch.ops.truncdet
        steps = ((1, 1),) * 3
        tensors = (input, weight, offset, mask if masked else None)
        wanted = [True, True, True, masked]

        def our_backward() -> Sequence[Tensor]:
            gradients = ours.deform_conv2d_backward(grad, *tensors, *steps, wanted)
            return *gradients[: 3 + masked], grad.sum((0, 2, 3))

        def native_backward() -> Sequence[Tensor]:
            gradients = native._deform_conv2d_backward(grad, *given, *rest)
            return *gradients[: 3 + masked], gradients[4]

        return {
            "torchvision": (lambda: [native.deform_conv2d(*given, *rest)], native_backward),
            "truncdet": (lambda: [ours.deform_conv2d(*tensors, bias, *steps)], our_backward),
        }


CASES = (
    Deform("plain"),
    Deform("modulated"),
    Deform("modulated", groups=4, offset_groups=4),
)


def measure_deform(case: Deform, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    row: dict[str, Any] = {"name": case.name, "limit": LIMIT, "scratch_limit": case.scratch_limit}
    for side, (forward, backward) in case.calls(device).items():
        parts = len(backward())
        row[side] = {
            "forward_ms": measure.median_ms(forward, device, repeats),
            "backward_ms": measure.median_ms(backward, device, repeats),
            "backward_peak_bytes": measure.peak_bytes(backward, device),
            "output_bytes": sum(x.numel() * x.element_size() for x in backward()),
            "bits_equal": all(
                measure.repeats_equal(lambda part=part, call=backward: call()[part])
                for part in range(parts)
            ),
        }
    for part in ("forward", "backward"):
        row[f"{part}_ratio"] = row["truncdet"][f"{part}_ms"] / row["torchvision"][f"{part}_ms"]
    return row


def check_deform(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row, times and memory in those of full size on a GPU."""
    name, ours = f"deform_conv2d, {row['name']}", row["truncdet"]
    checks = [holds(f"{name}: bits repeat", ours["bits_equal"])]
    if with_limits:
        checks.append(at_most(f"{name}: backward", row["backward_ratio"], row["limit"]))
        scratch = ours["backward_peak_bytes"] - ours["output_bytes"]
        checks.append(at_most(f"{name}: bytes beyond the output", scratch, row["scratch_limit"]))
    return checks
