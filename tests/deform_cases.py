"""What the tests of deform_conv2d share: shapes and inputs."""

from typing import NamedTuple

import torch
from sampling_cases import rand, randn

NAN, INF = torch.nan, torch.inf


class Deform(NamedTuple):
    """A call's sizes; steps are (rows, columns)."""

    n: int = 2
    channels: int = 4
    outputs: int = 6
    groups: int = 1
    offset_groups: int = 1
    size: tuple[int, int] = (6, 7)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    masked: bool = True

    @property
    def steps(self):
        return self.stride, self.padding, self.dilation

    @property
    def geometry(self):
        return [*self.kernel, *self.stride, *self.padding, *self.dilation]

    @property
    def taps(self):
        return self.kernel[0] * self.kernel[1]

    @property
    def out(self):
        sizes = zip(self.size, self.kernel, *self.steps, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    def sampled(self, dtype, device="cpu"):
        """(input, offset, mask); about a quarter of the samples lie outside."""
        places = self.offset_groups * self.taps
        input = randn((self.n, self.channels, *self.size), dtype, device, 1)
        offset = 2 * randn((self.n, 2 * places, *self.out), torch.float64, device, 2)
        mask = rand((self.n, places, *self.out), dtype, device, 3) if self.masked else None
        return input, offset.to(dtype), mask

    def columns_grad(self, dtype, device="cpu", seed=4):
        shape = (self.channels, self.taps, self.n, self.out[0] * self.out[1])
        return randn(shape, dtype, device, seed)

    def call(self, dtype, device="cpu"):
        """(input, offset, weight, bias, mask) of the public function."""
        input, offset, mask = self.sampled(dtype, device)
        shape = (self.outputs, self.channels // self.groups, *self.kernel)
        weight = randn(shape, dtype, device, 5)
        return input, offset, weight, randn((self.outputs,), dtype, device, 6), mask

    def grad(self, dtype, device="cpu"):
        return randn((self.n, self.outputs, *self.out), dtype, device, 7)


SHAPES = {
    "plain": Deform(masked=False),
    "modulated": Deform(),
    "groups": Deform(groups=2, offset_groups=4, n=3),
    "odd": Deform(1, 6, 4, 2, 3, (8, 5), (2, 3), (2, 1), (0, 2), (2, 1)),
    "one tap": Deform(kernel=(1, 1), padding=(0, 0), stride=(3, 2)),
    "many channels": Deform(1, 70, 3, 1, 1, (3, 5), masked=False),
    "40 channels a group": Deform(2, 80, 3, 1, 2, (4, 9)),
    "tiles": Deform(2, 9, 3, 3, 1, (9, 13), (2, 2), padding=(2, 0)),
}


def results(op, case, grad, steps):
    """Output and the gradients of input, offset, weight, bias and, where there is one, mask."""
    input, offset, weight, bias, mask = case
    leaves = [x.detach().clone().requires_grad_() for x in case if x is not None]
    some = iter(leaves)
    input, offset, weight, bias, mask = (None if x is None else next(some) for x in case)
    out = op(input, offset, weight, bias, *steps, mask)
    return out, *torch.autograd.grad(out, leaves, grad)


def regular_places(case, device="cpu"):
    """The coordinates (y, x) that a case of one tap adds its offsets to, [2, OH, OW]."""
    steps = zip(case.out, case.stride, case.padding, strict=True)
    axes = [torch.arange(n, device=device) * step - pad for n, step, pad in steps]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))


def special_offsets(case, offset):
    """Offsets of a case of one tap that lead to all pairs of borders, cells, far and huge places.

    Where there are more places than pairs, the rest keeps its offsets.
    """
    far = [1e4, -1e4, 2.0**40, -(2.0**40), 1e30, -1e30, NAN, INF, -INF]
    axes = [
        torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, n - 1.0, n - 0.5, float(n), *far])
        for n in case.size
    ]
    pairs = torch.stack(torch.meshgrid(*axes, indexing="ij")).double().flatten(1).to(offset.device)
    regular = regular_places(case, offset.device)
    moved = (offset.double() + regular).flatten(2)
    moved[..., : pairs.size(1)] = pairs
    return (moved.view(offset.shape) - regular).to(offset.dtype)


SPECIAL = Deform(2, 5, 4, 1, 1, (30, 31), (1, 1), padding=(0, 0))
