"""Message passing on a graph: ten trainings from one seed, plain and with truncdet.

    python experiments/message_passing.py                       # on a GPU, under a minute
    python experiments/message_passing.py --device cpu --size tiny --repeats 2

A network of sums over neighbours (index_add and index_select, as message-passing libraries use
them) learns the communities of a made-up graph from noisy features. Writes
experiments/results/message_passing_<gpu>.json and .png (tiny: only with --out); after an
interruption the same command keeps the finished mode. Exits with 1 if a condition is missed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _equal_runs import Progress
from _story import main
from torch import Tensor, nn
from torch.nn import functional

COMMUNITIES = 7
FEATURES = 32
TRAINED = 0.1  # share of the nodes whose community is known
SAME = 0.35  # share of the edges that stay inside a community for certain
NOISE = 6.0  # of a feature, by the distance of two communities' centres


def graph(nodes: int, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges [2, E] (from, to), features [V, F] and communities [V], the same in every call."""
    random = torch.Generator().manual_seed(1)
    community = torch.randint(COMMUNITIES, (nodes,), generator=random)
    start = torch.randint(nodes, (nodes * degree,), generator=random)
    end = torch.randint(nodes, (nodes * degree,), generator=random)
    # Edges that must stay inside end at a node drawn from the community of their start.
    by_community = torch.argsort(community, stable=True)
    size = torch.bincount(community, minlength=COMMUNITIES)
    first = size.cumsum(0) - size
    own = community[start]
    place = (torch.rand(len(start), generator=random) * size[own]).long()
    inside = torch.rand(len(start), generator=random) < SAME
    end = torch.where(inside, by_community[first[own] + place], end)
    centres = torch.randn(COMMUNITIES, FEATURES, generator=random)
    noise = torch.randn(nodes, FEATURES, generator=random)
    return torch.stack([start, end]), centres[community] + NOISE * noise, community


class Layer(nn.Module):
    """A node's features and the sum of its neighbours', each through a matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor, degree: Tensor) -> Tensor:
        messages = x.index_select(0, edges[0])
        total = torch.zeros_like(x).index_add_(0, edges[1], messages)
        result: Tensor = self.own(x) + self.neighbours(total / degree)
        return result


class Net(nn.Module):
    """Three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (FEATURES, width, width, COMMUNITIES)
        self.layers = nn.ModuleList(Layer(*sizes[i : i + 2]) for i in range(3))

    def forward(self, x: Tensor, edges: Tensor, degree: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x, edges, degree))
        scores: Tensor = self.layers[-1](x, edges, degree)
        return scores


def train(device: torch.device, full: bool) -> dict[str, Any]:
    """One run; the seed is set already."""
    nodes, steps = (20_000, 300) if full else (300, 8)
    edges, x, community = (part.to(device) for part in graph(nodes, 12))
    # Degrees as integers, which any order counts right.
    degree = torch.bincount(edges[1], minlength=nodes).clamp(min=1).float()[:, None]
    known = torch.arange(nodes, device=device) < TRAINED * nodes
    model = Net(64 if full else 8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    progress = Progress()
    for _ in range(steps):
        loss = functional.cross_entropy(model(x, edges, degree)[known], community[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.step(loss)
    model.eval()
    with torch.no_grad():
        right = model(x, edges, degree).argmax(1) == community
    return progress.finish(model, right[~known].double().mean())


if __name__ == "__main__":
    sys.exit(main("message_passing", "test accuracy", __doc__, sys.argv[1:], train))
