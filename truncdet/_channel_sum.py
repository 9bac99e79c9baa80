"""Sums over channels in the one association that all kernels follow."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 32
"""Partial sums: lane j adds the channels j, j + 32, ... in ascending order."""


def channel_sum(x: Tensor, dim: int) -> Tensor:
    """The sum along `dim`, lanes first, then the lanes in halves: 16 and 16 down to 1 and 1."""
    x = x.movedim(dim, 0)
    lanes = x.new_zeros((LANES, *x.shape[1:]))
    for chunk in x.split(LANES):
        # What is beyond the last channel is added as +0, which makes a -0 of the lane +0 as well.
        filled = torch.zeros_like(lanes)
        filled[: len(chunk)] = chunk
        lanes = lanes + filled
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]
