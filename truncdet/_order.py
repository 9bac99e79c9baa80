"""Integers that compare as numbers do, for sorting: every NaN is the largest, as in torch.sort.

torch.sort on a GPU may order zeros by their sign, and NaN by its; these keys leave no choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet.fixedpoint import FORMATS


def ordered_words(x: Tensor) -> Tensor:
    """Keys of x's shape: zeros of both signs are one number, and so is every NaN.

    Integers are their own keys; those of a float have its size.
    """
    if x.dtype not in FORMATS:
        return x
    fmt = FORMATS[x.dtype]
    words = x.contiguous().view(fmt.word)
    size = words & ~fmt.sign
    keys = torch.where(words < 0, -size, size)
    return keys.masked_fill_(size > fmt.infinity, fmt.infinity + 1)


def stable_order(scores: Tensor) -> Tensor:
    """The indices of a vector in descending order of values, the lower index of equals first."""
    return torch.sort(ordered_words(scores), descending=True, stable=True).indices
