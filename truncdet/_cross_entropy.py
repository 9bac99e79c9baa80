"""cross_entropy: PyTorch's log_softmax, and nll_loss.

With a = label_smoothing, S the loss of nll_loss on the log probabilities, and U, over the same
places and reduced alike, the sum of all classes instead of the target's alone,

    loss = (1 - a) S + (a / C) U.

Logarithms and exponentials are PyTorch's, whose last bits are not the same on a CPU and a GPU.
Targets that are probabilities go to PyTorch's own function: it multiplies and sums in a fixed
order, so its bits repeat.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from truncdet import _nll_loss_arguments as arguments
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._autocast import as_autocast
from truncdet._divide import divide
from truncdet._nll_loss import Losses
from truncdet._total import ratio, total


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compares logits with classes, or with probabilities of classes; the bits repeat.

    A drop-in for `torch.nn.functional.cross_entropy`, whose CUDA kernel for maps adds by float
    atomics. Logarithms of probabilities are PyTorch's own; the places are added in fixed point, as
    `nll_loss` does. The same bits run to run on one device (tier T1), forward and backward.

    Example:
        >>> logits = torch.zeros(2, 4, 3, 3)
        >>> target = torch.ones(2, 3, 3, dtype=torch.int64)
        >>> truncdet.cross_entropy(logits, target)
        tensor(1.3863)

    Args:
        input: logits, [C], [N, C] or [N, C, d1, ...]; float64, float32, float16 or bfloat16; any
            layout.
        target: class indices in [0, C), of input's shape without C (int64, int32 or uint8), or
            probabilities of input's shape, which PyTorch's own function takes.
        weight: [C], a factor for each class, of input's dtype; without a gradient for class
            indices.
        size_average: old name, see `reduction`.
        ignore_index: a target that takes no part; for class indices only.
        reduce: old name, see `reduction`.
        reduction: 'none', 'sum', or 'mean', which divides by the sum of the factors used; for
            probabilities, by the number of places.
        label_smoothing: in [0, 1], the part of every target that is spread over all classes.

    Returns:
        A scalar, or for 'none' a tensor of input's shape without C, of input's dtype. The sums over
        places have `nll_loss`'s bound.

    Raises:
        TypeError: an argument or a dtype is none of the above.
        ValueError: a shape, a device or an option does not fit, or weight requires a gradient; on
            the CPU, a target is out of range.
        TruncdetError: on CUDA, an earlier call met a target out of range (it was ignored; see
            `truncdet.check`).

    Label smoothing: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
    CVPR 2016.
    """
    _sticky.raise_pending()
    reduction = arguments.check_reduction("cross_entropy", reduction, size_average, reduce)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing}")
    if isinstance(input, Tensor) and isinstance(target, Tensor) and input.shape == target.shape:
        if not target.is_floating_point():
            raise TypeError(
                "cross_entropy: target must be of a floating dtype where it has input's shape, "
                f"got {target.dtype}"
            )
        out: Tensor = F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return out
    arguments.check_input("cross_entropy", input, weight)
    arguments.check_target("cross_entropy", input, target, weight)
    input, weight = as_autocast("cross_entropy_loss", input, weight)
    # With the dtype, as PyTorch calls it: autocast then leaves the type alone.
    logs = torch.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=input.dtype)
    logs, weight = as_autocast("nll_loss", logs, weight)
    losses = Losses(logs, target, weight, ignore_index, _sticky.CROSS_ENTROPY)
    loss = losses.reduce(reduction)
    if label_smoothing == 0.0:
        return loss
    smooth = _over_all_classes(logs, target, weight, ignore_index, losses, reduction)
    classes = logs.size(0 if logs.dim() == 1 else 1)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / classes)


def _over_all_classes(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    losses: Losses,
    reduction: str,
) -> Tensor:
    """U of the module's formula; the classes of one place are added by PyTorch, in fixed order."""
    axis = 0 if logs.dim() == 1 else 1
    kind = fp.compute_dtype(logs.dtype)
    weighted = logs
    if weight is not None:
        weighted = logs * weight.reshape([-1 if d == axis else 1 for d in range(logs.dim())])
    sums = -weighted.sum(axis, dtype=kind)
    unused = (target == ignore_index) | (target < 0) | (target >= logs.size(axis))
    sums = sums.masked_fill(unused, 0)
    if reduction != "none":
        sums = total(sums)
    if reduction == "mean":
        sums = ratio(sums, losses.total_factor())
    return divide(sums, None, logs.dtype)
