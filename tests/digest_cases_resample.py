"""Named gradients of interpolate and the adaptive pools, for digests.json.

Gradients alone: the forwards are torch's, whose bits differ between CPU and CUDA.
"""

import torch
from exact_arithmetic import FLOATS
from roi_cases import hashed_words, values

# mode, input size, output size, align_corners, scales (0: from the sizes)
RESIZES = {
    "linear": ("linear", (2, 3, 37), (90,), False, [2.45]),
    "bilinear_x2": ("bilinear", (2, 5, 12, 19), (24, 38), False, [2.0, 2.0]),
    "bilinear_down": ("bilinear", (2, 5, 31, 40), (9, 13), False, [0.3, 0.3333]),
    "bilinear_corners": ("bilinear", (1, 4, 9, 7), (100, 61), True, [0.0, 0.0]),
    "bicubic_x2": ("bicubic", (2, 5, 12, 19), (24, 38), False, [2.0, 2.0]),
    "bicubic_corners": ("bicubic", (1, 3, 11, 8), (30, 5), True, [0.0, 0.0]),
    "trilinear": ("trilinear", (1, 3, 4, 9, 7), (7, 18, 21), False, [1.9, 0.0, 3.0]),
    "bilinear_large": ("bilinear", (2, 3, 160, 170), (250, 333), False, [0.0, 0.0]),
    "trilinear_large": ("trilinear", (2, 5, 8, 50, 60), (13, 90, 110), False, [0.0, 0.0, 0.0]),
}
POOLS = {
    "overlapping": ((2, 3, 26, 33), (7, 9)),
    "more_windows": ((2, 3, 5, 7), (11, 16)),
    "volume": ((1, 2, 5, 9, 8), (3, 4, 5)),
}


def short(dtype):
    return str(dtype).removeprefix("torch.")


def resize(name, dtype, channels_last=False):
    mode, size, outputs, align_corners, scales = RESIZES[name]

    def run(device):
        grad = values((*size[:2], *outputs), 31, dtype, device)
        if channels_last:
            grad = grad.contiguous(memory_format=torch.channels_last)
        return [torch.ops.truncdet.interpolate_backward(grad, size, mode, align_corners, scales)]

    return run


def average(name, dtype):
    size, windows = POOLS[name]

    def run(device):
        grad = values((*size[:2], *windows), 32, dtype, device)
        operator = f"adaptive_avg_pool{len(windows)}d_backward"
        return [getattr(torch.ops.truncdet, operator)(grad, size)]

    return run


def largest(name, dtype):
    size, windows = POOLS[name]

    def run(device):
        # All cells differ, so that the indices are those of any forward.
        count = int(torch.tensor(size[2:]).prod())
        order = torch.from_numpy(hashed_words(count, 33).argsort().astype("int64"))
        x = order.reshape(1, 1, *size[2:]).to(torch.float32).expand(size)
        _, indices = torch.ops.aten.adaptive_max_pool2d(x.to(device), windows)
        grad = values((*size[:2], *windows), 34, dtype, device)
        return [torch.ops.truncdet.adaptive_max_pool2d_backward(grad, indices, size)]

    return run


CASES = {f"interpolate/{name}/float32": resize(name, torch.float32) for name in RESIZES}
CASES["interpolate/bilinear_down/channels_last/float32"] = lambda device: [
    resize("bilinear_down", torch.float32, True)(device)[0].transpose(1, 3).contiguous()
]
for _dtype in FLOATS:
    for _name in ("bilinear_down", "bicubic_x2"):
        CASES[f"interpolate/{_name}/{short(_dtype)}"] = resize(_name, _dtype)
    for _name in POOLS:
        CASES[f"adaptive_avg_pool/{_name}/{short(_dtype)}"] = average(_name, _dtype)
        if len(POOLS[_name][1]) == 2:
            CASES[f"adaptive_max_pool/{_name}/{short(_dtype)}"] = largest(_name, _dtype)
