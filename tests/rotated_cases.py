"""What the tests of roi_align_rotated share: named cases from the hash of roi_cases, both paths."""

import math
from typing import NamedTuple

import pytest
import torch
from roi_cases import hashed_words, uniform, values

from truncdet import _roi_align_rotated_reference as reference
from truncdet import fixedpoint
from truncdet._rotated_samples import geometry

# Schedules of the CUDA backward.
AUTO, WIDE, PAIRS, ATOMIC, COMPUTED = range(5)


def stack_rois(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def hashed_rois(rois, images, height, width, seed, largest=0.7):
    """Rows [K, 6] in float32: inside, across the border and, some, wholly outside of the map."""
    size = torch.tensor([width, height], dtype=torch.float64)
    centre = uniform((rois, 2), seed, -0.15, 1.15) * size
    sides = uniform((rois, 2), seed + 1, 0.0, largest) * size
    angle = uniform((rois, 1), seed + 2, -2 * math.pi, 2 * math.pi)
    image = torch.from_numpy((hashed_words(rois, seed + 3) % images).astype("float64"))
    return torch.cat([image[:, None], centre, sides, angle], 1).to(torch.float32)


class Case(NamedTuple):
    """One call; `boxes` overrides the hashed RoIs."""

    shape: tuple[int, int, int, int]
    rois: int
    bins: tuple[int, int]
    scale: float = 1.0
    ratio: int = 0
    aligned: bool = True
    clockwise: bool = False
    boxes: torch.Tensor | None = None
    largest: float = 0.7
    seed: int = 1

    def make_rois(self, dtype=torch.float32, device="cpu"):
        images, _, height, width = self.shape
        boxes = self.boxes
        if boxes is None:
            sizes = (height / self.scale, width / self.scale)
            boxes = hashed_rois(self.rois, max(images, 1), *sizes, self.seed, self.largest)
        return boxes.to(fixedpoint.compute_dtype(dtype)).to(device)

    def make_input(self, dtype=torch.float32, device="cpu"):
        return values(self.shape, self.seed + 10, dtype, device)

    def make_grad(self, dtype=torch.float32, device="cpu"):
        return values((self.rois, self.shape[1], *self.bins), self.seed + 20, dtype, device)

    @property
    def rest(self):
        """The arguments after the RoIs, of the operator's forward."""
        return (*self.bins, self.scale, self.ratio, self.aligned, self.clockwise)

    @property
    def rest_of_call(self):
        """The arguments after the RoIs, of the public function."""
        return (self.bins, self.scale, self.ratio, self.aligned, self.clockwise)


def forward(case, input, rois):
    """The operator as the dispatcher finds it: compiled where there is an extension."""
    return torch.ops.truncdet.roi_align_rotated(input, rois, *case.rest)


def backward(case, grad, rois, channels_last=False):
    return torch.ops.truncdet.roi_align_rotated_backward(
        grad, rois, *case.shape, *case.rest, channels_last
    )


def reference_forward(case, input, rois):
    return reference.forward(input, rois, *case.rest)


def reference_backward(case, grad, rois, channels_last=False):
    return reference.backward(grad, rois, *case.shape, *case.rest, channels_last)


def scheduled(case, grad, rois, schedule, channels_last=False):
    """The CUDA backward under one schedule, or None where the shape does not fit it."""
    op = torch.ops.truncdet._roi_align_rotated_backward_scheduled
    try:
        return op(grad, rois, *case.shape, *case.rest, channels_last, schedule)
    except RuntimeError as error:
        if schedule in (WIDE, PAIRS, COMPUTED) and "does not fit the schedule" in str(error):
            return None
        raise


def matrices(case, rois):
    """The reference's image [K] and matrix of every RoI [K, PH, PW, H, W]."""
    cells = case.shape[2:]
    rest = (case.scale, case.ratio, case.aligned, case.clockwise)
    roi = geometry(rois, case.shape[0], cells, case.bins, *rest)
    found = [reference.weights_of(roi, k, cells, case.bins) for k in range(len(rois))]
    return roi.image, torch.stack(found).reshape(-1, *case.bins, *cells)


# A box that touches one cell alone, (1, 1), with weight one: the sample is exactly on it.
ONE_CELL = (0.0, 1.5, 1.5, 1.0, 1.0, 0.7)


def one_cell_case(rois):
    return Case((1, 1, 3, 3), rois, (1, 1), ratio=1, boxes=stack_rois(ONE_CELL).repeat(rois, 1))


def one_cell_sum(numbers):
    """The gradient of cell (1, 1) whose contributions are `numbers`, as a 1-d tensor of one."""
    case = one_cell_case(numbers.numel())
    rois = case.make_rois(numbers.dtype, numbers.device)
    out = backward(case, numbers.reshape(-1, 1, 1, 1), rois)
    return out[0, 0, 1, 1].reshape(1)


QUARTER = math.pi / 2
SHAPES = {
    "one_of_everything": Case((1, 1, 1, 1), 1, (1, 1), boxes=stack_rois((0, 0.5, 0.5, 1, 1, 0.3))),
    "one_row": Case((2, 3, 1, 9), 5, (2, 3)),
    "one_column": Case((2, 3, 9, 1), 5, (3, 2)),
    "odd_sizes": Case((3, 5, 13, 7), 9, (3, 5), scale=0.25),
    "clockwise": Case((2, 2, 11, 12), 9, (3, 4), clockwise=True),
    "not_aligned": Case((2, 2, 11, 12), 9, (3, 4), aligned=False),
    "not_aligned_and_thin": Case((2, 2, 9, 9), 9, (2, 2), aligned=False, largest=0.2),
    "ratio1": Case((1, 2, 9, 17), 7, (7, 7), ratio=1),
    "ratio2": Case((1, 2, 9, 17), 7, (7, 7), ratio=2),
    "ratio5": Case((1, 2, 9, 17), 7, (2, 7), ratio=5, largest=0.3),
    "31_channels": Case((1, 31, 9, 11), 4, (3, 3)),
    "33_channels": Case((2, 33, 9, 11), 4, (3, 3)),
    "65_channels": Case((1, 65, 9, 18), 4, (7, 7)),
    "mask_head": Case((1, 3, 20, 20), 3, (14, 14)),
    "28x28_bins": Case((1, 2, 20, 24), 2, (28, 28), ratio=2),
    "40x3_bins": Case((1, 33, 12, 12), 2, (40, 3)),
    "many_bins_on_a_cell": Case((1, 40, 5, 6), 3, (9, 9), ratio=2, largest=0.2),
    "many_samples_a_bin": Case(
        (1, 2, 30, 40), 2, (1, 1), boxes=stack_rois((0, 20, 15, 39, 28, 0.1), (0, 9, 9, 70, 60, 1))
    ),
    "300_rois_on_a_tile": Case((1, 2, 8, 8), 300, (2, 2), ratio=1),
    "600_rois_on_a_tile": Case((2, 1, 5, 6), 1100, (1, 2), ratio=1),
    "same_boxes": Case(
        (1, 3, 6, 6), 40, (2, 2), boxes=stack_rois((0, 2.3, 3, 4, 3.7, 0.4)).repeat(40, 1)
    ),
    "empty_images_between": Case(
        (4, 2, 5, 5),
        3,
        (2, 2),
        boxes=stack_rois((3, 2, 2, 4, 4, 1), (1, 2, 2, 3, 4, 2), (3, 2, 3, 5, 5, -1)),
    ),
    "quarter_turns": Case(
        (1, 2, 8, 9),
        9,
        (3, 2),
        boxes=stack_rois(*[(0, 4, 3.5, 6, 3, turns * QUARTER) for turns in range(-4, 5)]),
    ),
    "large_angles": Case(
        (1, 2, 8, 9),
        6,
        (3, 2),
        boxes=stack_rois(
            *[(0, 4, 3.5, 6, 3, angle) for angle in (1e2, -1e3, 1e4, 1e5, 1.6e6, -1647099)]
        ),
    ),
    "mirrored": Case(
        (1, 2, 8, 8),
        3,
        (3, 3),
        ratio=2,
        boxes=stack_rois((0, 4, 4, -5, 3, 0.4), (0, 4, 3, 5, -4, 0), (0, 5, 4, -5, -6, -2)),
    ),
    "no_size": Case(
        (1, 2, 8, 8), 2, (3, 3), ratio=2, boxes=stack_rois((0, 3, 3, 0, 0, 1), (0, 2, 1, 0, 6, 1))
    ),
    "on_the_border": Case(
        (1, 2, 6, 6),
        4,
        (2, 2),
        ratio=2,
        boxes=stack_rois(
            (0, -0.5, 3, 2, 2, 0),
            (0, 6.5, 3, 2, 2, 0.01),
            (0, 3, -0.5, 2, 2, 0),
            (0, 3, 6.5, 2, 2, 3),
        ),
    ),
    "larger_than_the_map": Case(
        (1, 2, 6, 5),
        3,
        (2, 3),
        boxes=stack_rois((0, 3, 3, 300, 200, 1), (0, 90, 3, 250, 4, 0), (0, 3, 3, 9e4, 3e3, 2)),
    ),
    "no_rois": Case((2, 3, 4, 5), 0, (2, 2)),
    "no_images": Case((0, 3, 4, 5), 0, (2, 2)),
    "no_channels": Case((2, 0, 4, 5), 3, (2, 2)),
    "no_rows": Case((2, 3, 0, 5), 3, (2, 2), boxes=stack_rois(*[(0, 0, 0, 2, 2, 1)] * 3)),
    "no_columns": Case((2, 3, 4, 0), 3, (2, 2), boxes=stack_rois(*[(1, 0, 0, 2, 2, 1)] * 3)),
}
each_case = pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
