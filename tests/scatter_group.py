"""What the tests of the operators built on scatter_add share."""

import torch
from scatter_cases import CANCELLING

from truncdet.testing import assert_bitwise_equal

CANCELLING_300 = CANCELLING * 50


def orders(count, repeats=20):
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(count, generator=generator) for _ in range(repeats)]


def outputs_and_gradients(call, *inputs, seed=3):
    """Outputs of `call` and the gradients of the inputs, for a fixed random cotangent."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def assert_same_as(ours, theirs, *inputs):
    """Values and gradients of both, in double, up to the rounding of plain sums."""
    pair = (outputs_and_gradients(call, *inputs) for call in (ours, theirs))
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-12, atol=1e-12)


def assert_gradients(call, *inputs, twice=True):
    """gradcheck without tolerance for a second run; `inputs` of float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, leaves, nondet_tol=0)
    if twice:
        assert torch.autograd.gradgradcheck(lambda *x: call(*x) ** 2, leaves, nondet_tol=0)


def assert_compiles(call, *inputs):
    """One graph, and the bits of the plain call."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pair = [outputs_and_gradients(each, *inputs) for each in (compiled, call)]
    assert_bitwise_equal(pair[0], pair[1])
