"""The digest cases of grid_sample and ms_deform_attn."""

import torch
from exact_arithmetic import FLOATS
from roi_cases import values

import truncdet


def sampling_cases(named, short):
    """Registers the cases with `named`; `short` names a dtype."""
    ways = {
        "bilinear": (2, "bilinear", "zeros", False),
        "bilinear_border": (2, "bilinear", "border", True),
        "bilinear_reflection": (2, "bilinear", "reflection", False),
        "nearest": (2, "nearest", "zeros", False),
        "bicubic": (2, "bicubic", "reflection", True),
        "trilinear": (3, "bilinear", "zeros", False),
        "nearest_3d": (3, "nearest", "border", False),
    }
    for name, way in ways.items():
        for dtype in FLOATS:
            if dtype == torch.float32 or name in ("bilinear", "trilinear"):
                _add_grid_sample(named, f"grid_sample/{name}/{short(dtype)}", dtype, *way)
    for dtype in FLOATS:
        _add_attention(named, f"ms_deform_attn/{short(dtype)}", dtype, False)
        _add_attention(named, f"ms_deform_attn/few/{short(dtype)}", dtype, False, 5, 24)
        if dtype.itemsize == 2:
            _add_attention(named, f"ms_deform_attn/wide/{short(dtype)}", dtype, True)


def _add_grid_sample(named, name, dtype, dims, mode, padding, align):
    @named(name)
    def run(device):
        input = values((2, 37, *(5, 11, 13)[-dims:]), 1, dtype, device)
        grid = 1.5 * values((2, *(3, 17, 19)[-dims:], dims), 2, torch.float64, device, spread=1)
        grad = values((2, 37, *grid.shape[1:-1]), 3, dtype, device)
        # The backward alone: the forward is PyTorch's, whose bits are not the same everywhere.
        numbers = (("bilinear", "nearest", "bicubic").index(mode),)
        numbers += (("zeros", "border", "reflection").index(padding),)
        backward = torch.ops.truncdet.grid_sample_backward
        return list(backward(grad, input, grid.to(dtype), *numbers, align, True, True))


def _add_attention(named, name, dtype, wide, queries=50, channels=20):
    @named(name)
    def run(device):
        kind = torch.float32 if wide else dtype
        shapes = torch.tensor([[7, 9], [4, 5], [2, 3], [1, 1]], device=device)
        starts = torch.tensor([0, 63, 83, 89], device=device)
        value = values((2, 90, 3, channels), 4, dtype, device).requires_grad_()
        where = 0.7 * values((2, queries, 3, 4, 3, 2), 5, torch.float64, device, spread=1) + 0.5
        where = where.to(kind).requires_grad_()
        weights = values((2, queries, 3, 4, 3), 6, kind, device).requires_grad_()
        out = truncdet.ms_deform_attn(value, shapes, starts, where, weights)
        return [out.detach(), *torch.autograd.grad(out, (value, where, weights), out.detach())]
