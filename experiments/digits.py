"""Digits on a GPU: ten trainings of a small network from one seed, plain and with truncdet.

    python experiments/digits.py                                # on a GPU, under a minute
    python experiments/digits.py --device cpu --size tiny --repeats 2

scikit-learn's 8x8 digits; convolutions, batch normalisation, bilinear upsampling, adaptive pooling.
The data lie in experiments/data/digits. Writes experiments/results/digits_<gpu>.json and .png
(tiny: only with --out); after an interruption the same command keeps the finished mode. Exits with
1 if a condition is missed.
"""

from __future__ import annotations

import functools
import gzip
import sys
from pathlib import Path
from typing import Any

import torch
from _equal_runs import Progress
from _story import main
from torch import Tensor, nn
from torch.nn import functional

DATA = Path(__file__).parent / "data" / "digits" / "digits.csv.gz"
BATCH = 64
TEST_EVERY = 5  # each fifth image is for the test


@functools.cache
def images() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] with values 0 to 1, and digits [1797]."""
    with gzip.open(DATA, "rt", encoding="ascii") as file:
        rows = torch.tensor([[int(cell) for cell in line.split(",")] for line in file])
    return rows[:, :-1].reshape(-1, 1, 8, 8) / 16.0, rows[:, -1]


class Net(nn.Module):
    """Two convolutions around an upsampling, then pooling to 3x3, which overlaps in 16x16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.head = nn.Linear(9 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.interpolate(
            self.first(x), scale_factor=2, mode="bilinear", align_corners=False
        )
        scores: Tensor = self.head(functional.adaptive_avg_pool2d(self.second(x), 3).flatten(1))
        return scores


def train(device: torch.device, full: bool) -> dict[str, Any]:
    """One run; the seed is set already."""
    x, y = (part.to(device) for part in images())
    test = torch.arange(len(x), device=device) % TEST_EVERY == 0
    steps, width = (600, 32) if full else (8, 4)
    model = Net(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    known, digits = x[~test], y[~test]
    progress = Progress()
    for _ in range(steps):
        batch = torch.randint(len(known), (BATCH,), generator=order).to(device)
        loss = functional.cross_entropy(model(known[batch]), digits[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.step(loss)
    model.eval()
    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).double().mean()
    return progress.finish(model, right)


if __name__ == "__main__":
    sys.exit(main("digits", "test accuracy", __doc__, sys.argv[1:], train))
