"""Where our maximum is not mmcv's, on purpose: what docs/mmcv.md says, sentence by sentence."""

from __future__ import annotations

import math
from typing import Any

import _mmcv_needed  # noqa: F401
import mmcv.ops
import torch
from torch import Tensor
from truncdet.integrations import mmcv as integration

RAMP = torch.arange(64.0).view(1, 1, 8, 8)
BOX = torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0]])


def both(features: Tensor, boxes: Tensor, ratio: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """mmcv's bins and ours, flat."""

    def pooled() -> Tensor:
        given: dict[str, Any] = {"pool_mode": "max", **options}
        layer = mmcv.ops.RoIAlign(2, sampling_ratio=ratio, **given)
        return layer(features, boxes).flatten()

    theirs = pooled()
    with integration.patched():
        return theirs, pooled()


def test_a_bin_without_samples() -> None:
    empty = torch.tensor([[0.0, 3.0, 3.0, 3.0, 3.0]])
    theirs, ours = both(RAMP, empty)
    assert theirs.tolist() == [-10000] * 4
    assert ours.tolist() == [0] * 4
    for average in both(RAMP, empty, pool_mode="avg"):
        assert average.tolist() == [0] * 4


def test_samples_below_minus_10000() -> None:
    theirs, ours = both(RAMP - 20000, BOX)
    assert theirs.tolist() == [-10000] * 4
    assert ours.tolist() == [value - 20000 for value in both(RAMP, BOX)[1].tolist()]
    theirs, ours = both(RAMP - 9000, BOX)
    assert float((theirs - ours).abs().max()) <= 1e-5 * 9000


def test_nan_features() -> None:
    features = RAMP.clone()
    features[0, 0, 3, 3] = math.nan
    whole, (theirs, ours) = both(RAMP, BOX, 2)[0], both(features, BOX, 2)
    assert theirs.isfinite().all()
    assert ours.isnan().tolist() == [False, False, False, True]
    # Weight zero: of the first bin's samples, that at (2, 2) reads (3, 3) with weight zero.
    assert float(theirs[0]) < float(whole[0]) == float(ours[0])
    theirs, ours = both(torch.full_like(RAMP, math.nan), BOX, 2)
    assert theirs.tolist() == [-10000] * 4
    assert ours.isnan().all()


def test_everything_else_is_within_1e_5_of_the_largest_feature() -> None:
    draw = torch.Generator().manual_seed(0)
    for largest in (1.0, 9999.0, 1e6):
        features = (torch.rand(2, 3, 16, 16, generator=draw) * 2 - 1) * largest
        features = features.clamp(min=-9999.0)
        corner = torch.rand(80, 2, generator=draw) * 24 - 4
        size = torch.rand(80, 2, generator=draw) * 12 + 0.01
        image = torch.randint(0, 2, (80, 1), generator=draw).float()
        boxes = torch.cat([image, corner, corner + size], 1)
        for ratio in (0, 1, 3):
            for aligned in (True, False):
                theirs, ours = both(features, boxes, ratio, aligned=aligned)
                assert float((theirs - ours).abs().max()) <= 1e-5 * float(features.abs().max())
