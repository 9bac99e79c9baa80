"""The digest cases of roi_pool, ps_roi_align and ps_roi_pool."""

import torch
from exact_arithmetic import FLOATS
from pool_cases import EXACT_ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL, ROI_POOL
from roi_cases import SHAPES, Case

REAL = Case((2, 6, 25, 34), 64, (7, 7), 0.25, largest=0.5)
OPERATORS = {
    "roi_pool": ROI_POOL,
    "roi_pool_exact": EXACT_ROI_POOL,
    "ps_roi_align": PS_ROI_ALIGN,
    "ps_roi_pool": PS_ROI_POOL,
}


def pool_cases(named, short):
    """Registers the cases with `named`; `short` names a dtype."""
    for name, op in OPERATORS.items():
        for dtype in FLOATS:
            _add(named, f"{name}/real/{short(dtype)}", op, REAL, dtype)
        _add(named, f"{name}/nonfinite/float32", op, SHAPES["odd_sizes"], torch.float32, True)
        _add(named, f"{name}/crowd/float32", op, SHAPES["600_rois_on_a_tile"], torch.float32)


def _add(named, name, op, case, dtype, poison=False):
    @named(name)
    def run(device):
        input, boxes, grad = op.make(case, dtype, device)
        if poison:
            grad[0, 0, 0, 0], grad[1, 1, 1, 0], grad[2, 1, 1, 1] = torch.nan, torch.inf, -torch.inf
        return list(op.gradient(case, input, boxes, grad))
