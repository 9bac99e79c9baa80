"""Forward-mode derivatives and torch.func: errors that name the operator, not silent zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import truncdet

INDEX = torch.tensor([0, 2, 2, 1])
BOX = torch.tensor([[0, 0.0, 0, 3, 3]])
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "index_select": (lambda x: truncdet.index_select(x, 0, INDEX), torch.ones(4, 3)),
    "index_add": (lambda x: truncdet.index_add(torch.zeros(3, 3), 0, INDEX, x), torch.ones(4, 3)),
    "embedding": (lambda x: truncdet.embedding(INDEX, x), torch.ones(4, 3)),
    "nll_loss": (lambda x: truncdet.nll_loss(x, INDEX), torch.ones(4, 3)),
    "topk": (lambda x: truncdet.topk(x, 2)[0], torch.ones(4, 3)),
    "interpolate": (lambda x: truncdet.interpolate(x, 5, mode="bilinear"), torch.ones(1, 1, 3, 3)),
    "adaptive_avg_pool2d": (lambda x: truncdet.adaptive_avg_pool2d(x, 2), torch.ones(1, 1, 3, 3)),
    "roi_align": (lambda x: truncdet.roi_align(x, BOX, 2), torch.ones(1, 1, 4, 4)),
    "deform_conv2d": (
        lambda x: truncdet.deform_conv2d(x, torch.zeros(1, 2, 4, 4), torch.ones(1, 1, 1, 1)),
        torch.ones(1, 1, 4, 4),
    ),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[str, Callable[[Tensor], Tensor], Tensor]:
    return (request.param, *CALLS[request.param])


def test_forward_mode_is_refused(call: tuple[str, Callable[[Tensor], Tensor], Tensor]) -> None:
    _, function, x = call
    text = r"^\w+: forward-mode derivatives are not implemented, an argument has a tangent$"
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def test_without_a_tangent_a_level_changes_nothing(
    call: tuple[str, Callable[[Tensor], Tensor], Tensor],
) -> None:
    _, function, x = call
    with forward_ad.dual_level():
        assert torch.equal(function(x), function(x))
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
        assert leaf.grad is not None


def test_torch_func_is_refused(call: tuple[str, Callable[[Tensor], Tensor], Tensor]) -> None:
    _, function, x = call
    with pytest.raises(NotImplementedError, match=r"^\w+: derivatives by torch.func are not impl"):
        torch.func.grad(lambda y: function(y).sum())(x)
