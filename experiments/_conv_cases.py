"""Convolutions and batch normalisations whose backward is repeated on equal inputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from _measure import repeats_equal
from torch import Tensor, nn

# How cuDNN may choose a convolution's algorithm: (benchmark, deterministic).
SETTINGS = {
    "fastest (benchmark)": (True, False),
    "heuristics": (False, False),
    "deterministic": (False, True),
}
REPEATS = 10


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """cuDNN's switches, put back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = SETTINGS[name]
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution with square kernels on square images."""

    dimensions: int
    batch: int
    inputs: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @property
    def name(self) -> str:
        size = "x".join([str(self.size)] * self.dimensions)
        text = f"{self.batch}x{self.inputs}x{size} to {self.outputs}, kernel {self.kernel}"
        text += f", stride {self.stride}" if self.stride > 1 else ""
        text += f", groups {self.groups}" if self.groups > 1 else ""
        text += f", {str(self.dtype).removeprefix('torch.')}"
        return text + (", channels_last" if self.channels_last else "")

    def tiny(self) -> Conv:
        return dataclasses.replace(self, batch=2, size=max(self.kernel, self.size // 8))

    def gradients(self, device: torch.device) -> dict[str, Callable[[], Tensor]]:
        """The backward's two results by what they are of."""
        torch.manual_seed(0)
        made = nn.Conv2d if self.dimensions == 2 else nn.Conv3d
        layer = made(
            self.inputs, self.outputs, self.kernel, self.stride, self.kernel // 2,
            groups=self.groups, bias=False,
        ).to(device, self.dtype)  # fmt: skip
        x = torch.randn(self.batch, self.inputs, *[self.size] * self.dimensions, device=device)
        x = x.to(self.dtype)
        if self.channels_last:
            last = torch.channels_last if self.dimensions == 2 else torch.channels_last_3d
            x, layer = x.contiguous(memory_format=last), layer.to(memory_format=last)
        x.requires_grad_()
        grad = torch.randn_like(layer(x))
        return {
            "convolution, weight gradient": lambda: _gradient(layer(x), layer.weight, grad),
            "convolution, input gradient": lambda: _gradient(layer(x), x, grad),
        }


@dataclasses.dataclass(frozen=True)
class Norm:
    """A batch normalisation of square images."""

    dimensions: int
    batch: int
    channels: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.channels}x" + "x".join([str(self.size)] * self.dimensions)

    def tiny(self) -> Norm:
        return dataclasses.replace(self, batch=2, size=self.size // 8)

    def gradients(self, device: torch.device) -> dict[str, Callable[[], Tensor]]:
        torch.manual_seed(0)
        layer = (nn.BatchNorm2d if self.dimensions == 2 else nn.BatchNorm3d)(self.channels)
        layer.to(device)
        x = torch.randn(self.batch, self.channels, *[self.size] * self.dimensions, device=device)
        x.requires_grad_()
        grad = torch.randn_like(x)
        return {
            "batch norm, weight gradient": lambda: _gradient(layer(x), layer.weight, grad),
            "batch norm, input gradient": lambda: _gradient(layer(x), x, grad),
        }


CASES: tuple[Conv | Norm, ...] = (
    *(
        Conv(2, 16, inputs, outputs, size, kernel, stride)
        for inputs, outputs, size, kernel, stride in (
            (3, 64, 224, 7, 2), (64, 64, 56, 3, 1), (64, 128, 56, 3, 2), (256, 256, 14, 3, 1),
            (512, 512, 7, 3, 1), (64, 256, 56, 1, 1), (8, 16, 32, 5, 1), (16, 16, 128, 3, 1),
        )
    ),
    Conv(2, 16, 128, 128, 28, 3, groups=32),
    Conv(2, 16, 64, 64, 56, 3, dtype=torch.float16, channels_last=True),
    Conv(2, 16, 64, 64, 56, 3, dtype=torch.bfloat16, channels_last=True),
    Conv(2, 16, 64, 64, 56, 3, channels_last=True),
    *(
        Conv(3, 4, inputs, outputs, size, 3, stride)
        for inputs, outputs, size, stride in (
            (1, 16, 64, 1), (16, 32, 32, 1), (32, 64, 32, 2), (64, 64, 16, 1), (128, 128, 8, 1),
        )
    ),
    Conv(3, 4, 32, 32, 32, 3, dtype=torch.float16),
    Norm(2, 16, 64, 56),
    Norm(2, 16, 512, 7),
    Norm(3, 4, 32, 32),
)  # fmt: skip


def moving(
    name: str, device: torch.device, cases: Sequence[Conv | Norm] = CASES
) -> list[dict[str, object]]:
    """By gradient: the cases whose bits are not the same in all repetitions, under a setting."""
    found: dict[str, tuple[list[str], int]] = {}
    with setting(name):
        for case in cases:
            for operator, gradient in case.gradients(device).items():
                which, number = found.get(operator, ([], 0))
                gradient()  # the benchmark chooses in the first call
                if not repeats_equal(gradient, REPEATS):
                    which = [*which, case.name]
                found[operator] = (which, number + 1)
    return [
        {"operator": operator, "setting": name, "moving": len(which), "cases": n, "which": which}
        for operator, (which, n) in found.items()
    ]


def _gradient(out: Tensor, of: Tensor, grad: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(out, of, grad)
    return gradient
