"""What the tests of grid_sample and ms_deform_attn share: their inputs."""

import itertools

import pytest
import torch
from exact_arithmetic import FLOATS

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
WAYS = [
    (dims, mode, padding, align)
    for dims, mode, padding, align in itertools.product((2, 3), MODES, PADDINGS, (False, True))
    if dims == 2 or mode != "bicubic"
]
each_way = pytest.mark.parametrize(
    "way", WAYS, ids=lambda w: f"{w[0]}d-{w[1]}-{w[2]}{'-align' if w[3] else ''}"
)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).split(".")[1])
CELLS, PLACES = (4, 5, 6), (2, 3, 5)


def randn(shape, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def rand(shape, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def make_case(dims, dtype, device="cpu", n=2, channels=3, cells=CELLS, places=PLACES):
    """(input, grid, gradient of the output); a third of the places lie outside."""
    input = randn((n, channels, *cells[-dims:]), dtype, device, 1)
    grid = rand((n, *places[-dims:], dims), torch.float64, device, 2) * 3 - 1.5
    grad = randn((n, channels, *places[-dims:]), dtype, device, 3)
    return input, grid.to(dtype), grad


def special_grid(dims, sizes, align, dtype=torch.float64):
    """Borders, cells' centres and edges, far and huge places, in all pairs along x and y."""
    rows = []
    for size in reversed(sizes):  # x first, as in the last dimension of a grid
        cells = [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, size - 1.0, size - 0.5, float(size)]
        scale = max(size - 1, 1) if align else size
        at = [2 * c / scale - 1 if align else (2 * c + 1) / scale - 1 for c in cells]
        rows.append([*at, -1.0, 1.0, 3.5, -7.25, 1e4, -1e4, 2.0**40, -(2.0**40)])
    x, y = torch.meshgrid(*(torch.tensor(r, dtype=dtype) for r in rows[:2]), indexing="ij")
    axes = [x.flatten(), y.flatten()]
    if dims == 3:
        z = torch.tensor(rows[2], dtype=dtype)
        axes.append(z.repeat(x.numel() // len(z) + 1)[: x.numel()])
    places = torch.stack(axes, -1)
    return places.reshape(1, *([1] * (dims - 1)), -1, dims)


def make_attention(dtype, device="cpu", n=2, heads=2, channels=3, queries=6, points=2, wide=False):
    """Arguments of ms_deform_attn on three levels; a quarter of the places lie outside."""
    shapes = torch.tensor([[4, 3], [2, 2], [1, 5]], device=device)
    starts = torch.tensor([0, 12, 16], device=device)
    kind = torch.float32 if wide else dtype
    value = randn((n, 21, heads, channels), dtype, device, 4)
    locations = rand((n, queries, heads, 3, points, 2), torch.float64, device, 5) * 1.4 - 0.2
    weights = randn((n, queries, heads, 3, points), kind, device, 6)
    return value, shapes, starts, locations.to(kind), weights


def attention_grad(value, locations, seed=7):
    n, queries = locations.shape[:2]
    return randn((n, queries, value.size(2) * value.size(3)), value.dtype, value.device, seed)
