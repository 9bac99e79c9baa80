"""The demo's detector: torchvision's Faster R-CNN on a backbone small enough for two CPU cores.

Everything but RoIAlign repeats on its own: strided convolutions instead of max pooling (whose CUDA
backward adds with atomics), group instead of batch normalisation (which has no running buffers).
"""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

CHANNELS = 64
STRIDE = 8
POOL = 7
# Side lengths in pixels of the resized image; the smallest objects of interest are about 10.
ANCHOR_SIZES = (12, 24, 40, 72)
ANCHOR_RATIOS = (0.7, 1.0, 1.4)


def _conv(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False),
        nn.GroupNorm(8, outputs),
        nn.ReLU(),
    )


class _Residual(nn.Module):
    """x + two convolutions of x; the dilation widens the view without more maths."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(channels, channels), _conv(channels, channels, dilation=dilation)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y


class SmallBackbone(nn.Sequential):
    """Images [N, 3, H, W] to one feature map [N, 64, H / 8, W / 8]."""

    out_channels = CHANNELS

    def __init__(self) -> None:
        super().__init__(
            _conv(3, 16, stride=2),
            _conv(16, 32, stride=2),
            _conv(32, CHANNELS, stride=2),
            _Residual(CHANNELS, dilation=2),
            _Residual(CHANNELS, dilation=3),
        )


class OrderedRoIAlign(nn.Module):
    """RoIAlign of all RoIs in one call, handed over in the caller's or in a shuffled order.

    The result of a RoI does not depend on its place in the list, so the shuffle (undone on the
    output) changes no mathematics, only the order in which gradients are added to the feature map.
    It has a generator of its own: the training's random numbers are the same with and without.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        super().__init__()
        self.shuffle: torch.Generator | None = None
        if shuffle_seed is not None:
            self.shuffle = torch.Generator().manual_seed(shuffle_seed)

    def forward(
        self, features: dict[str, Tensor], boxes: list[Tensor], shapes: list[tuple[int, int]]
    ) -> Tensor:
        (feature,) = features.values()
        rois = torch.cat(
            [nn.functional.pad(box, (1, 0), value=float(i)) for i, box in enumerate(boxes)]
        )
        if self.shuffle is None or not self.training:
            return _roi_align(feature, rois)
        order = torch.randperm(len(rois), generator=self.shuffle).to(rois.device)
        return _roi_align(feature, rois[order])[torch.argsort(order)]


def _roi_align(feature: Tensor, rois: Tensor) -> Tensor:
    # Looked up at every call, so that a patch of torchvision.ops is what decides the operator.
    pooled: Tensor = torchvision.ops.roi_align(
        feature, rois, POOL, spatial_scale=1.0 / STRIDE, sampling_ratio=2, aligned=True
    )
    return pooled


def build_model(classes: int, image_size: int, shuffle_seed: int | None = None) -> FasterRCNN:
    """A randomly initialised detector of `classes` kinds of objects (background not counted)."""
    hidden = 128
    model = FasterRCNN(
        SmallBackbone(),
        min_size=image_size,
        max_size=2 * image_size,
        rpn_anchor_generator=AnchorGenerator((ANCHOR_SIZES,), (ANCHOR_RATIOS,)),
        rpn_pre_nms_top_n_train=400,
        rpn_post_nms_top_n_train=150,
        rpn_pre_nms_top_n_test=400,
        rpn_post_nms_top_n_test=150,
        rpn_batch_size_per_image=128,
        box_head=TwoMLPHead(CHANNELS * POOL**2, hidden),
        box_predictor=FastRCNNPredictor(hidden, classes + 1),
        box_batch_size_per_image=96,
        box_detections_per_img=100,
    )
    # The constructor accepts MultiScaleRoIAlign alone, which cannot change the order.
    model.roi_heads.box_roi_pool = OrderedRoIAlign(shuffle_seed)
    return model
