"""RoIAlign's measured cases: shapes, limits, boxes and the four calls that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor

import truncdet

assert torchvision and truncdet  # imported for the operators that they register

_TINY = 8  # what the tiny sizes are divided by


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape; `backward_limit` bounds our backward by the native one's time."""

    name: str
    images: int
    rois_per_image: int
    channels: int
    height: int
    width: int
    bins: int
    spatial_scale: float
    sampling_ratio: int
    smallest: float  # box sizes, image pixels
    largest: float
    backward_limit: float

    @property
    def rois(self) -> int:
        return self.images * self.rois_per_image

    def tiny(self) -> Case:
        """The same mixture at sizes for a CPU."""
        return dataclasses.replace(
            self,
            rois_per_image=max(2, self.rois_per_image // (8 * _TINY)),
            channels=self.channels // (4 * _TINY),
            height=self.height // _TINY,
            width=self.width // _TINY,
            smallest=self.smallest / _TINY,
            largest=self.largest / _TINY,
        )


P2 = (256, 200, 336)  # the finest level of a feature pyramid, images of 800 x 1344
CASES = (
    Case("2x512 RoIs, 7x7, adaptive, 256x200x336", 2, 512, *P2, 7, 1 / 4, -1, 16, 112, 0.35),
    Case("2x512 RoIs, 7x7, ratio 2, 256x200x336", 2, 512, *P2, 7, 1 / 4, 2, 16, 112, 0.55),
    Case("2x128 RoIs, 14x14, adaptive, 256x200x336", 2, 128, *P2, 14, 1 / 4, -1, 16, 112, 0.50),
    Case(
        "2x512 RoIs, 14x14, adaptive, 1024x50x84",
        2,
        512,
        1024,
        50,
        84,
        14,
        1 / 16,
        -1,
        32,
        512,
        0.45,
    ),
    Case("16x512 RoIs, 7x7, adaptive, 256x200x336", 16, 512, *P2, 7, 1 / 4, -1, 16, 112, 0.60),
)
FORWARD_LIMIT = 1.0


def make_boxes(case: Case) -> Tensor:
    """Boxes [K, 5]: uniform sizes and centres, aspect ratios 1/2 to 2, cut at the border."""
    generator = torch.Generator().manual_seed(0)
    width, height = (int(n / case.spatial_scale) for n in (case.width, case.height))

    def uniform() -> Tensor:
        return torch.rand(case.rois_per_image, 1, generator=generator)

    images = []
    for image in range(case.images):
        size = case.smallest + (case.largest - case.smallest) * uniform()
        aspect = torch.exp((uniform() - 0.5) * 1.386)  # 1.386 = 2 ln 2
        box_width, box_height = size * aspect.sqrt(), size / aspect.sqrt()
        centre_x, centre_y = uniform() * width, uniform() * height
        x1 = (centre_x - box_width / 2).clamp(0, width - 1)
        y1 = (centre_y - box_height / 2).clamp(0, height - 1)
        x2 = torch.minimum(x1 + box_width, torch.tensor(float(width)))
        y2 = torch.minimum(y1 + box_height, torch.tensor(float(height)))
        images.append(torch.cat([torch.full_like(x1, float(image)), x1, y1, x2, y2], 1))
    return torch.cat(images)


@dataclasses.dataclass(frozen=True)
class Calls:
    """Inputs of a case on a device, and what is measured with them."""

    case: Case
    features: Tensor
    boxes: Tensor
    grad: Tensor
    channels_last: bool

    @classmethod
    def make(cls, case: Case, device: torch.device, channels_last: bool) -> Calls:
        torch.manual_seed(0)
        features = torch.randn(case.images, case.channels, case.height, case.width, device=device)
        if channels_last:
            features = features.contiguous(memory_format=torch.channels_last)
        grad = torch.randn(case.rois, case.channels, case.bins, case.bins, device=device)
        return cls(case, features, make_boxes(case).to(device), grad, channels_last)

    def double(self) -> Calls:
        """The same values in float64."""
        features, boxes, grad = (x.double() for x in (self.features, self.boxes, self.grad))
        return Calls(self.case, features, boxes, grad, self.channels_last)

    def native(self) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """torchvision's forward and backward; channels_last means what torchvision does with it:
        the forward copies it to NCHW, and the gradient comes back as NCHW."""
        case, ops = self.case, torch.ops.torchvision
        bins = (case.bins, case.bins)
        rest = (case.sampling_ratio, True)
        return (
            lambda: ops.roi_align(self.features, self.boxes, case.spatial_scale, *bins, *rest),
            lambda: ops._roi_align_backward(
                self.grad, self.boxes, case.spatial_scale, *bins, *self.features.shape, *rest
            ),
        )

    def ours(self) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """truncdet's forward and backward, statistics and non-finite values handled inside."""
        case, ops = self.case, torch.ops.truncdet
        rest = (case.bins, case.bins, case.spatial_scale, case.sampling_ratio, True)
        return (
            lambda: ops.roi_align(self.features, self.boxes, *rest),
            lambda: ops.roi_align_backward(
                self.grad, self.boxes, *self.features.shape, *rest, self.channels_last
            ),
        )
