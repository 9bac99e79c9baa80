"""What the tests of roi_pool, ps_roi_align and ps_roi_pool share: the operators, seen alike."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torchvision
from roi_cases import SHAPES, Case, values

import truncdet
from truncdet import _ps_roi_align, _ps_roi_pool, _roi_pool_reference

OPS = torch.ops.truncdet


class Operator(NamedTuple):
    """One operator; `chosen` below is what its forward tells its backward, or nothing."""

    name: str
    public: Callable
    native: Callable
    reference: tuple[Callable, Callable]
    sensitive: bool  # every bin has input channels of its own
    one_cell: tuple[float, float, float, float]  # a box of the cell (1, 1) alone
    options: Callable = lambda case: ()  # of a case, after the scale, for the operator
    keywords: Callable = lambda case: {}  # and for the functions

    def shape(self, case):
        """The input's: `case.shape` counts channels of the output."""
        images, channels, *cells = case.shape
        return (images, channels * (case.bins[0] * case.bins[1] if self.sensitive else 1), *cells)

    def make(self, case, dtype=torch.float32, device="cpu"):
        """Input, boxes and a gradient of the output."""
        input = values(self.shape(case), case.seed + 10, dtype, device)
        return input, case.make_boxes(dtype, device), case.make_grad(dtype, device)

    def rest(self, case):
        return (*case.bins, case.scale, *self.options(case))

    def forward(self, case, input, boxes):
        """(output, *chosen), as the dispatcher finds the operator."""
        out = getattr(OPS, self.name)(input, boxes, *self.rest(case))
        return out if isinstance(out, tuple) else (out,)

    def backward(self, case, grad, chosen, boxes, channels_last=False):
        args = (grad, *chosen, boxes, *self.shape(case), *self.rest(case), channels_last)
        return getattr(OPS, f"{self.name}_backward")(*args)

    def reference_forward(self, case, input, boxes):
        out = self.reference[0](input, boxes, *self.rest(case))
        return out if isinstance(out, tuple) else (out,)

    def reference_backward(self, case, grad, chosen, boxes, channels_last=False):
        args = (grad, *chosen, boxes, *self.shape(case), *self.rest(case), channels_last)
        return self.reference[1](*args)

    def call(self, case, input, boxes, function=None):
        """Through the public function, or another of the same arguments."""
        function = function or self.public
        return function(input, boxes, case.bins, case.scale, **self.keywords(case))

    def gradient(self, case, input, boxes, grad, function=None):
        """Output and gradient of the public function, or of another one."""
        x = input.detach().requires_grad_()
        out = self.call(case, x, boxes, function)
        return out.detach(), torch.autograd.grad(out, x, grad)[0]

    def chosen_anywhere(self, case, device="cpu"):
        """For a backward whose values alone matter: every bin chose cell (1, 1) of the map."""
        if self.sensitive:
            return ()
        cell = case.shape[3] + 1
        shape = (case.rois, case.shape[1], *case.bins)
        return (torch.full(shape, cell, dtype=torch.int32, device=device),)

    def one_cell_sum(self, parts):
        """The gradient of cell (1, 1) whose contributions are `parts`, as a 1-d tensor of one."""
        boxes = torch.tensor([(0.0, *self.one_cell)], dtype=torch.float64).repeat(len(parts), 1)
        case = Case((1, 1, 3, 3), len(parts), (1, 1), ratio=1, boxes=boxes)
        boxes = case.make_boxes(parts.dtype, parts.device)
        chosen = self.chosen_anywhere(case, parts.device)
        out = self.backward(case, parts.reshape(-1, 1, 1, 1), chosen, boxes)
        assert out.count_nonzero() <= 1
        return out[0, 0, 1, 1].reshape(1)


def _nobody(*_, **__):
    pytest.skip("mmcv's operator has no CPU kernel to compare with")


ROI_POOL = Operator(
    "roi_pool",
    truncdet.roi_pool,
    torchvision.ops.roi_pool,
    (_roi_pool_reference.forward, _roi_pool_reference.backward),
    False,
    (1, 1, 1, 1),
    lambda case: (True,),
)
EXACT_ROI_POOL = ROI_POOL._replace(
    native=_nobody, options=lambda case: (False,), keywords=lambda case: {"rounded": False}
)
PS_ROI_ALIGN = Operator(
    "ps_roi_align",
    truncdet.ps_roi_align,
    torchvision.ops.ps_roi_align,
    (_ps_roi_align.forward_reference, _ps_roi_align.backward_reference),
    True,
    (1, 1, 2, 2),
    lambda case: (case.ratio,),
    lambda case: {"sampling_ratio": case.ratio},
)
PS_ROI_POOL = Operator(
    "ps_roi_pool",
    truncdet.ps_roi_pool,
    torchvision.ops.ps_roi_pool,
    (_ps_roi_pool.forward_reference, _ps_roi_pool.backward_reference),
    True,
    (1, 1, 2, 2),
)
OPERATORS = (ROI_POOL, EXACT_ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL)
each_op = pytest.mark.parametrize(
    "op", OPERATORS, ids=["roi_pool", "roi_pool_exact", "ps_roi_align", "ps_roi_pool"]
)
each_name = pytest.mark.parametrize(
    "op", (ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL), ids=lambda op: op.name
)


def few_channels(op, case):
    """The case with as many channels as make an input of reasonable size."""
    images, channels, *cells = case.shape
    most = max(1, 200 // (case.bins[0] * case.bins[1])) if op.sensitive else channels
    return case._replace(shape=(images, min(channels, most), *cells))


# The references visit bin by bin.
SMALL = {
    name: case
    for name, case in SHAPES.items()
    if case.rois * case.bins[0] * case.bins[1] < 700 and max(case.shape[2:]) < 400
}
each_small = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())


def hostile_boxes(images, height, width, seed=3):
    """Far outside, across every border, reversed, without area, on halves, and huge."""
    sides = [-1e4, -1.5, -0.5, 0, 0.5, 1.49, 1.5, width / 2, height - 1, width - 0.5, width, 1e4]
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(sides), (150, 4), generator=generator)
    image = torch.randint(images, (150, 1), generator=generator)
    return torch.cat([image, torch.tensor(sides)[pick]], 1).float()
