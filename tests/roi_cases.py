"""What the tests of roi_align share: inputs from an integer hash, named cases, the two paths.

Inputs come from a written formula and not from a generator, so that the committed digests do not
depend on the version of any library.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from exact_arithmetic import FLOATS

from truncdet import _build, fixedpoint
from truncdet import _roi_align_reference as reference

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).split(".")[1])
each_format = pytest.mark.parametrize(
    "memory_format",
    [torch.contiguous_format, torch.channels_last],
    ids=["contiguous", "channels_last"],
)
each_aligned = pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
each_ratio = pytest.mark.parametrize("ratio", [-1, 1, 2, 3], ids=lambda r: f"ratio{r}")
each_pool = pytest.mark.parametrize("pool_mode", ["avg", "max"])
needs_cuda_kernels = pytest.mark.skipif(
    not _build.has_extension("cuda"), reason="needs the compiled CUDA kernels"
)
# The reference alone would take minutes for what a kernel does in a second.
PERMUTATIONS = 1000 if _build.has_extension("cpu") else 20
AUTO, WIDE, PAIRS, ATOMIC = range(4)  # schedules of the CUDA backward


def hashed_words(count, seed):
    """`count` unsigned 64-bit words: the finaliser of MurmurHash3 on a counter."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word += np.uint64(seed) * np.uint64(0xD1342543DE82EF95 % (1 << 32))
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word ^= word >> np.uint64(33)
        word *= np.uint64(factor)
    return word ^ (word >> np.uint64(33))


def uniform(shape, seed, low=-1.0, high=1.0):
    """Float64 in [low, high), multiples of a 2^53rd of the width."""
    count = int(np.prod(shape, dtype=np.int64))
    unit = (hashed_words(count, seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(low + (high - low) * unit).reshape(shape)


def values(shape, seed, dtype=torch.float32, device="cpu", spread=8):
    """Numbers of both signs whose magnitudes spread over `spread` powers of two."""
    count = int(np.prod(shape, dtype=np.int64))
    power = (hashed_words(count, seed + 1000) % np.uint64(spread + 1)).astype(np.int64)
    scale = torch.ldexp(
        torch.ones(shape, dtype=torch.float64), -torch.from_numpy(power).reshape(shape)
    )
    return (uniform(shape, seed) * scale).to(dtype).to(device)


def hashed_boxes(rois, images, height, width, seed, largest=0.7, margin=0.25):
    """Rows [K, 5] in float32: inside, across the border and, some, wholly outside of the map."""
    size = torch.tensor([width, height], dtype=torch.float64)
    corner = uniform((rois, 2), seed, -margin, 1.0) * size
    extent = uniform((rois, 2), seed + 1, 0.0, largest) * size
    image = torch.from_numpy((hashed_words(rois, seed + 2) % np.uint64(images)).astype(np.float64))
    return torch.cat([image[:, None], corner, corner + extent], 1).to(torch.float32)


def permutations(count, number=PERMUTATIONS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(count, generator=generator) for _ in range(number)]


class Case(NamedTuple):
    """One call; `boxes` overrides the hashed ones."""

    shape: tuple[int, int, int, int]
    rois: int
    bins: tuple[int, int]
    scale: float = 1.0
    ratio: int = -1
    aligned: bool = True
    boxes: torch.Tensor | None = None
    largest: float = 0.7
    seed: int = 1

    def make_boxes(self, dtype=torch.float32, device="cpu"):
        images, _, height, width = self.shape
        boxes = self.boxes
        if boxes is None:
            sizes = (height / self.scale, width / self.scale)
            boxes = hashed_boxes(self.rois, images, *sizes, self.seed, self.largest)
        return boxes.to(fixedpoint.compute_dtype(dtype)).to(device)

    def make_input(self, dtype=torch.float32, device="cpu"):
        return values(self.shape, self.seed + 10, dtype, device)

    def make_grad(self, dtype=torch.float32, device="cpu"):
        return values((self.rois, self.shape[1], *self.bins), self.seed + 20, dtype, device)

    @property
    def rest(self):
        """The arguments after the boxes, of the operator's forward."""
        return (*self.bins, self.scale, self.ratio, self.aligned)

    @property
    def rest_of_call(self):
        """The arguments after the boxes, of the public function."""
        return (self.bins, self.scale, self.ratio, self.aligned)


def forward(case, input, boxes):
    """The operator as the dispatcher finds it: compiled where there is an extension."""
    return torch.ops.truncdet.roi_align(input, boxes, *case.rest)


def backward(case, grad, boxes, channels_last=False):
    return torch.ops.truncdet.roi_align_backward(
        grad, boxes, *case.shape, *case.rest, channels_last
    )


def reference_forward(case, input, boxes):
    return reference.forward(input, boxes, *case.rest)


def reference_backward(case, grad, boxes, channels_last=False):
    return reference.backward(grad, boxes, *case.shape, *case.rest, channels_last)


def scheduled(case, grad, boxes, schedule, channels_last=False):
    """The CUDA backward under one schedule, or None where the shape does not fit it."""
    op = torch.ops.truncdet._roi_align_backward_scheduled
    try:
        return op(grad, boxes, *case.shape, *case.rest, channels_last, schedule)
    except RuntimeError as error:
        if schedule in (WIDE, PAIRS) and "does not fit the schedule" in str(error):
            return None
        raise


def weights(case, boxes):
    """The reference's tables: RoI's image [K], wy [K, PH, H] and wx [K, PW, W]."""
    _, _, height, width = case.shape
    cells = (height, width)
    rest = (case.scale, case.ratio, case.aligned)
    roi = reference.geometry(boxes, case.shape[0], cells, case.bins, *rest)
    return (roi.image, *reference.both_axes(roi, case.bins, cells))


# A box that touches one cell alone, (1, 1), with weight one: the sample is exactly on it.
ONE_CELL_BOX = (0.0, 1.0, 1.0, 2.0, 2.0)


def one_cell_case(rois):
    boxes = torch.tensor([ONE_CELL_BOX]).repeat(rois, 1)
    return Case((1, 1, 3, 3), rois, (1, 1), ratio=1, boxes=boxes)


def one_cell_sum(values):
    """The gradient of cell (1, 1) whose contributions are `values`, as a 1-d tensor of one."""
    case = one_cell_case(values.numel())
    boxes = case.make_boxes(values.dtype, values.device)
    out = backward(case, values.reshape(-1, 1, 1, 1), boxes)
    return out[0, 0, 1, 1].reshape(1)


def stack_boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32)


SHAPES = {
    "one_of_everything": Case((1, 1, 1, 1), 1, (1, 1), boxes=stack_boxes((0, 0, 0, 1, 1))),
    "one_row": Case((2, 3, 1, 9), 5, (2, 3)),
    "one_column": Case((2, 3, 9, 1), 5, (3, 2)),
    "odd_sizes": Case((3, 5, 13, 7), 9, (3, 5), scale=0.25),
    "tile_and_one": Case((1, 2, 9, 17), 7, (7, 7)),
    "31_channels": Case((1, 31, 9, 11), 4, (3, 3)),
    "33_channels": Case((2, 33, 9, 11), 4, (3, 3)),
    "65_channels": Case((1, 65, 9, 18), 4, (7, 7)),
    "mask_head": Case((1, 3, 20, 20), 3, (14, 14)),
    "28x28_bins": Case((1, 2, 20, 24), 2, (28, 28), ratio=2),
    "40x3_bins": Case((1, 33, 12, 12), 2, (40, 3)),
    "wider_than_a_table": Case(
        (1, 2, 5, 300),
        3,
        (3, 7),
        boxes=stack_boxes((0, 3, 0, 290, 4), (0, -20, 1, 150, 3), (0, 200, -9, 400, 30)),
    ),
    "higher_than_a_table": Case(
        (1, 33, 260, 5), 2, (7, 2), boxes=stack_boxes((0, 0, 3, 4, 250), (0, 1, -20, 3, 140))
    ),
    "1500_wide": Case(
        (1, 2, 3, 1500), 2, (1, 7), boxes=stack_boxes((0, 0, 0, 1500, 3), (0, 10, 1, 1290, 2))
    ),
    "300_rois_on_a_tile": Case((1, 2, 8, 8), 300, (2, 2), ratio=1),
    "600_rois_on_a_tile": Case((2, 1, 5, 6), 1100, (1, 2), ratio=1),
    "same_boxes": Case(
        (1, 3, 6, 6), 40, (2, 2), boxes=stack_boxes((0, 0.3, 1, 4, 5.7)).repeat(40, 1)
    ),
    "empty_images_between": Case(
        (4, 2, 5, 5),
        3,
        (2, 2),
        boxes=stack_boxes((3, 0, 0, 4, 4), (1, 1, 1, 3, 4), (3, 2, 2, 5, 5)),
    ),
    "reversed": Case(
        (1, 2, 8, 8),
        3,
        (3, 3),
        ratio=2,
        boxes=stack_boxes((0, 6, 6, 1, 2), (0, 6, 1, 2, 5), (0, 1, 7, 5, 3)),
    ),
    "reversed_with_many_samples": Case(
        (1, 2, 8, 8), 12, (2, 3), ratio=7, boxes=hashed_boxes(12, 1, 8, 8, 77)[:, [0, 3, 4, 1, 2]]
    ),
    "no_size": Case(
        (1, 2, 8, 8), 2, (3, 3), ratio=2, boxes=stack_boxes((0, 3, 3, 3, 3), (0, 2.5, 1, 2.5, 6))
    ),
    "no_rois": Case((2, 3, 4, 5), 0, (2, 2)),
    "no_images": Case((0, 3, 4, 5), 0, (2, 2)),
    "no_channels": Case((2, 0, 4, 5), 3, (2, 2)),
    "no_rows": Case((2, 3, 0, 5), 3, (2, 2), boxes=stack_boxes(*[(0, 0, 0, 2, 2)] * 3)),
    "no_columns": Case((2, 3, 4, 0), 3, (2, 2), boxes=stack_boxes(*[(1, 0, 0, 2, 2)] * 3)),
}
each_case = pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
