"""Batch normalisation, the usual suspect: does it move bits, or does the convolution under it?

    python experiments/batch_norm.py                            # on a GPU, about a minute
    python experiments/batch_norm.py --device cpu --size tiny --repeats 2

Small convolutional networks, 2-D and 3-D, with batch normalisation and without, trained from equal
seeds under three settings of cuDNN's choice of algorithm; then each operator's backward alone, on
equal inputs, again and again. Writes experiments/results/batch_norm_<gpu>.json and .png (tiny: only
with --out); after an interruption the same command keeps the finished parts. Exits with 1 if a
condition is missed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import _batch_norm_picture
import torch
from _checks import Check, conclude, holds
from _conv_cases import CASES, SETTINGS, moving, setting
from _environment import RESULTS, describe, pick_device, write_result
from _equal_runs import Progress, repeat, summary
from _parts import Parts
from _render_stories import batch_norm as render
from _story import parser
from torch import nn

DETERMINISTIC = "deterministic"


def network(dimensions: int, batch_norm: bool, width: int) -> nn.Sequential:
    """Three convolutions and a linear layer."""
    conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
    norm = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 64, 1)):
        layers.append(conv(inputs, outputs, 3, stride, 1))
        layers += [norm(outputs)] if batch_norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(2), _Mean(), nn.Linear(64, 10))


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(2)


def train(device: torch.device, full: bool, dimensions: int, batch_norm: bool) -> dict[str, Any]:
    """One run on random images; the seed is set already. The score is the last loss."""
    steps, width = (60, 32) if full else (4, 4)
    size = (64 if dimensions == 2 else 24) if full else 8
    model = network(dimensions, batch_norm, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(16, 3, *[size] * dimensions, device=device)
    y = torch.randint(10, (16,), device=device)
    progress = Progress()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.step(loss)
    return progress.finish(model, loss.detach())


def trainings(device: torch.device, full: bool, repeats: int, name: str) -> list[dict[str, Any]]:
    """The four networks under one setting."""
    rows = []
    for dimensions in (2, 3):
        for batch_norm in (True, False):
            with setting(name):
                # Plain: nothing but the seed and the setting.
                one = functools.partial(train, device, full, dimensions, batch_norm)
                runs = repeat(one, "plain", repeats)
            row = {"dimensions": dimensions, "batch_norm": batch_norm, "setting": name}
            rows.append(row | summary(runs) | {"losses": [run["losses"] for run in runs]})
    return rows


def check(result: Mapping[str, Any]) -> list[Check]:
    """Batch normalisation is not to blame, and one switch is the cure."""
    checks = []
    for row in result["trainings"]:
        if row["setting"] == DETERMINISTIC:
            norm = "batch norm" if row["batch_norm"] else "no norm"
            name = f"{row['dimensions']}-D, {norm}, deterministic: one set of weights"
            checks.append(holds(name, row["distinct_weights"] == 1))
    for row in result["operators"]:
        if row["setting"] == DETERMINISTIC or row["operator"].startswith("batch norm"):
            name = f"{row['operator']}, {row['setting']}: bits repeat"
            checks.append(holds(name, row["moving"] == 0))
    return checks


def verdict(result: Mapping[str, Any]) -> str:
    """One sentence on what this GPU's cuDNN does."""
    free = [row for row in result["operators"] if row["setting"] != DETERMINISTIC]
    to_blame = sorted({row["operator"] for row in free if row["moving"]})
    if to_blame:
        return f"Bits move in: {'; '.join(to_blame)}."
    tried = sum(row["cases"] for row in free)
    apart = sum(row["distinct_weights"] > 1 for row in result["trainings"])
    return (
        f"cuDNN {result['versions']['cudnn']} chose no algorithm here whose bits move, in {tried} "
        f"operators under free choice; {apart} of {len(result['trainings'])} trainings differ."
    )


def main(arguments: Sequence[str]) -> int:
    options_of = parser(__doc__)
    options = options_of.parse_args(arguments)
    if options.repeats < 2:
        options_of.error("--repeats must be at least 2")
    device = pick_device(options.device, options.size)
    full = options.size == "full"
    folder = options.out or (RESULTS if full else None)
    result = describe("batch_norm", arguments, device) | {"size": options.size}
    parts = Parts(folder, result)
    cases = CASES if full else [case.tiny() for case in CASES[6:7] + CASES[-3:]]
    result |= {"trainings": [], "operators": []}
    for name in SETTINGS:
        train_all = functools.partial(trainings, device, full, options.repeats, name)
        result["trainings"] += parts.get(f"trainings, {name}", train_all)
        repeat_all = functools.partial(moving, name, device, cases)
        result["operators"] += parts.get(f"operators, {name}", repeat_all)
        print(f"{name}: done", flush=True)
    result["verdict"] = verdict(result)
    result["checks"] = check(result)
    if folder is not None:
        path = write_result(folder, result)
        _batch_norm_picture.save(path.with_suffix(".png"), result)
        parts.forget()
    print(render(result))
    return conclude(result["checks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
