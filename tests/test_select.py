"""gather and index_select: torch's values, and gradients without an order."""

import pytest
import torch
from scatter_cases import each_dtype, random_floats, random_index
from scatter_group import CANCELLING_300, assert_compiles, assert_gradients, assert_same_as, orders

from truncdet import TruncdetError, _sticky, gather, index_select, scatter_add
from truncdet._gather import pick_reference
from truncdet.testing import assert_bitwise_equal


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 5, 2), (4, 1, 1), (0, 5, 3)], ids=str)
def test_gather_is_torchs(device, dim, shape):
    input = random_floats((4, 5, 3), torch.float64, device, 1)
    index = random_index(shape, input.size(dim), device)
    for kind in (torch.int64, torch.int32):
        narrow = index.to(kind)
        assert_same_as(
            lambda x, i=narrow: gather(x, dim, i), lambda x: torch.gather(x, dim, index), input
        )


@pytest.mark.parametrize("dim", [0, 1, 2, -3])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_index_select_is_torchs(device, dim, count):
    input = random_floats((4, 5, 3), torch.float64, device, 1)
    index = random_index((count,), input.size(dim), device)
    assert_same_as(
        lambda x: index_select(x, dim, index), lambda x: torch.index_select(x, dim, index), input
    )


def test_scalars_integers_and_booleans(device):
    zero = torch.tensor([0], device=device)
    scalar = torch.tensor(3.0, device=device)
    assert index_select(scalar, 0, zero).shape == torch.index_select(scalar, 0, zero).shape
    assert gather(scalar, 0, zero).tolist() == torch.gather(scalar, 0, zero).tolist()
    index = torch.tensor([2, 0, 2], device=device)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool):
        x = torch.tensor([0, 1, 7], device=device).to(dtype)
        assert_bitwise_equal(gather(x, 0, index), x[index])
        assert_bitwise_equal(index_select(x, 0, index), x[index])


@each_dtype
@pytest.mark.parametrize("inner", [1, 3, 8, 16])
def test_kernel_is_the_reference(device, dtype, inner):
    input = random_floats((3, 7, inner), dtype, device)
    rows = random_index((3, 50, 1), 9, device) - 1
    for index in (rows.expand(3, 50, inner), random_index((3, 50, inner), 9, device) - 1):
        got = torch.ops.truncdet._pick(input, index, 0)
        assert_bitwise_equal(got, pick_reference(input.cpu(), index.cpu(), 0))
    shifted = torch.empty(input.numel() + 1, dtype=dtype, device=device)[1:].view_as(input)
    again = torch.ops.truncdet._pick(shifted.copy_(input), rows.expand(3, 50, inner), 0)
    assert_bitwise_equal(again, torch.ops.truncdet._pick(input, rows.expand(3, 50, inner), 0))


@each_dtype
def test_the_gradient_is_scatter_add_in_every_order(device, dtype):
    grad = torch.tensor(CANCELLING_300, device=device).to(dtype)
    index = random_index((300,), 3, device)
    expected = scatter_add(grad.new_zeros(4), 0, index, grad)
    for op in (gather, index_select):
        for order in orders(300):
            order = order.to(device)
            x = grad.new_zeros(4).requires_grad_()
            op(x, 0, index[order]).backward(grad[order])
            assert_bitwise_equal(x.grad, expected)


def test_gradients(device):
    input = random_floats((4, 3), torch.float64, device, 0)
    index = random_index((6, 2), 4, device)
    assert_gradients(lambda x: gather(x, 0, index), input)
    assert_gradients(lambda x: index_select(x, 1, index[:, 0] % 3), input)


def test_compiles_in_one_graph(device):
    input = random_floats((4, 3), torch.float32, device)
    index = random_index((6, 2), 4, device)
    assert_compiles(lambda x: gather(x, 0, index), input)
    assert_compiles(lambda x: index_select(x, 0, index[:, 0]), input)


def test_layout_does_not_matter(device):
    input = random_floats((2, 4, 5, 6), torch.float32, device)
    index = random_index((9,), 4, device)
    wide = input.to(memory_format=torch.channels_last)
    assert_bitwise_equal(index_select(wide, 1, index), index_select(input, 1, index))


@pytest.mark.parametrize("op", [gather, index_select])
def test_index_out_of_range(device, op):
    x = torch.ones(2, device=device, requires_grad=True)
    index = torch.tensor([0, 2, -1, 0], device=device)
    if device.type == "cpu":
        text = rf"^{op.__name__}: index must be in \[0, 2\), got 2 at position 1$"
        with pytest.raises(ValueError, match=text):
            op(x, 0, index)
        return
    _sticky.check()
    out = op(x, 0, index)
    assert out.tolist() == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(TruncdetError, match=rf"^{op.__name__}: an index was out of range"):
        _sticky.check()
    out.sum().backward()
    assert x.grad.tolist() == [2.0, 0.0]
    _sticky.check()


def test_operator_checks(device):
    input = random_floats((2, 4, 3), torch.float32, device).requires_grad_()
    index = random_index((2, 6, 3), 4, device)
    torch.library.opcheck(torch.ops.truncdet._gather.default, (input, 1, index, False, 1 << 16))


def test_wrong_arguments_are_named():
    x, i = torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.int64)
    for text, error, call in [
        (
            "gather: input must be .*, got torch.complex64",
            TypeError,
            lambda: gather(x.to(torch.complex64), 0, i),
        ),
        (
            "gather: index must be int64 or int32, got torch.float32",
            TypeError,
            lambda: gather(x, 0, i.float()),
        ),
        ("gather: dim must be in", ValueError, lambda: gather(x, 2, i)),
        (
            "gather: sparse_grad must be False",
            ValueError,
            lambda: gather(x, 0, i, sparse_grad=True),
        ),
        (
            "gather: index must have input's number of dimensions, 2, got 1",
            ValueError,
            lambda: gather(x, 0, i[0]),
        ),
        (
            "gather: index must be at most as large as input, 3 in dimension 0",
            ValueError,
            lambda: gather(x, 1, torch.zeros(4, 1).long()),
        ),
        (
            "index_select: index must be a vector, got 2 dimensions",
            ValueError,
            lambda: index_select(x, 0, i),
        ),
        (
            "index_select: index must have one element for a scalar, got 2",
            ValueError,
            lambda: index_select(x[0, 0], 0, i[0, :2]),
        ),
        (
            "index_select: index must be on input's device, cpu, got meta",
            ValueError,
            lambda: index_select(x, 0, i[0].to("meta")),
        ),
    ]:
        with pytest.raises(error, match=f"^{text}"):
            call()
