"""Calls of the operators that the aten patch overrides, and truncdet's own functions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import truncdet

Function = Callable[[Tensor], Tensor]


class Gradient(NamedTuple):
    """An operator whose backward is overridden: input shape, the plain and our own function."""

    op: str
    shape: tuple[int, ...]
    plain: Function
    ours: Function


def _resized(op: str, shape: tuple[int, ...], **options: Any) -> Gradient:
    return Gradient(
        op,
        shape,
        lambda x: F.interpolate(x, **options),
        lambda x: truncdet.interpolate(x, **options),
    )


def _ours_max1d(x: Tensor) -> Tensor:
    return truncdet.adaptive_max_pool2d(x.unsqueeze(-2), (1, 4)).squeeze(-2)


GRADIENTS: Mapping[str, Gradient] = {
    "linear": _resized("upsample_linear1d", (2, 3, 9), scale_factor=1.7, mode="linear"),
    "bilinear": _resized("upsample_bilinear2d", (2, 3, 9, 5), scale_factor=1.7, mode="bilinear"),
    "bilinear scales": _resized(
        "upsample_bilinear2d", (2, 3, 9, 5), scale_factor=(1.7, 2.3), mode="bilinear"
    ),
    "bilinear corners": _resized(
        "upsample_bilinear2d", (2, 3, 9, 5), size=(4, 7), mode="bilinear", align_corners=True
    ),
    "bicubic": _resized("upsample_bicubic2d", (2, 3, 9, 5), scale_factor=2.3, mode="bicubic"),
    "bicubic corners": _resized(
        "upsample_bicubic2d", (2, 3, 9, 5), size=(4, 7), mode="bicubic", align_corners=True
    ),
    "trilinear": _resized(
        "upsample_trilinear3d", (2, 3, 3, 9, 5), scale_factor=(1.7, 2, 1.2), mode="trilinear"
    ),
    "area": _resized("_adaptive_avg_pool2d", (2, 3, 9, 5), size=(4, 3), mode="area"),
    "average 1d": Gradient(
        "_adaptive_avg_pool2d",
        (2, 3, 9),
        lambda x: F.adaptive_avg_pool1d(x, 4),
        lambda x: truncdet.adaptive_avg_pool1d(x, 4),
    ),
    "average 2d": Gradient(
        "_adaptive_avg_pool2d",
        (2, 3, 9, 5),
        torch.nn.AdaptiveAvgPool2d((4, 3)),
        lambda x: truncdet.adaptive_avg_pool2d(x, (4, 3)),
    ),
    "average 2d without batch": Gradient(
        "_adaptive_avg_pool2d",
        (3, 9, 5),
        lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
        lambda x: truncdet.adaptive_avg_pool2d(x, (4, 3)),
    ),
    "average 3d": Gradient(
        "_adaptive_avg_pool3d",
        (2, 3, 4, 9, 5),
        lambda x: F.adaptive_avg_pool3d(x, (3, 4, 3)),
        lambda x: truncdet.adaptive_avg_pool3d(x, (3, 4, 3)),
    ),
    "max 1d": Gradient(
        "adaptive_max_pool2d",
        (2, 3, 9),
        lambda x: F.adaptive_max_pool1d(x, 4),
        _ours_max1d,
    ),
    "max 2d": Gradient(
        "adaptive_max_pool2d",
        (2, 3, 9, 5),
        lambda x: F.adaptive_max_pool2d(x, (4, 3)),
        lambda x: truncdet.adaptive_max_pool2d(x, (4, 3)),
    ),
}


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


class Draw:
    """Random arguments, wrong ones among them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def shape(self, *near: int) -> list[int]:
        """`near`, or something close to it."""
        shape = list(near)
        for _ in range(self.one_of(0, 0, 1)):
            change = self.number(0, 2)
            if change == 0 and shape:
                shape[self.number(0, len(shape) - 1)] = self.number(0, 4)
            elif change == 1:
                shape.append(self.number(0, 2))
            elif shape:
                shape.pop()
        return shape

    def tensor(self, shape: list[int], *dtypes: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=self.generator).to(self.one_of(*dtypes))
        return x.t() if x.dim() == 2 and self.number(0, 4) == 0 else x

    def index(self, shape: list[int], size: int) -> Tensor:
        high = max(size + self.one_of(*[0] * 9, 1), 1)
        x = torch.randint(0, high, shape, generator=self.generator)
        return x.to(self.one_of(*[torch.int64] * 6, torch.int32, torch.int16, torch.float32))
