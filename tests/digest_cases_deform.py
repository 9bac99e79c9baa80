"""The digest cases of deform_conv2d: its sampling, since the matrix products are a library's."""

import torch
from deform_cases import Deform
from exact_arithmetic import FLOATS
from roi_cases import values

WAYS = {
    "plain": Deform(2, 37, 1, 1, 1, (11, 13), masked=False),
    "modulated": Deform(2, 37, 1, 1, 1, (11, 13)),
    "groups": Deform(3, 72, 1, 1, 2, (9, 14), (2, 3), (2, 1), (1, 2), (1, 2)),
}


def deform_cases(named, short):
    """Registers the cases with `named`; `short` names a dtype."""
    for name, case in WAYS.items():
        for dtype in FLOATS:
            if dtype == torch.float32 or name == "groups":
                _add(named, f"deform_sample/{name}/{short(dtype)}", case, dtype)
    _add(named, "deform_sample/nonfinite/float32", WAYS["modulated"], torch.float32, poison=True)


def _add(named, name, case, dtype, poison=False):
    @named(name)
    def run(device):
        places = case.offset_groups * case.taps
        input = values((case.n, case.channels, *case.size), 1, dtype, device)
        offset = values((case.n, 2 * places, *case.out), 2, torch.float64, device, spread=1)
        offset = (4 * offset).to(dtype)
        mask = values((case.n, places, *case.out), 3, dtype, device) if case.masked else None
        shape = (case.channels, case.taps, case.n, case.out[0] * case.out[1])
        grad = values(shape, 4, dtype, device)
        if poison:
            grad[0, 0, 0, 5], grad[1, 1, 1, 6] = torch.nan, torch.inf
            mask[0, 3, 1, 1], mask[1, 4, 2, 2] = torch.inf, -torch.inf
            offset[0, 2, 3, 3], offset[1, 5, 4, 4] = torch.nan, torch.inf
        given = (input, offset, mask, case.geometry)
        columns = torch.ops.truncdet._deform_sample(*given)
        gradients = torch.ops.truncdet._deform_sample_backward(grad, *given, True, True)
        return [columns, *(x for x in gradients if x.numel() > 0)]
