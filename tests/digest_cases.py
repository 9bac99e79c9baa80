"""Named calls whose bits are committed in digests.json: CPU and every GPU must give the same.

Inputs are written formulas (see roi_cases), so a digest changes only where the library's bits do.
"""

import digest_cases_resample
import digest_cases_scatter
import torch
from digest_cases_deform import deform_cases
from digest_cases_loss import loss_cases
from digest_cases_pool import pool_cases
from digest_cases_render_vertices import render_vertices_cases
from digest_cases_rotated import rotated_cases
from digest_cases_sampling import sampling_cases
from exact_arithmetic import FLOATS
from roi_cases import SHAPES, Case, hashed_words, values

import truncdet

CASES = {}
"""name: function of a device that returns the tensors to hash."""

REAL = Case((2, 40, 25, 34), 64, (7, 7), 0.25, largest=0.5)
ROI_ALIGN = {
    "adaptive": REAL,
    "ratio2": REAL._replace(ratio=2),
    "ratio3_not_aligned": REAL._replace(ratio=3, aligned=False),
    "mask_head": SHAPES["mask_head"],
    "many_bins": SHAPES["28x28_bins"],
    "wide": SHAPES["wider_than_a_table"],
    "crowd": SHAPES["600_rois_on_a_tile"],
}


def named(name):
    def register(function):
        assert name not in CASES, name
        CASES[name] = function
        return function

    return register


def short(dtype):
    return str(dtype).removeprefix("torch.")


def add_roi_align(name, case, dtype, pool_mode, poison=False):
    @named(f"roi_align/{pool_mode}/{name}/{short(dtype)}")
    def run(device):
        input = case.make_input(dtype, device).requires_grad_()
        grad = case.make_grad(dtype, device)
        if poison:
            grad[0, 0, 0, 0], grad[1, 1, 1, 0], grad[2, 1, 1, 1] = torch.nan, torch.inf, -torch.inf
        boxes = case.make_boxes(dtype, device)
        out = truncdet.roi_align(input, boxes, *case.rest_of_call, pool_mode)
        return [out.detach(), *torch.autograd.grad(out, input, grad)]


def index(count, cells, seed, device):
    words = (hashed_words(count, seed) % cells).astype("int64")
    return torch.from_numpy(words).to(device)


def spread_out(source):
    """One large slice, beside which float32's other sums need the second limb of `exact`."""
    if source.dtype != torch.float16:
        source[0, 0] *= 2.0**30
    return source


def add_sums(dtype, exact):
    tail = f"{'exact/' if exact else ''}{short(dtype)}"

    @named(f"scatter_add/{tail}")
    def scatter_add(device):
        input = values((4, 37, 3), 1, dtype, device).requires_grad_()
        source = spread_out(values((4, 500, 3), 2, dtype, device)).requires_grad_()
        where = index(4 * 500 * 3, 37, 3, device).reshape(4, 500, 3)
        out = truncdet.scatter_add(input, 1, where, source, exact=exact)
        return [out.detach(), *torch.autograd.grad(out, (input, source), out.detach())]

    @named(f"index_add/{tail}")
    def index_add(device):
        input = values((29, 6), 4, dtype, device).requires_grad_()
        source = spread_out(values((1000, 6), 5, dtype, device)).requires_grad_()
        out = truncdet.index_add(input, 0, index(1000, 29, 6, device), source, exact=exact)
        return [out.detach(), *torch.autograd.grad(out, (input, source), out.detach())]


def add_rounding(dtype):
    @named(f"truncate/{short(dtype)}")
    def truncate(device):
        x = values((3000,), 7, dtype, device, spread=40).requires_grad_()
        out = truncdet.truncate(x, 6, grad_bits=4)
        return [out.detach(), *torch.autograd.grad(out, x, x.detach())]

    @named(f"snap/{short(dtype)}")
    def snap(device):
        return [truncdet.snap(values((3000,), 8, dtype, device, spread=12), 16)]


for _name, _case in ROI_ALIGN.items():
    add_roi_align(_name, _case, torch.float32, "avg")
for _dtype in FLOATS:
    if _dtype != torch.float32:
        add_roi_align("adaptive", REAL, _dtype, "avg")
    add_roi_align("nonfinite", SHAPES["odd_sizes"], _dtype, "avg", poison=True)
    add_roi_align("small", SHAPES["odd_sizes"], _dtype, "max")
    for _exact in (False, True):
        add_sums(_dtype, _exact)
    add_rounding(_dtype)
    CASES |= digest_cases_scatter.cases(_dtype, short(_dtype), values, index)
add_roi_align("ratio2", SHAPES["31_channels"]._replace(ratio=2), torch.float32, "max")
add_roi_align("nonfinite", SHAPES["odd_sizes"], torch.float32, "max", poison=True)
sampling_cases(named, short)
deform_cases(named, short)
rotated_cases(named, short)
loss_cases(named, short, index)
pool_cases(named, short)
render_vertices_cases(named, short)

CASES.update(digest_cases_resample.CASES)


def digest_of(name, device):
    """The digest as it is written in digests.json."""
    return truncdet.digest(CASES[name](torch.device(device))).hex
