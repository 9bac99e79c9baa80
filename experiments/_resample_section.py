"""Backward of interpolate and the adaptive pools: atomics, the deterministic switch, truncdet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import _measure as measure
import torch
import torch.nn.functional as F
from _checks import Check, at_most, holds
from _scatter_section import deterministic_switch
from torch import Tensor

import truncdet

assert truncdet  # imported for the operators that it registers

LIMIT = 0.8  # of the atomic kernel's time
ERROR_LIMIT = 1.25  # our error against float64, by the native kernel's
_TINY = 8  # what the tiny sizes are divided by


@dataclasses.dataclass(frozen=True)
class Resample:
    """`operator` is a mode of interpolate or the name of a pool; sizes without N and C."""

    operator: str
    images: int
    channels: int
    size: tuple[int, ...]
    output: tuple[int, ...]
    channels_last: bool = False

    def tiny(self) -> Resample:
        """The same ratio at sizes for a CPU; pools keep their windows."""
        pool = "pool" in self.operator
        return dataclasses.replace(
            self,
            channels=max(4, self.channels // (4 * _TINY)),
            size=tuple(max(1, n // _TINY) for n in self.size),
            output=self.output if pool else tuple(max(1, n // _TINY) for n in self.output),
        )

    @property
    def sizes(self) -> str:
        """Sizes of the input and of the output, and the layout where it is not the usual one."""
        text = f"{'x'.join(map(str, self.shape))} to {'x'.join(map(str, self.output))}"
        return text + (", channels_last" if self.channels_last else "")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.images, self.channels, *self.size)


P2 = (2, 256, (200, 336))
C4 = (2, 1024, (50, 84))
CASES = (
    Resample("bilinear", *P2, (400, 672)),
    Resample("bilinear", *P2, (400, 672), channels_last=True),
    Resample("bilinear", 2, 19, (128, 256), (1024, 2048)),
    Resample("bilinear", 16, 256, (1, 1), (64, 64)),
    Resample("bilinear", *P2, (100, 168)),
    Resample("bicubic", *P2, (400, 672)),
    Resample("trilinear", 2, 32, (16, 64, 64), (32, 128, 128)),
    Resample("linear", 16, 256, (4096,), (8192,)),
    Resample("adaptive_avg_pool2d", *P2, (7, 7)),
    Resample("adaptive_avg_pool2d", *C4, (13, 19)),
    Resample("adaptive_avg_pool3d", 2, 64, (16, 56, 56), (5, 9, 9)),
    # Nearly all of the output is zeros, and writing 137.6 MB of them takes an H200 33.0 us by zero_
    # alone, 0.9 of the native kernel's 36.7 us in all: what fills the output so misses the limit.
    Resample("adaptive_max_pool2d", *P2, (7, 7)),
    Resample("adaptive_max_pool2d", *C4, (13, 19)),
)
_ATEN = {
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
    "trilinear": "upsample_trilinear3d",
    "adaptive_avg_pool2d": "_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d",
    "adaptive_max_pool2d": "adaptive_max_pool2d",
}


@dataclasses.dataclass(frozen=True)
class Calls:
    """Inputs of a case on a device, and what is measured with them."""

    case: Resample
    input: Tensor
    grad: Tensor
    indices: Tensor | None

    @classmethod
    def make(cls, case: Resample, device: torch.device) -> Calls:
        torch.manual_seed(0)
        input = torch.randn(case.shape, device=device)
        grad = torch.randn(case.images, case.channels, *case.output, device=device)
        if case.channels_last:
            input, grad = (x.contiguous(memory_format=torch.channels_last) for x in (input, grad))
        indices = None
        if case.operator == "adaptive_max_pool2d":
            indices = F.adaptive_max_pool2d(input, case.output, return_indices=True)[1]
        return cls(case, input, grad, indices)

    def double(self) -> Calls:
        """The same values in float64."""
        return dataclasses.replace(self, input=self.input.double(), grad=self.grad.double())

    def native(self) -> Callable[[], Tensor]:
        """torch's own backward."""
        case, grad = self.case, self.grad
        operator = getattr(torch.ops.aten, f"{_ATEN[case.operator]}_backward")
        if self.indices is not None:
            return lambda: operator(grad, self.input, self.indices)
        if "pool" in case.operator:
            return lambda: operator(grad, self.input)
        return lambda: operator(grad, case.output, case.shape, False)

    def deterministic(self) -> Callable[[], Tensor]:
        """The backward of torch's function, made under the switch: it may be another one."""
        case = self.case
        input = self.input.detach().requires_grad_()
        if "pool" in case.operator:
            out = getattr(F, case.operator)(input, case.output)
        else:
            out = F.interpolate(input, case.output, mode=case.operator)
        return lambda: torch.autograd.grad(out, input, self.grad, retain_graph=True)[0]

    def ours(self) -> Callable[[], Tensor]:
        case, grad, ops = self.case, self.grad, torch.ops.truncdet
        if self.indices is not None:
            return lambda: ops.adaptive_max_pool2d_backward(grad, self.indices, case.shape)
        if "pool" in case.operator:
            operator = getattr(ops, f"{case.operator}_backward")
            return lambda: operator(grad, case.shape)
        scales = [0.0] * len(case.size)
        return lambda: ops.interpolate_backward(grad, case.shape, case.operator, False, scales)


def measure_resample(case: Resample, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    calls = Calls.make(case, device)
    native, ours = calls.native(), calls.ours()
    row: dict[str, Any] = {**dataclasses.asdict(case), "shape": case.sizes}
    row["output_bytes"] = calls.input.numel() * calls.input.element_size()
    sides = {"native": native, "truncdet": ours}
    for side, call in sides.items():
        row[f"{side}_ms"] = measure.median_ms(call, device, repeats)
        row[f"{side}_bits_equal"] = measure.repeats_equal(call)
        row[f"{side}_peak_bytes"] = measure.peak_bytes(call, device)
    with deterministic_switch():
        try:
            call = calls.deterministic()
            row["deterministic_ms"] = measure.median_ms(call, device, repeats)
            row["deterministic_bits_equal"] = measure.repeats_equal(call, 2)
            del call
        except RuntimeError as error:  # the operator has no deterministic form
            row["deterministic_ms"] = row["deterministic_bits_equal"] = None
            row["deterministic_error"] = str(error).partition("\n")[0]
    exact = calls.double().native()()
    row["errors"] = {
        side: measure.errors(call(), exact)
        for side, call in (("native", native), ("truncdet", ours))
    }
    row["ratio"] = row["truncdet_ms"] / row["native_ms"]
    return row


def check_resample(row: dict[str, Any], with_limits: bool) -> list[Check]:
    """Bits in every row; times and errors in full-size rows."""
    name = f"{row['operator']} backward, {row['shape']}"
    checks = [holds(f"{name}: bits repeat", row["truncdet_bits_equal"])]
    if not with_limits:
        return checks
    checks.append(at_most(f"{name}: time", row["ratio"], LIMIT))
    for norm, ours in row["errors"]["truncdet"].items():
        limit = ERROR_LIMIT * row["errors"]["native"][norm]
        checks.append(at_most(f"{name}: error, {norm}", ours, limit))
    return checks
