"""What the tests of interpolate and the adaptive pools share: hostile axes, calls, weights."""

import pytest
import torch
from exact_arithmetic import FLOATS

from truncdet._resample_reference import AVERAGE, CUBIC, LINEAR, Axis, axis_weights, backward

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).split(".")[1])
each_kind = pytest.mark.parametrize(
    "kind", [LINEAR, CUBIC, AVERAGE], ids=["linear", "cubic", "average"]
)

# (cells, outputs, scale_factor or 0, align_corners): one cell, one output, sizes that keep, halve
# or double, huge ratios both ways, and scales that no size has.
HOSTILE = [
    (1, 1, 0.0, False),
    (1, 7, 0.0, False),
    (1, 7, 0.0, True),
    (7, 1, 0.0, False),
    (7, 1, 0.0, True),
    (5, 5, 0.0, True),
    (5, 10, 0.0, False),
    (5, 10, 0.0, True),
    (10, 5, 2.0**-1, False),
    (3, 400, 0.0, False),
    (3, 400, 0.0, True),
    (400, 3, 0.0, False),
    (400, 3, 0.0, True),
    (2, 999, 0.0, True),
    (30, 3, 0.1, False),
    (29, 9, 0.3333, False),
    (5, 36, 7.3, False),
    (7, 18, 2.6, False),
    (64, 191, 2.999, False),
    (64, 65, 1.0299, False),
    (33, 57, 0.0, False),
    (33, 57, 0.0, True),
    (1000, 997, 0.0, True),
    # A scale that contradicts the sizes ends at the border.
    (4, 50, 0.5, False),
    (4, 50, 1e-300, False),
    (50, 4, 1e300, False),
]
# Calls of interpolate: mode, input size, keywords.
CALLS = [
    ("linear", (5,), {"size": 12}),
    ("linear", (9,), {"scale_factor": 0.3333, "align_corners": False}),
    ("bilinear", (5, 7), {"scale_factor": 2}),
    ("bilinear", (5, 7), {"scale_factor": (7.3, 0.5), "align_corners": False}),
    ("bilinear", (6, 5), {"scale_factor": 1.7, "recompute_scale_factor": True}),
    ("bilinear", (5, 7), {"size": (1, 30), "align_corners": True}),
    ("bilinear", (12, 30), {"size": (5, 4)}),
    ("bicubic", (5, 7), {"scale_factor": 2}),
    ("bicubic", (4, 3), {"scale_factor": (2.6, 1.9)}),
    ("bicubic", (7, 5), {"size": (3, 16), "align_corners": True}),
    ("bicubic", (1, 2), {"size": (9, 9)}),
    ("trilinear", (3, 4, 5), {"scale_factor": (2, 0.5, 1.5)}),
    ("trilinear", (3, 4, 2), {"size": (4, 1, 7), "align_corners": True}),
    ("area", (5, 7), {"size": (2, 3)}),
]
each_call = pytest.mark.parametrize(
    ("mode", "size", "keywords"), CALLS, ids=[f"{m}{i}" for i, (m, *_) in enumerate(CALLS)]
)


def axis_of(hostile, kind):
    """The axis, and whether corners are aligned, as interpolate would hand them on."""
    cells, outputs, scale, align_corners = hostile
    return Axis(cells, outputs, 0.0 if kind == AVERAGE else scale, False), align_corners


def dense_weights(axis, kind, align_corners, like):
    """Weights [outputs, cells] from what each output uses alone; for pooling, the sizes."""
    weights = axis_weights(axis, kind, align_corners, like)
    dense = like.new_zeros(axis.outputs, axis.cells)
    for o in range(axis.outputs):
        first = int(weights.first[o])
        if kind == AVERAGE:
            dense[o, first : first + int(weights.values[o])] = weights.values[o]
            continue
        for tap, weight in enumerate(weights.values[o]):
            if weight != 0:
                dense[o, first + tap] = weight
    return dense


def run_axis(operator, grad, axis, kind, align_corners):
    """The primitive along x alone: grad [planes, outputs] to [planes, cells]."""
    five = grad.reshape(len(grad), 1, 1, axis.outputs, 1)
    copied = 3 + 4 * axis.copied
    out = operator(five, 1, 1, axis.cells, kind, align_corners, 0.0, 0.0, axis.scale, copied)
    return out.reshape(len(grad), axis.cells)


def random_floats(shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def interpolation_matrix(mode, size, keywords, device="cpu"):
    """torch's forward in float64 as a matrix [cells, outputs], through unit inputs."""
    count = int(torch.tensor(size).prod())
    units = torch.eye(count, dtype=torch.float64, device=device).reshape(count, 1, *size)
    return torch.nn.functional.interpolate(units, mode=mode, **keywords).flatten(1)


reference = backward
