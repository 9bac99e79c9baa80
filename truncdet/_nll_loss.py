"""nll_loss: a term for every place, and sums of the terms whose order does not matter.

With x of shape [N, C, L] and t = target[n, l] the place (n, l) has

    term   = -(x[n, t, l] * weight[t])    in the compute type (float32, or float64 for float64)
    factor = weight[t], or 1 without weights

and both are 0 where t is ignored. With S and W the sums of terms and factors (scatter_add's fixed
point, each rounded once to the compute type), 'none' gives the terms, 'sum' S, 'mean' S / W, in one
more rounding to the storage type. The backward is a gather: a cell of the gradient belongs to one
place, and is -(g * weight[t]) where its class is t, else 0.

_nll_terms and _nll_spread are transposes of each other, so every order of derivative repeats. Their
plain-tensor references are in _nll_loss_reference.py, the kernels in csrc.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _nll_loss_arguments as arguments
from truncdet import _nll_loss_reference as reference
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._autocast import as_autocast
from truncdet._divide import divide
from truncdet._library import LIB
from truncdet._total import ratio, total

for _schema in (
    "_nll_terms(Tensor input, Tensor target, Tensor? weight, int ignore_index, int operator) "
    "-> (Tensor, Tensor)",
    "nll_terms(Tensor input, Tensor target, Tensor? weight, int ignore_index, int operator) "
    "-> (Tensor, Tensor)",
    "_nll_spread(Tensor grad, Tensor target, Tensor? weight, SymInt classes, int ignore_index, "
    "ScalarType dtype) -> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _terms(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, operator: int
) -> tuple[Tensor, Tensor]:
    if operator != 0:
        name = _sticky.OPERATORS[operator]
        arguments.check_range(name, target, input.size(1), ignore_index)
    pair: tuple[Tensor, Tensor] = torch.ops.truncdet._nll_terms(
        input, target, weight, ignore_index, operator
    )
    return pair


def _fake_terms(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, operator: int
) -> tuple[Tensor, Tensor]:
    kind = fp.compute_dtype(input.dtype)
    shape = target.shape
    return input.new_empty(shape, dtype=kind), input.new_empty(shape, dtype=kind)


def _fake_spread(
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    return grad.new_empty((grad.size(0), classes, grad.size(1)), dtype=dtype)


def _save_terms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, weight, ctx.ignore_index, _ = inputs
    ctx.classes, ctx.dtype = input.size(1), input.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(target, weight)


def _terms_backward(ctx: Any, grad: Tensor, _factor: Any) -> tuple[Tensor | None, ...]:
    rest = (ctx.classes, ctx.ignore_index, ctx.dtype)
    spread = torch.ops.truncdet._nll_spread(grad, *ctx.saved_tensors, *rest)
    return spread, None, None, None, None


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, target, weight, _, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(target, weight)


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The forward has reported a target out of range.
    rest = (ctx.ignore_index, 0)
    terms, _ = torch.ops.truncdet.nll_terms(grad, *ctx.saved_tensors, *rest)
    return terms, None, None, None, None, None


LIB.impl("_nll_terms", reference.terms, "CompositeExplicitAutograd")
LIB.impl("nll_terms", _terms, "CompositeExplicitAutograd")
LIB.impl("_nll_spread", reference.spread, "CompositeExplicitAutograd")
torch.library.register_fake("truncdet::_nll_terms", _fake_terms, lib=LIB)
for _name, _fake, _formula, _setup in (
    ("nll_terms", _fake_terms, _terms_backward, _save_terms),
    ("_nll_spread", _fake_spread, _spread_backward, _save_spread),
):
    torch.library.register_fake(f"truncdet::{_name}", _fake, lib=LIB)
    torch.library.register_autograd(f"truncdet::{_name}", _formula, setup_context=_setup, lib=LIB)


class Losses:
    """The terms of one call, and what the reductions make of them."""

    def __init__(
        self, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, bit: int
    ) -> None:
        self.shape, self.dtype = target.shape, input.dtype
        places = arguments.by_places(input, target)
        self._factor: Tensor | None = None
        self.terms, self.factors = torch.ops.truncdet.nll_terms(*places, weight, ignore_index, bit)

    def reduce(self, reduction: str) -> Tensor:
        """One value a place, or one for all."""
        if reduction == "none":
            return divide(self.terms, None, self.dtype).reshape(self.shape)
        loss = total(self.terms)
        if reduction == "mean":
            loss = ratio(loss, self.total_factor())
        return divide(loss, None, self.dtype)

    def total_factor(self) -> Tensor:
        """What a mean divides by, in the compute type; added once."""
        if self._factor is None:
            self._factor = total(self.factors)
        return self._factor


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Adds what the log probabilities of the target classes fall short of 0, in any order alike.

    A drop-in for `torch.nn.functional.nll_loss`, whose CUDA kernel for maps adds by float atomics.
    The same bits run to run, on CPU and GPU, and for any order of the places (tiers T1, T2 and
    T3o), in forward and backward.

    Example:
        >>> logs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
        >>> truncdet.nll_loss(logs, torch.tensor([0, 1]))
        tensor(2.5000)

    Args:
        input: log probabilities, [C], [N, C] or [N, C, d1, ...]; float64, float32, float16 or
            bfloat16; any layout.
        target: class indices in [0, C), of input's shape without C; int64, int32 or uint8.
        weight: [C], a factor for each class, of input's dtype; without a gradient.
        size_average: old name, see `reduction`.
        ignore_index: a target that takes no part.
        reduce: old name, see `reduction`.
        reduction: 'none', 'sum', or 'mean', which divides by the sum of the factors used.

    Returns:
        A scalar, or for 'none' a tensor of target's shape, of input's dtype. With S and W the exact
        sums of the n terms and factors (a term is a product rounded to float32, to float64 for
        float64), A and B the largest of them and G = ceil(log2(n)), the sums R have
        |R - S| <= n * A * 2^(G - 62) + 2^-24 |R| and the same with W and B; in float64
        n * A * 2^(2 G - 124) + 2^-53 |R|. A mean is their quotient, rounded once; float16 and
        bfloat16 are rounded once more. Without a used target a mean is NaN, as PyTorch has it.

    Raises:
        TypeError: an argument or a dtype is none of the above.
        ValueError: a shape, a device or the reduction does not fit, or weight requires a gradient;
            on the CPU, a target is out of range.
        TruncdetError: on CUDA, an earlier call met a target out of range (it was ignored; see
            `truncdet.check`).
    """
    _sticky.raise_pending()
    reduction = arguments.check_reduction("nll_loss", reduction, size_average, reduce)
    arguments.check_input("nll_loss", input, weight)
    arguments.check_target("nll_loss", input, target, weight)
    input, weight = as_autocast("nll_loss", input, weight)
    return Losses(input, target, weight, ignore_index, _sticky.NLL_LOSS).reduce(reduction)
