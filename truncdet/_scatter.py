"""scatter_add and index_add whose sums do not depend on the order of the contributions.

A cell x of `input` with contributions c_1 .. c_m becomes, with one rounding at the end,

    R = RN( x + 2^-s * sum_i RN(c_i * 2^s) ),    s = 62 - G - e.

The segment is the whole call: e is the exponent of the largest finite magnitude among the elements
of `src` that `index` uses, and G = ceil(log2(n)) with n = index.size(dim), because every step along
`dim` sends at most one contribution to a cell (see truncdet.fixedpoint). With `exact`, and always
in float64, what the first integer rounds away goes to a second one of 62 - G more bits.

Both functions are views around one primitive, `_accumulate`, on three dimensions: before, along and
after `dim`. index_add is scatter_add with an index expanded over the other dimensions. The backward
gathers, and the gather's backward is scatter_add again, so every order of derivative repeats.

Other operators are built on these two. They pass their own bit as `operator`, which names them
where an index is out of range; with 0 such an index is left out and nothing is said. Their `input`
may be of src's compute type (float32 for half types), for sums that are not finished yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _gather as _gather  # defines the op that the backward calls
from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._divide import divide
from truncdet._library import LIB

SCATTER_ADD, INDEX_ADD = 2, 4  # their bits in truncdet._sticky

for _schema in (
    "_accumulate(Tensor input, Tensor index, Tensor src, bool exact, int operator) -> Tensor",
    "scatter_add(Tensor input, int dim, Tensor index, Tensor src, bool exact, int operator=2) "
    "-> Tensor",
    "index_add(Tensor input, int dim, Tensor index, Tensor source, bool exact, int operator=4) "
    "-> Tensor",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def accumulate_reference(
    input: Tensor, index: Tensor, src: Tensor, exact: bool, operator: int
) -> Tensor:
    """The primitive: input [O, C, I], index and src [O, n, I]; index outside [0, C) is left out."""
    kind = fp.compute_dtype(src.dtype)
    values = src.to(kind)
    exponent = fp.exponent_above(fp.amax_word(values), kind)
    headroom = torch.full_like(exponent, fp.headroom(index.size(1)))
    flags = fp.nonfinite_flags(values)
    values = fp.scale_exponent(values, -exponent)
    if operator == 0 or not index.is_cpu:  # on the CPU such an index has raised already
        outside = (index < 0) | (index >= input.size(1))
        if operator != 0:
            _sticky.note_out_of_range(operator, outside)
        if input.numel() == 0:
            return input.clone()
        index = index.masked_fill(outside, 0)
        values, flags = values.masked_fill(outside, 0), flags.masked_fill(outside, 0)

    def add(amounts: Tensor) -> Tensor:
        return torch.zeros_like(input, dtype=torch.int64).scatter_add_(1, index, amounts)

    rounded = fp.quantise(values, headroom)
    two_limbs = exact or kind == torch.float64
    low = add(fp.quantise_rest(values, rounded, headroom)) if two_limbs else None
    seen = torch.zeros_like(input, dtype=torch.int64)
    for flag in (fp.NAN, fp.PLUS_INF, fp.MINUS_INF):
        seen |= torch.where(add((flags == flag).to(torch.int64)) > 0, flag, 0)
    return fp.finish(add(rounded), low, exponent, headroom, input.dtype, existing=input, flags=seen)


def _scatter_add_impl(
    input: Tensor, dim: int, index: Tensor, src: Tensor, exact: bool, operator: int = SCATTER_ADD
) -> Tensor:
    shapes.check_range(operator, index, shapes.sizes(input)[dim])
    return _scatter(input, dim, index.to(torch.int64), src, exact, operator)


def _index_add_impl(
    input: Tensor, dim: int, index: Tensor, source: Tensor, exact: bool, operator: int = INDEX_ADD
) -> Tensor:
    shapes.check_range(operator, index, shapes.sizes(input)[dim])
    index = shapes.expand_index(index.to(torch.int64), dim, source.shape)
    return _scatter(input, dim, index, source, exact, operator)


def _scatter(
    input: Tensor, dim: int, index: Tensor, src: Tensor, exact: bool, operator: int
) -> Tensor:
    """Brings a call to the three dimensions of the primitive."""
    if index.numel() == 0:
        return input.clone(memory_format=torch.contiguous_format)
    used = tuple(slice(size) for size in shapes.sizes(index))
    receiving = shapes.receiving(index, dim)
    vectors = [x.reshape(1) if x.dim() == 0 else x for x in (input, index, src)]
    parts = (vectors[0][receiving], vectors[1], vectors[2][used])
    views = [shapes.three_dimensions(x, dim) for x in parts]
    sums: Tensor = torch.ops.truncdet._accumulate(*views, exact, operator)
    if parts[0].numel() == input.numel():
        return sums.reshape(input.shape)
    out = input.clone(memory_format=torch.contiguous_format)
    out[receiving] = sums.reshape(parts[0].shape)
    return out


def _like_input(
    input: Tensor, dim: int, index: Tensor, src: Tensor, exact: bool, operator: int = 0
) -> Tensor:
    return input.new_empty(input.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, index, src, ctx.exact, _ = inputs
    ctx.src_shape, ctx.src_dtype = src.shape, src.dtype
    ctx.save_for_backward(index)


def _scatter_add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return grad, None, None, _source_gradient(ctx, grad, index), None, None


def _index_add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    index = shapes.expand_index(index, ctx.dim, ctx.src_shape)
    return grad, None, None, _source_gradient(ctx, grad, index), None, None


def _source_gradient(ctx: Any, grad: Tensor, index: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[3]:
        return None
    if index.numel() == 0:
        return grad.new_zeros(ctx.src_shape, dtype=ctx.src_dtype)
    picked: Tensor = torch.ops.truncdet._gather(grad, ctx.dim, index, ctx.exact)
    # Elements of src beyond index were not used.
    picked = picked.reshape(picked.shape or (1,))
    unused = [size - used for size, used in zip(ctx.src_shape, picked.shape, strict=False)]
    padding = [amount for extra in reversed(unused) for amount in (0, extra)]
    picked = torch.nn.functional.pad(picked, padding) if any(unused) else picked
    return divide(picked.reshape(ctx.src_shape), None, ctx.src_dtype)


LIB.impl("_accumulate", accumulate_reference, "CompositeExplicitAutograd")
for _name, _impl, _backward in (
    ("scatter_add", _scatter_add_impl, _scatter_add_backward),
    ("index_add", _index_add_impl, _index_add_backward),
):
    LIB.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"truncdet::{_name}", _like_input, lib=LIB)
    torch.library.register_autograd(f"truncdet::{_name}", _backward, setup_context=_save, lib=LIB)


def scatter_add(
    input: Tensor, dim: int, index: Tensor, src: Tensor, *, exact: bool = False
) -> Tensor:
    """Adds the elements of `src` to the cells of `input` that `index` names, in any order alike.

    As `torch.scatter_add`, with the same bits in every run, for every order of the contributions,
    on the CPU and on any GPU (tiers T1, T2 and T3o), in forward and backward.

    Example:
        >>> x = torch.zeros(3)
        >>> truncdet.scatter_add(x, 0, torch.tensor([0, 2, 0]), torch.tensor([1.0, 2.0, 3.0]))
        tensor([4., 0., 2.])

    Args:
        input: float64, float32, float16 or bfloat16 tensor of any shape. Not changed.
        dim: the dimension along which `index` counts; negative from the end.
        index: int64 or int32 tensor with as many dimensions as `input`, nowhere larger than `src`
            and, outside `dim`, nowhere larger than `input`. Values in [0, input.size(dim)).
        src: what is added, of input's dtype and number of dimensions; elements beyond the shape of
            `index` are not used.
        exact: also keep what falls below the resolution set by the largest magnitude in `src`.
            Needed only where magnitudes spread over more than about 2^(38 - G).

    Returns:
        A new contiguous tensor of input's shape and dtype. With S the exact sum of a cell, input
        included, R the result, n = index.size(dim), amax the largest finite magnitude in `src` and
        G = ceil(log2(n)): |R - S| <= n * amax * 2^(G - 62) + 2^-24 |R| for float32 (2^-11 for
        float16, 2^-8 for bfloat16, or half the smallest subnormal number). With `exact`, and for
        float64 (2^-53), the first term is n * amax * 2^(2 G - 124). NaN and infinities reach only
        the cells they are added to; cells with a zero sum keep input's bits.

    Raises:
        TypeError: a dtype is not one of the above, or src's is not input's.
        ValueError: dim, a shape or a device does not fit; on the CPU, an index is out of range.
        TruncdetError: on CUDA, an earlier call met an index out of range (its contribution was
            dropped; see `truncdet.check`).
    """
    _sticky.raise_pending()
    shapes.check_scatter("scatter_add", input, dim, index, src)
    result: Tensor = torch.ops.truncdet.scatter_add(input, dim, index, src, exact)
    return result


def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, exact: bool = False
) -> Tensor:
    """Adds the slices of `source` to the slices of `input` that `index` names, in any order alike.

    As `torch.index_add`, with the same bits in every run, for every order of the contributions, on
    the CPU and on any GPU (tiers T1, T2 and T3o), in forward and backward.

    Example:
        >>> x = torch.zeros(2, 2)
        >>> truncdet.index_add(x, 0, torch.tensor([1, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[0., 0.],
                [4., 6.]])

    Args:
        input: float64, float32, float16 or bfloat16 tensor of any shape. Not changed.
        dim: the dimension along which `index` counts; negative from the end.
        index: int64 or int32 vector of values in [0, input.size(dim)).
        source: what is added, of input's dtype, and of its shape but for index.numel() at `dim`.
        exact: as for `scatter_add`.

    Returns:
        A new contiguous tensor of input's shape and dtype; the error bound is `scatter_add`'s with
        n = index.numel().

    Raises:
        TypeError: a dtype is not one of the above, or source's is not input's.
        ValueError: dim, a shape or a device does not fit; on the CPU, an index is out of range.
        TruncdetError: on CUDA, an earlier call met an index out of range (its contribution was
            dropped; see `truncdet.check`).
    """
    _sticky.raise_pending()
    shapes.check_index("index_add", input, dim, index, source)
    result: Tensor = torch.ops.truncdet.index_add(input, dim, index, source, exact)
    return result
