"""Counts gradients that two orders of a double sum round to different bits.

The model: a double sum of n terms ends near sqrt(n) units of its last place, 2^-53, away from the
exact one; the nearest boundary of a t-bit number is at a place uniform over 2^-t. Hence two orders
round one cell apart with probability p = c sqrt(n) 2^(t-53), c of the order of one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from _flip_scenes import Scene, Sums, additions
from _measure import words

import truncdet
from truncdet._certify import unproved_cells

BITS = (24, 23, 22, 21, 20, 11)
CERTIFY_EVERY = 50  # counting the unproved cells of a whole gradient takes longer than many pairs
_Z = statistics.NormalDist().inv_cdf(0.975)


def count(scene: Scene, device: torch.device, seconds: float, most: int) -> dict[str, Any]:
    """Fresh gradients, each added in two orders, for so many seconds or pairs.

    A pair differs at t bits if any cell of its two gradients does.
    """
    sums, number = Sums(scene, device), additions(scene)
    most_added = int(number.max())
    pairs, differing, cells = 0, dict.fromkeys(BITS, 0), dict.fromkeys(BITS, 0)
    raw, unexplained, fixed_point_differing, certified = 0, 0, 0, []
    end = time.monotonic() + seconds
    while pairs < most and (pairs < 2 or time.monotonic() < end):
        grad = sums.fresh()
        first, second = sums.once(grad), sums.again(grad)
        apart = words(first) != words(second)
        raw += int(apart.sum())
        one, other = first[apart], second[apart]
        absolute = None
        for t in BITS:
            flipped = words(truncdet.truncate(one, t)) != words(truncdet.truncate(other, t))
            found = int(flipped.sum())
            if found:
                differing[t] += 1
                cells[t] += found
                absolute = sums.once(grad.abs())[apart] if absolute is None else absolute
                unproved = unproved_cells(one[flipped], absolute[flipped], most_added, _rounding(t))
                unexplained += int((~unproved).sum())
        if pairs % CERTIFY_EVERY == 0:
            certified.append(_certify(sums, grad, first, most_added))
            ours = [words(sums.fixed_point(grad)) for _ in range(2)]
            fixed_point_differing += int((ours[0] != ours[1]).any())
        pairs += 1
    exposure = scene.case.channels * float(number.sqrt().sum()) * pairs
    return {
        "scene": scene.name,
        "rois": scene.case.rois,
        "touched_cells": scene.case.channels * int((number > 0).sum()),
        "most_additions": most_added,
        "mean_additions": float(number[number > 0].mean()),
        "pairs": pairs,
        "cells_apart_in_double": raw,
        "rows": [
            {
                "bits": t,
                "pairs_differing": differing[t],
                "cells_differing": cells[t],
                "probability": differing[t] / pairs,
                "interval": wilson(differing[t], pairs),
                "c": cells[t] / (exposure * 2.0 ** (t - 53)),
                "unproved_cells": statistics.fmean(found[t] for found in certified),
            }
            for t in BITS
        ],
        "c": sum(cells.values()) / (exposure * sum(2.0 ** (t - 53) for t in BITS)),
        "exposure": exposure,
        "certified_pairs": len(certified),
        "flips_among_proved_cells": unexplained,
        "fixed_point_differing": fixed_point_differing,
    }


def expected_flips(found: Mapping[str, Any], bits: int) -> float:
    """Cells that differ in one pair, by the model with the scene's c."""
    exposure: float = found["exposure"] / found["pairs"]
    return float(found["c"]) * exposure * 2.0 ** (bits - 53)


def first_flip(head: Sequence[Mapping[str, Any]], bits: int) -> dict[str, float | None]:
    """Steps to the first differing pair of backwards, one backward of each scene in a step.

    From the pairs that differ at 24 bits, scaled by 2^(bits-24); `low` and `high` are what the ends
    of their intervals give. None: no pair differed, so no bound in that direction.
    """
    scale = 2.0 ** (bits - 24)
    rates = {"steps": 0.0, "low": 0.0, "high": 0.0}
    for scene in head:
        row = next(row for row in scene["rows"] if row["bits"] == 24)
        for key, p in zip(rates, (row["probability"], *reversed(row["interval"])), strict=True):
            rates[key] += _rate(p) * scale
    return {key: 1 / rate if rate > 0 else None for key, rate in rates.items()}


def wilson(successes: int, trials: int) -> list[float]:
    """Wilson's 95 % interval of a proportion (J. Am. Stat. Assoc. 22, 1927)."""
    p, z = successes / trials, _Z
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    # At the ends the exact bounds, which rounding misses.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return [low, 1.0 if successes == trials else min(1.0, centre + half)]


def _rate(probability: float) -> float:
    """Events per trial of which at least one happens with this probability (Poisson)."""
    return -math.log1p(-min(probability, 1 - 1e-12))


def _rounding(bits: int) -> Any:
    return lambda value: truncdet.truncate(value, bits)


def _certify(
    sums: Sums, grad: torch.Tensor, total: torch.Tensor, most_added: int
) -> dict[int, int]:
    """Unproved cells of a whole gradient at each number of bits."""
    touched = (absolute := sums.once(grad.abs())) > 0
    total, absolute = total[touched], absolute[touched]
    return {t: int(unproved_cells(total, absolute, most_added, _rounding(t)).sum()) for t in BITS}
