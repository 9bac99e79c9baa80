"""What the tests of scatter_add and index_add share: inputs, the two paths, the published bound."""

from fractions import Fraction

import pytest
import torch
from exact_arithmetic import FLOATS, fractions_of, half_ulp

from truncdet import fixedpoint
from truncdet._scatter import SCATTER_ADD, accumulate_reference


def on_cuda(input, index, src, exact, operator):
    """The CUDA kernel, for tensors of the CPU."""
    there = (x.to("cuda") for x in (input, index, src))
    return torch.ops.truncdet._accumulate(*there, exact, operator).cpu()


each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).split(".")[1])
each_exact = pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
each_path = pytest.mark.parametrize(
    "accumulate",
    [
        pytest.param(torch.ops.truncdet._accumulate, id="kernel"),
        pytest.param(accumulate_reference, id="reference"),
        pytest.param(on_cuda, id="cuda", marks=pytest.mark.cuda),
    ],
)
# On one cell, in equal numbers: their partial sums cancel, whatever the order.
CANCELLING = [1.0, -1.0, 2.0**-60, 2.0**24, -(2.0**24), 3e-5]
TWO = Fraction(2)


def one_cell(accumulate, values, *, existing=None, exact=False):
    """Sums a vector on one cell through the kernel or the reference."""
    if existing is None:
        existing = values.new_zeros(())
    index = torch.zeros((1, values.numel(), 1), dtype=torch.int64, device=values.device)
    out = accumulate(existing.reshape(1, 1, 1), index, values.reshape(1, -1, 1), exact, SCATTER_ADD)
    return out.reshape(())


def random_floats(shape, dtype, device, spread=8.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(shape, generator=generator, dtype=torch.float64))
    return (
        (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)
    )


def random_index(shape, cells, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, cells, shape, generator=generator).to(device)


def bound(values, result, exact):
    """The published bound of one cell on which `values` meet."""
    dtype, n = values.dtype, values.numel()
    amax = max(abs(v) for v in fractions_of(values))
    g = fixedpoint.headroom(n)
    two_limbs = exact or dtype == torch.float64
    quantised = n * amax * TWO ** ((2 if two_limbs else 1) * (g - 62))
    return quantised + half_ulp(fractions_of(result)[0], dtype)
