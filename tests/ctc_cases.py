"""What the tests of ctc_loss share: sizes, inputs, both paths."""

import pytest
import torch

from truncdet import _ctc_loss_reference as reference

ops = torch.ops.truncdet
# times, items, classes, labels
SIZES = [(50, 4, 7, 9), (12, 3, 4, 5), (1, 2, 3, 1), (5, 2, 3, 0), (9, 2, 40, 4), (70, 1, 3, 40)]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
each_zero = pytest.mark.parametrize("zero_infinity", [False, True], ids=["", "zero_infinity"])


def make_case(size, dtype=torch.float64, device="cpu", seed=0):
    """Log probabilities, padded targets with repeats, and lengths, some of them 0."""
    times, items, classes, labels = size
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, shape):
        return torch.randint(low, high, shape, generator=generator)

    logits = 2 * torch.randn((times, items, classes), generator=generator, dtype=torch.float64)
    targets = draw(1, classes, (items, labels))
    targets[:, 1::3] = targets[:, : targets[:, 1::3].size(1) * 3 : 3]  # neighbours that are equal
    inputs, wanted = draw(0, times + 1, (items,)), draw(0, labels + 1, (items,))
    inputs[0], wanted[0] = times, min(labels, times // 2)
    case = (logits.log_softmax(2).to(dtype), targets, inputs, wanted)
    return tuple(x.to(device) for x in case)


def run_both(case, grad, blank=0, zero_infinity=False):
    """Outputs and gradient of the kernels and of the reference."""
    rest = (blank, zero_infinity)
    kernel = ops._ctc_loss(*case, *rest)
    plain = reference.forward(*case, *rest)
    gradients = [
        f(grad, *case, *outputs[1:], *rest)
        for f, outputs in ((ops.ctc_loss_backward, kernel), (reference.backward, plain))
    ]
    return (*kernel, gradients[0]), (*plain, gradients[1])
