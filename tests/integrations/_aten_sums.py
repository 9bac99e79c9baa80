"""Calls of sums by index that the aten patch overrides, and truncdet's own functions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import truncdet


class Sum(NamedTuple):
    """An operator on (input [4, 3], index, src) with many contributions a cell, and our own."""

    indices: Callable[[Tensor], Tensor]  # from one row number a contribution
    plain: Callable[[Tensor, Tensor, Tensor], Tensor]
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]


def _gathered(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return _picked(torch.gather, input, index, src)


def _selected(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return _picked(torch.index_select, input, index, src)


def _taken(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return _picked(lambda x, dim, i: torch.take_along_dim(x, i, dim), input, index, src)


def _indexed(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return _picked(lambda x, dim, i: x[i], input, index, src)


def _took(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return _picked(lambda x, dim, i: x.take(_cells(i)), input, index, src)


def _cells(rows: Tensor) -> Tensor:
    """Where the elements of rows of three are, counted from the end of the whole input."""
    return rows[:, None] * 3 + torch.arange(-12, -9, device=rows.device)


def _picked(read: Callable[..., Tensor], input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """The gradient of reading by index, whose upstream gradient is `src`."""
    leaf = input.detach().clone().requires_grad_()
    return torch.autograd.grad(read(leaf, 0, index), leaf, src)[0]


def _out(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    out = torch.empty(0, dtype=arguments[0].dtype, device=arguments[0].device)
    assert function(*arguments, out=out, **options) is out
    return out


def _vector(rows: Tensor) -> Tensor:
    return rows


def _columns(rows: Tensor) -> Tensor:
    return rows[:, None].expand(-1, 3)


def _scattered(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return truncdet.scatter_add(input, 0, index, src)


def _added(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return truncdet.index_add(input, 0, index, src)


def _put(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return truncdet.index_put(input, [index], src, True)


def _reduced(how: str, **options: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, i, s: truncdet.scatter_reduce(x, 0, i, s, how, **options)


def _row_means(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return truncdet.scatter_reduce(input, 0, _columns(index), src, "mean")


def _looked_up(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """The gradient of a table `input` whose rows were looked up."""

    def gradient(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
        table = input.detach().clone().requires_grad_()
        return torch.autograd.grad(function(index, table, **options), table, src)[0]

    return gradient


def _bagged(function: Callable[..., Tensor], weights: bool = False, **options: Any) -> Any:
    """The gradient of a table whose rows were looked up in bags of one row."""

    def gradient(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
        table = input.detach().clone().requires_grad_()
        starts = torch.arange(len(index), device=index.device)
        samples = src[:, 1].contiguous() if weights else None
        out = function(index, table, starts, per_sample_weights=samples, **options)
        return torch.autograd.grad(out, table, src)[0]

    return gradient


def _segmented(function: Callable[..., Tensor], how: str) -> Callable[..., Tensor]:
    """Reduces the contributions of every row, which stand together and in their own order."""

    def reduced(input: Tensor, index: Tensor, src: Tensor) -> Tensor:
        order = index.argsort(stable=True)
        return function(src[order], how, lengths=torch.bincount(index, minlength=4), axis=0)

    return reduced


def _double_in_place(name: str, how: str, **options: bool) -> Callable[..., Tensor]:
    """A method in place, which takes the name of a reduction."""
    return lambda x, i, s: getattr(x.clone(), name)(0, i, s, reduce=how, **options)


SUMS: Mapping[str, Sum] = {
    "scatter_add": Sum(_columns, lambda x, i, s: torch.scatter_add(x, 0, i, s), _scattered),
    "Tensor.scatter_add": Sum(_columns, lambda x, i, s: x.scatter_add(0, i, s), _scattered),
    "scatter_add_": Sum(_columns, lambda x, i, s: x.clone().scatter_add_(0, i, s), _scattered),
    "scatter_add out": Sum(
        _columns, lambda x, i, s: _out(torch.scatter_add, x, 0, i, s), _scattered
    ),
    "index_add": Sum(_vector, lambda x, i, s: torch.index_add(x, 0, i, s), _added),
    "index_add alpha": Sum(
        _vector,
        lambda x, i, s: x.index_add(0, i, s, alpha=-1.7),
        lambda x, i, s: truncdet.index_add(x, 0, i, s * -1.7),
    ),
    "index_add_": Sum(_vector, lambda x, i, s: x.clone().index_add_(0, i, s), _added),
    "index_add_ alpha": Sum(
        _vector,
        lambda x, i, s: x.clone().index_add_(0, i, s, alpha=3),
        lambda x, i, s: truncdet.index_add(x, 0, i, s * 3),
    ),
    "index_add out": Sum(
        _vector,
        lambda x, i, s: _out(torch.index_add, x, 0, i, s, alpha=2),
        lambda x, i, s: truncdet.index_add(x, 0, i, s * 2),
    ),
    "gather backward": Sum(
        _columns, _gathered, lambda x, i, s: _scattered(torch.zeros_like(x), i, s)
    ),
    "take_along_dim backward": Sum(
        _columns, _taken, lambda x, i, s: _scattered(torch.zeros_like(x), i, s)
    ),
    "index_select backward": Sum(
        _vector, _selected, lambda x, i, s: _added(torch.zeros_like(x), i, s)
    ),
}

ADDITIONS: Mapping[str, Sum] = {
    "index_put": Sum(_vector, lambda x, i, s: torch.index_put(x, (i,), s, True), _put),
    "index_put_": Sum(
        _vector, lambda x, i, s: x.clone().index_put_((i,), s, accumulate=True), _put
    ),
    "index_put_ from the end": Sum(
        _vector, lambda x, i, s: x.clone().index_put_((i - 4,), s, accumulate=True), _put
    ),
    "index_put_ of a transposed input": Sum(
        _vector, lambda x, i, s: x.t().contiguous().t().index_put_((i,), s, accumulate=True), _put
    ),
    "_unsafe_index_put": Sum(
        _vector, lambda x, i, s: torch.ops.aten._unsafe_index_put(x, [i], s, True), _put
    ),
    "index_put out": Sum(
        _vector,
        lambda x, i, s: torch.ops.aten.index_put.out(x, [i], s, True, out=torch.empty_like(x)),
        _put,
    ),
    "x[index] backward": Sum(_vector, _indexed, lambda x, i, s: _put(torch.zeros_like(x), i, s)),
    "put_": Sum(
        _vector,
        lambda x, i, s: x.clone().put_(_cells(i), s, accumulate=True),
        lambda x, i, s: truncdet.index_put(x.reshape(-1), [_cells(i)], s, True).reshape(4, 3),
    ),
    "take backward": Sum(
        _vector,
        _took,
        lambda x, i, s: truncdet.index_put(x.new_zeros(12), [_cells(i)], s, True).reshape(4, 3),
    ),
    "scatter_reduce sum": Sum(
        _columns, lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "sum"), _scattered
    ),
    "scatter_reduce mean": Sum(
        _columns, lambda x, i, s: x.scatter_reduce(0, i, s, "mean"), _reduced("mean")
    ),
    "scatter_reduce_ mean, alone": Sum(
        _columns,
        lambda x, i, s: x.clone().scatter_reduce_(0, i, s, "mean", include_self=False),
        _reduced("mean", include_self=False),
    ),
    "scatter_reduce out": Sum(
        _columns,
        lambda x, i, s: _out(torch.scatter_reduce, x, 0, i, s, "sum", include_self=False),
        _reduced("sum", include_self=False),
    ),
    "scatter add": Sum(
        _columns, lambda x, i, s: torch.scatter(x, 0, i, s, reduce="add"), _scattered
    ),
    "scatter_ add": Sum(_columns, _double_in_place("scatter_", "add"), _scattered),
    "scatter add out": Sum(
        _columns, lambda x, i, s: _out(torch.scatter, x, 0, i, s, reduce="add"), _scattered
    ),
    "index_reduce": Sum(
        _vector, lambda x, i, s: torch.index_reduce(x, 0, i, s, "mean"), _row_means
    ),
    "index_reduce_ alone": Sum(
        _vector,
        _double_in_place("index_reduce_", "mean", include_self=False),
        lambda x, i, s: _reduced("mean", include_self=False)(x, _columns(i), s),
    ),
    "index_reduce out": Sum(
        _vector, lambda x, i, s: _out(torch.index_reduce, x, 0, i, s, "mean"), _row_means
    ),
    "embedding backward": Sum(_vector, _looked_up(F.embedding), _looked_up(truncdet.embedding)),
    "embedding backward, padded and scaled": Sum(
        _vector,
        _looked_up(F.embedding, padding_idx=1, scale_grad_by_freq=True),
        _looked_up(truncdet.embedding, padding_idx=1, scale_grad_by_freq=True),
    ),
    "embedding_bag sum backward": Sum(
        _vector,
        _bagged(F.embedding_bag, mode="sum", scale_grad_by_freq=True),
        _bagged(truncdet.embedding_bag, mode="sum", scale_grad_by_freq=True),
    ),
    "embedding_bag mean backward": Sum(
        _vector,
        _bagged(F.embedding_bag, mode="mean", padding_idx=2),
        _bagged(truncdet.embedding_bag, mode="mean", padding_idx=2),
    ),
    "embedding_bag weighted backward": Sum(
        _vector,
        _bagged(F.embedding_bag, True, mode="sum"),
        _bagged(truncdet.embedding_bag, True, mode="sum"),
    ),
    "embedding_bag max backward": Sum(
        _vector,
        _bagged(F.embedding_bag, mode="max"),
        lambda x, i, s: _added(torch.zeros_like(x), i, s),
    ),
    "bincount": Sum(
        _vector,
        lambda x, i, s: torch.bincount(i, s[:, 0], 5),
        lambda x, i, s: truncdet.bincount(i, s[:, 0], 5),
    ),
    **{
        f"segment_reduce {how}": Sum(
            _vector,
            _segmented(torch.segment_reduce, how),
            _segmented(truncdet.segment_reduce, how),
        )
        for how in ("sum", "mean")
    },
}
