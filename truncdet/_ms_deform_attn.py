"""Multi-scale deformable attention that repeats bit for bit: schema, autograd, public function.

The maths and the plain-tensor reference are in _ms_deform_attn_reference.py, the kernels in csrc.
There is no module beside the function: mmcv's MultiScaleDeformableAttention is a layer of four
linear projections, a dropout and a residual around it, and its copies differ in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _ms_deform_attn_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._sticky import raise_pending
from truncdet.fixedpoint import FORMATS, compute_dtype

_TENSORS = (
    "Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_locations, "
    "Tensor attention_weights"
)
for _schema in (
    f"ms_deform_attn({_TENSORS}) -> Tensor",
    f"ms_deform_attn_backward(Tensor grad, {_TENSORS}) -> (Tensor, Tensor, Tensor)",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("ms_deform_attn", reference.forward, "CompositeExplicitAutograd")
LIB.impl("ms_deform_attn_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::ms_deform_attn", lib=LIB)
def _fake_forward(value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, _: Tensor) -> Tensor:
    return value.new_empty((value.size(0), loc.size(1), value.size(2) * value.size(3)))


@torch.library.register_fake("truncdet::ms_deform_attn_backward", lib=LIB)
def _fake_backward(
    grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (value, loc, weights))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, loc, weights = torch.ops.truncdet.ms_deform_attn_backward(grad, *ctx.saved_tensors)
    return value, None, None, loc, weights


torch.library.register_autograd(
    "truncdet::ms_deform_attn", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::ms_deform_attn_backward", without_second_derivative("ms_deform_attn"), lib=LIB
)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int = 64,
) -> Tensor:
    """Sums weighted samples of several feature maps for every query and head; bits repeat.

    A drop-in for the function behind mmcv's `MultiScaleDeformableAttention` and Deformable DETR's
    `MSDeformAttn`. The gradient of `value` is accumulated in fixed point (see
    `truncdet.fixedpoint`), all else is summed in a fixed order: the same bits run to run, on CPU
    and GPU, whatever the order of the queries, and for one image whatever else is in the batch.

    Example:
        >>> value = torch.arange(5.0).reshape(1, 5, 1, 1)  # a map of 2 x 2 and one of 1 x 1
        >>> shapes, starts = torch.tensor([[2, 2], [1, 1]]), torch.tensor([0, 4])
        >>> middle = torch.full((1, 1, 1, 2, 1, 2), 0.5)
        >>> halves = torch.full((1, 1, 1, 2, 1), 0.5)
        >>> truncdet.ms_deform_attn(value, shapes, starts, middle, halves)
        tensor([[[2.7500]]])

    Args:
        value: [N, S, M, D], the cells of all levels one after the other, for M heads of D channels;
            float64, float32, float16 or bfloat16.
        spatial_shapes: [L, 2], int64 or int32: (height, width) of every level's map.
        level_start_index: [L], int64 or int32: the first cell of every level in `value`.
        sampling_locations: [N, Lq, M, L, P, 2] of (x, y), 0 and 1 being the edges of a map. Of any
            floating dtype; those wider than value's are not rounded to it.
        attention_weights: [N, Lq, M, L, P], of any floating dtype; usually a softmax over L and P.
        im2col_step: accepted for mmcv's sake; every batch size is one step here.

    Returns:
        [N, Lq, M * D] of value's dtype. With S the exact sum of the contributions of one cell of
        value's gradient, n their number, A and B the image's largest finite magnitudes of weights
        and of the gradient, and G = ceil(log2(Lq * L * P)): |R - S| <= n * 2 A B 2^(G - 62) +
        2^-24 |R| for float32 (2^-11 for float16, 2^-8 for bfloat16); for float64
        n * 2 A B 2^(2 G - 124) + 2^-53 |R|.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a shape or a device does not fit; on the CPU, a level reaches beyond `value`.
        TruncdetError: an earlier call met such a level on a GPU (it was left out; see `check`), or
            a second derivative is asked for.

    Formula: Zhu et al., "Deformable DETR", ICLR 2021, equation 3.
    """
    raise_pending()
    _check(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
    if not sampling_locations.dtype == attention_weights.dtype == value.dtype:
        kind = compute_dtype(value.dtype)
        sampling_locations = sampling_locations.to(kind)
        attention_weights = attention_weights.to(kind)
    levels = (spatial_shapes.to(torch.int64), level_start_index.to(torch.int64))
    arguments = (value, *levels, sampling_locations, attention_weights)
    result: Tensor
    if torch.compiler.is_compiling():
        result = torch.ops.truncdet.ms_deform_attn(*arguments)
        return result
    try:
        result = torch.ops.truncdet.ms_deform_attn(*arguments)
    except RuntimeError:
        # The compiled kernel can only raise a RuntimeError; looking at the levels beforehand would
        # break tracing with fake tensors.
        if value.is_cpu:
            reference.check_levels(value, *levels)
        raise
    return result


def _check(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> None:
    """Raises for arguments that ms_deform_attn cannot take, naming the argument."""
    named = {
        "value": value,
        "spatial_shapes": shapes,
        "level_start_index": starts,
        "sampling_locations": locations,
        "attention_weights": weights,
    }
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"ms_deform_attn: {name} must be a Tensor, got {type(x).__name__}")
        integer = x is shapes or x is starts
        if integer and x.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ms_deform_attn: {name} must be int64 or int32, got {x.dtype}")
        if not integer and x.dtype not in FORMATS:
            raise TypeError(
                f"ms_deform_attn: {name} must be float64, float32, float16 or bfloat16, "
                f"got {x.dtype}"
            )
        if x.device != value.device:
            raise ValueError(
                f"ms_deform_attn: {name} must be on value's device, {value.device}, got {x.device}"
            )
    if value.dim() != 4:
        raise ValueError(
            f"ms_deform_attn: value must have shape [N, S, M, D], got {list(value.shape)}"
        )
    if shapes.dim() != 2 or shapes.size(1) != 2:
        raise ValueError(
            f"ms_deform_attn: spatial_shapes must have shape [L, 2], got {list(shapes.shape)}"
        )
    if starts.shape != shapes.shape[:1]:
        raise ValueError(
            f"ms_deform_attn: level_start_index must have shape [{shapes.size(0)}], "
            f"got {list(starts.shape)}"
        )
    n, _, heads, _ = value.shape
    levels = shapes.size(0)
    if locations.dim() != 6 or (
        (locations.size(0), *locations.shape[2:4], locations.size(5)) != (n, heads, levels, 2)
    ):
        raise ValueError(
            "ms_deform_attn: sampling_locations must have shape "
            f"[{n}, Lq, {heads}, {levels}, P, 2], got {list(locations.shape)}"
        )
    if weights.shape != locations.shape[:5]:
        raise ValueError(
            f"ms_deform_attn: attention_weights must have shape {list(locations.shape[:5])}, "
            f"got {list(weights.shape)}"
        )
