"""ctc_loss whose gradient repeats bit for bit: schema, autograd and the public function.

The maths and the plain-tensor reference are in _ctc_loss_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _ctc_loss_arguments as arguments
from truncdet import _ctc_loss_reference as reference
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._autocast import as_autocast
from truncdet._ctc_loss_arguments import Lengths
from truncdet._divide import divide
from truncdet._library import LIB
from truncdet._nll_loss_arguments import check_reduction
from truncdet._refusals import without_second_derivative
from truncdet._total import ratio, total

_REST = "Tensor targets, Tensor input_lengths, Tensor target_lengths"
for _schema in (
    f"_ctc_loss(Tensor log_probs, {_REST}, int blank, bool zero_infinity) "
    "-> (Tensor, Tensor, Tensor)",
    f"ctc_loss(Tensor log_probs, {_REST}, int blank, bool zero_infinity) "
    "-> (Tensor, Tensor, Tensor)",
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, {_REST}, Tensor likelihood, Tensor alpha, "
    "int blank, bool zero_infinity) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _forward(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    arguments.check_range(log_probs, targets, input_lengths, target_lengths)
    outputs: tuple[Tensor, Tensor, Tensor] = torch.ops.truncdet._ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return outputs


def _fake_forward(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    times, items, _classes = log_probs.shape
    alpha = log_probs.new_empty((items, times, 2 * targets.size(1) + 1), dtype=torch.float64)
    return log_probs.new_empty(items), log_probs.new_empty(items, dtype=torch.float64), alpha


def _fake_backward(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    rest = (*ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    gradient = torch.ops.truncdet.ctc_loss_backward(grad, *rest)
    return gradient, None, None, None, None, None


LIB.impl("_ctc_loss", reference.forward, "CompositeExplicitAutograd")
LIB.impl("ctc_loss", _forward, "CompositeExplicitAutograd")
LIB.impl("ctc_loss_backward", reference.backward, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_ctc_loss", _fake_forward, lib=LIB)
torch.library.register_fake("truncdet::ctc_loss", _fake_forward, lib=LIB)
torch.library.register_fake("truncdet::ctc_loss_backward", _fake_backward, lib=LIB)
torch.library.register_autograd("truncdet::ctc_loss", _backward, setup_context=_save, lib=LIB)
torch.library.register_autograd(
    "truncdet::ctc_loss_backward", without_second_derivative("ctc_loss"), lib=LIB
)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Scores all alignments of a target with a longer sequence; the gradient's bits repeat.

    A drop-in for `torch.nn.functional.ctc_loss`, whose CUDA backward adds by float atomics. Paths
    are followed in float64 with exponentials and logarithms of our own, every sum in one fixed
    order: the same bits run to run, on CPU and GPU, and for one item whatever else is in the batch
    (tiers T1, T2 and T3c; T3o for the order of the items).

    Example:
        >>> logs = torch.full((4, 1, 3), 1 / 3).log()
        >>> truncdet.ctc_loss(logs, torch.tensor([[1, 2]]), (4,), (2,), reduction="sum")
        tensor(1.6864)

    Args:
        log_probs: [T, N, C], or [T, C] for one item: logarithms of probabilities that add up to 1
            over C, as log_softmax gives them; float64, float32, float16 or bfloat16; any layout.
        targets: labels in [0, C) of any integer dtype, [N, S], or all targets one after the other,
            [sum of target_lengths].
        input_lengths: [N], in [0, T]; a tensor of integers or a sequence. One number, [1] or [],
            for one item.
        target_lengths: [N], in [0, S], likewise.
        blank: the class that is no label.
        reduction: 'none', 'sum', or 'mean': each loss by its target's length (at least 1), then
            the mean of the items.
        zero_infinity: losses that are infinite, because a sequence is too short for its target,
            are 0 and have no gradient. Otherwise their gradient is NaN, as PyTorch has it.

    Returns:
        [N] for 'none' ([] for one item), else a scalar, of log_probs' dtype. With A the largest
        magnitude of a path's log probability, at most T times that of log_probs, a loss R has
        |R - S| <= T * 2^-50 * (A + 4) + 2^-24 |R| for float32 (2^-53, 2^-11 and 2^-8 for the other
        types), a gradient the same with its first term times the loss's gradient; PyTorch's float32
        has T * 2^-21 * (A + 4) in its place. Sums of losses have `nll_loss`'s bound. The gradient
        is PyTorch's, which is meant to go through log_softmax: exp(log_probs) is part of it. Where
        a log probability is -inf it is 0 (PyTorch: NaN).

    Raises:
        TypeError: an argument or a dtype is none of the above.
        ValueError: a shape, a device, blank or the reduction does not fit; on the CPU, or where
            lengths are a sequence, a length or a label is out of range.
        TruncdetError: a second derivative is asked for; or, on CUDA, an earlier call met a length
            (the nearest possible one was used) or a label (it counted as blank) out of range (see
            `truncdet.check`).

    Memory besides: 16 bytes for every item, time and state (2 S + 1), of which half is kept for the
    backward; PyTorch's takes 8. A GPU is waited for where targets are one after the other and their
    lengths are a tensor.

    Formula: Graves et al., "Connectionist temporal classification", ICML 2006.
    """
    _sticky.raise_pending()
    reduction = check_reduction("ctc_loss", reduction)
    arguments.check(log_probs, targets, blank)
    log_probs, _ = as_autocast("ctc_loss.IntList", log_probs, None)
    batched = log_probs.dim() == 3
    probs = log_probs if batched else log_probs.unsqueeze(1)
    times, items = probs.shape[:2]
    inputs = arguments.lengths("input_lengths", input_lengths, items, times, probs.device)
    most = targets.size(1) if targets.dim() == 2 else targets.size(0)
    wanted = arguments.lengths("target_lengths", target_lengths, items, most, probs.device)
    labels = arguments.by_item(targets, target_lengths, wanted, items)
    losses: Tensor = torch.ops.truncdet.ctc_loss(
        probs, labels, inputs, wanted, blank, zero_infinity
    )[0]
    if reduction == "none":
        return losses if batched else losses.squeeze(0)
    wide = divide(losses, None, fp.compute_dtype(losses.dtype))
    if reduction == "sum":
        return divide(total(wide), None, losses.dtype)
    count = torch.full((), items, dtype=torch.int64, device=probs.device)
    each = ratio(wide, wanted.clamp(min=1).to(wide.dtype))
    return divide(total(each), count, losses.dtype)
