"""The digest cases of roi_align_rotated."""

import torch
from exact_arithmetic import FLOATS
from rotated_cases import SHAPES, Case

import truncdet

REAL = Case((2, 40, 25, 34), 64, (7, 7), 0.25, largest=0.5)


def rotated_cases(named, short):
    """Registers the cases with `named`; `short` names a dtype."""
    cases = {
        "ratio2": REAL._replace(ratio=2),
        "ratio3_clockwise_not_aligned": REAL._replace(ratio=3, aligned=False, clockwise=True),
        "mask_head": SHAPES["mask_head"],
        "many_bins": SHAPES["28x28_bins"],
        "quarter_turns": SHAPES["quarter_turns"],
        "large_angles": SHAPES["large_angles"],
        "crowd": SHAPES["600_rois_on_a_tile"],
    }
    for name, case in cases.items():
        _add(named, f"roi_align_rotated/{name}/float32", case, torch.float32)
    for dtype in FLOATS:
        _add(named, f"roi_align_rotated/adaptive/{short(dtype)}", REAL, dtype)
        _add(named, f"roi_align_rotated/nonfinite/{short(dtype)}", SHAPES["clockwise"], dtype, True)


def _add(named, name, case, dtype, poison=False):
    @named(name)
    def run(device):
        input = case.make_input(dtype, device).requires_grad_()
        grad = case.make_grad(dtype, device)
        if poison:
            grad[0, 0, 0, 0], grad[1, 1, 1, 0], grad[2, 1, 1, 1] = torch.nan, torch.inf, -torch.inf
        rois = case.make_rois(dtype, device)
        out = truncdet.roi_align_rotated(input, rois, *case.rest_of_call)
        return [out.detach(), *torch.autograd.grad(out, input, grad)]
