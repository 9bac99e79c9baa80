"""Scenes of RoIAlign gradients: boxes, how often each cell is added to, and sums in two orders."""

from __future__ import annotations

import dataclasses
import functools

import torch
from _roi_cases import CASES, Case, make_boxes
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Scene:
    """RoIs of one head. `crowd`: distances between their centres, by those of the spread scene."""

    name: str
    case: Case
    crowd: float = 1.0

    def tiny(self) -> Scene:
        return dataclasses.replace(self, case=self.case.tiny(), crowd=self.crowd / 4)

    @functools.cached_property
    def boxes(self) -> Tensor:
        """Boxes [K, 5] with the centres drawn together, sizes unchanged."""
        boxes = make_boxes(self.case)
        extent = torch.tensor([self.case.width, self.case.height]) / self.case.spatial_scale
        centres = (boxes[:, 1:3] + boxes[:, 3:]) / 2
        moved = (extent / 2 - centres) * (1 - self.crowd)
        boxes[:, 1:] += moved.repeat(1, 2)
        return boxes


SCENES = (
    Scene("box head, spread", CASES[0]),
    Scene("box head, crowded", CASES[0], crowd=0.25),
    Scene("mask head, spread", CASES[2]),
)


def additions(scene: Scene) -> Tensor:
    """How often torchvision's kernel adds to a cell: float64 [N, H, W], the same in all channels.

    One addition per RoI, sample and corner, zero weights included; a RoI's are the outer product of
    those of its rows and columns.
    """
    case, boxes = scene.case, scene.boxes.double()
    counts = torch.zeros(case.images, case.height, case.width, dtype=torch.float64)
    for image in range(case.images):
        mine = boxes[boxes[:, 0] == image]
        rows = _along_axis(mine[:, 2], mine[:, 4], case, case.height)
        columns = _along_axis(mine[:, 1], mine[:, 3], case, case.width)
        counts[image] = rows.T @ columns
    return counts


def _along_axis(low: Tensor, high: Tensor, case: Case, size: int) -> Tensor:
    """Corners per RoI and cell along one axis, [K, size]."""
    counts = torch.zeros(len(low), size, dtype=torch.float64)
    start = low * case.spatial_scale - 0.5
    bin_size = (high - low) * case.spatial_scale / case.bins
    samples = bin_size.ceil() if case.sampling_ratio <= 0 else torch.full_like(low, 2.0)
    for roi in range(len(low)):
        number = int(samples[roi])
        steps = (torch.arange(case.bins * number, dtype=torch.float64) + 0.5) / max(number, 1)
        places = start[roi] + bin_size[roi] * steps
        places = places[(places >= -1) & (places <= size)].clamp(min=0)
        lower = places.floor().long().clamp(max=size - 1)
        for corner in (lower, (lower + 1).clamp(max=size - 1)):
            counts[roi].index_add_(0, corner, torch.ones(len(corner), dtype=torch.float64))
    return counts


class Sums:
    """The gradient of a scene's features in float64, by torchvision's kernel."""

    def __init__(self, scene: Scene, device: torch.device) -> None:
        self.scene, self.device = scene, device
        self._boxes = scene.boxes.double().to(device)
        self._generator = torch.Generator(device).manual_seed(0)
        self._turns = torch.Generator().manual_seed(0)

    def fresh(self) -> Tensor:
        """A new float32 gradient of the outputs, [K, C, bins, bins]."""
        case = self.scene.case
        shape = (case.rois, case.channels, case.bins, case.bins)
        return torch.randn(shape, device=self.device, generator=self._generator) * 1e-3

    def once(self, grad: Tensor) -> Tensor:
        """In the order of the RoIs, as far as the device has one."""
        return self._backward(grad.double(), self._boxes)

    def again(self, grad: Tensor) -> Tensor:
        """Another order: the atomics' own on a GPU; on a CPU the RoIs are permuted."""
        if self.device.type == "cuda":
            return self.once(grad)
        turn = torch.randperm(len(grad), generator=self._turns)
        return self._backward(grad.double()[turn], self._boxes[turn])

    def fixed_point(self, grad: Tensor) -> Tensor:
        """truncdet's gradient, float32."""
        case = self.scene.case
        gradient: Tensor = torch.ops.truncdet.roi_align_backward(
            grad, self._boxes.float(), *self._shape(), case.bins, case.bins, *self._rest(), False
        )
        return gradient

    def _shape(self) -> tuple[int, int, int, int]:
        case = self.scene.case
        return case.images, case.channels, case.height, case.width

    def _rest(self) -> tuple[float, int, bool]:
        return self.scene.case.spatial_scale, self.scene.case.sampling_ratio, True

    def _backward(self, grad: Tensor, boxes: Tensor) -> Tensor:
        case = self.scene.case
        scale, *rest = self._rest()
        gradient: Tensor = torch.ops.torchvision._roi_align_backward(
            grad, boxes, scale, case.bins, case.bins, *self._shape(), *rest
        )
        return gradient
