"""detectron2's layers of other people: what they do with boxes they cast works as it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _detectron2_needed  # noqa: F401
import pytest
import torch
import torchvision
from detectron2.layers import ROIAlign
from torch import Tensor, nn
from truncdet.integrations import detectron2 as d2

import truncdet
from truncdet.testing import assert_bitwise_equal

FEATURES = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0)).half()
BOXES = torch.tensor([[0.0, 1.3, 2.7, 2049.3, 447.1], [0.0, 3.3, 1.1, 301.7, 1001.9]])


class Own(ROIAlign):  # type: ignore[misc]
    """Pools with an operator that nobody replaces."""

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        return torchvision.ops.roi_pool(input, rois.to(input.dtype), (3, 3), 1 / 64)


class Encoding(ROIAlign):  # type: ignore[misc]
    """Adds an embedding, in half, of the boxes it casts."""

    def __init__(self) -> None:
        super().__init__(3, 1 / 64, 2)
        self.fc = nn.Linear(5, 2).half()

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        rois = rois.to(input.dtype)
        kept = torch.zeros(len(rois), 5, dtype=input.dtype)
        kept[torch.arange(len(rois))] = rois / 4096
        return super().forward(input, rois) + self.fc(kept)[:, :, None, None]


class Typed(ROIAlign):  # type: ignore[misc]
    """Looks at the type its cast gives."""

    def forward(self, input: Tensor, rois: Tensor) -> Any:
        assert rois.to(input.dtype).dtype == input.dtype
        return super().forward(input, rois)


MADE: dict[str, Callable[[], Any]] = {
    "own": lambda: Own(3, 1 / 64, 2),
    "encoding": Encoding,
    "typed": lambda: Typed(3, 1 / 64, 2),
}


@pytest.mark.parametrize("name", MADE)
def test_a_forward_of_ones_own_gets_the_boxes_as_they_are(name: str) -> None:
    layer = MADE[name]()
    layer(FEATURES, BOXES)  # it works without us
    with d2.patched():
        found = layer(FEATURES, BOXES)
        expected = layer(FEATURES, BOXES.half())  # what its cast gives
    assert found.dtype == torch.float16 and type(found) is Tensor
    assert_bitwise_equal(found, expected)


def test_so_does_an_object_with_a_forward_of_its_own() -> None:
    layer, seen = ROIAlign(3, 1 / 64, 2), []
    layer.forward = lambda input, rois: seen.append(rois.to(input.dtype)) or rois
    with d2.patched():
        layer(FEATURES, BOXES)
    assert type(seen[0]) is Tensor and seen[0].dtype == torch.float16


def test_a_subclass_that_leaves_forward_alone_keeps_float32() -> None:
    class Plain(ROIAlign):  # type: ignore[misc]
        pass

    with d2.patched():
        found = Plain(3, 1 / 64, 2)(FEATURES, BOXES)
    assert_bitwise_equal(found, truncdet.roi_align(FEATURES, BOXES, 3, 1 / 64, 2, True))
    rounded = truncdet.roi_align(FEATURES, BOXES.half().float(), 3, 1 / 64, 2, True)
    assert not torch.equal(found, rounded)
