"""Losses of maps and sequences, from aten's arguments to truncdet's.

Each leaves what truncdet refuses to the original and its error. The forward of ctc_loss and the
backward of nll_loss add nothing by atomics and stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import supported, unless_refused

from truncdet import _ctc_loss_arguments as sequences
from truncdet import _nll_loss_arguments as maps
from truncdet import _sticky
from truncdet._divide import divide
from truncdet._nll_loss import Losses

_REDUCTIONS = {1: "mean", 2: "sum"}


def nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor] | None:
    """In the arguments of `aten::nll_loss2d_forward`: the loss and the sum of the factors.

    PyTorch's backward divides by the latter; in half types it is rounded, as PyTorch's own is.
    """
    if reduction not in _REDUCTIONS or target.layout != torch.strided:
        return None
    if not supported(self, *([] if weight is None else [weight])):
        return None
    if self.dim() != 4 or target.dtype != torch.int64:
        return None
    return unless_refused(
        _nll_loss, self, target, weight, _REDUCTIONS[reduction], int(ignore_index)
    )


def reduces(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> bool:
    """Without a reduction every place has a loss of its own, and nothing is added."""
    return reduction != 0


def _nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor]:
    _sticky.raise_pending()
    if weight is not None:
        weight = weight.reshape(-1)  # any shape with an element for each class will do
    maps.check_input("nll_loss", input, weight)
    maps.check_target("nll_loss", input, target, weight)
    losses = Losses(input, target, weight, ignore_index, _sticky.NLL_LOSS)
    return losses.reduce(reduction), divide(losses.total_factor(), None, input.dtype)


def ctc_loss(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor | None:
    """In the arguments of `aten::_ctc_loss_backward`.

    PyTorch's `log_alpha` is float32 for float32, and its last bits are the processor's: the paths
    are followed once more, in float64.
    """
    if not supported(log_probs, grad) or targets.layout != torch.strided:
        return None
    if log_probs.dim() != 3 or grad.shape != log_probs.shape[1:2]:
        return None
    rest = (input_lengths, target_lengths, blank, zero_infinity)
    return unless_refused(_ctc_loss, grad, log_probs, targets, *rest)


def _ctc_loss(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    _sticky.raise_pending()
    sequences.check(log_probs, targets, blank)
    times, items = log_probs.shape[:2]
    most = targets.size(-1)
    device = log_probs.device
    inputs = sequences.lengths("input_lengths", input_lengths, items, times, device)
    wanted = sequences.lengths("target_lengths", target_lengths, items, most, device)
    labels = sequences.by_item(targets, target_lengths, wanted, items)
    case, rest = (log_probs, labels, inputs, wanted), (blank, zero_infinity)
    _, *state = torch.ops.truncdet.ctc_loss(*case, *rest)
    gradient: Tensor = torch.ops.truncdet.ctc_loss_backward(grad, *case, *state, *rest)
    return gradient
