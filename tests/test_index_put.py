"""index_put with accumulate=True: torch's indices, and sums without an order."""

import pytest
import torch
from exact_arithmetic import fractions_of
from scatter_cases import bound, each_dtype, random_floats, random_index
from scatter_group import CANCELLING_300, assert_compiles, assert_gradients, assert_same_as, orders

from truncdet import TruncdetError, _sticky, index_add, index_put
from truncdet.testing import assert_bitwise_equal

SIZES = (4, 5, 6, 7)


def signed(n, *shape):
    """Indices in [-n, n)."""
    return random_index(shape, 2 * n, "cpu", seed=sum(shape) + n) - n


MASK = random_index((5, 6), 2, "cpu") == 1
INDICES = {
    "vector": (signed(4, 9),),
    "scalar": (torch.tensor(2),),
    "int32": (signed(4, 3).int(),),
    "broadcast neighbours": (None, signed(5, 3, 1), signed(6, 4)),
    "apart": (signed(4, 8), None, signed(6, 8)),
    "far apart": (signed(4, 8), None, None, signed(7, 2, 8)),
    "apart behind a whole dimension": (None, signed(5, 8), None, signed(7, 8)),
    "mask": (None, MASK),
    "mask beside a vector": (signed(4, 3, 1), MASK),
    "mask of bytes": (None, MASK.to(torch.uint8)),
    "one dimension's mask": (torch.tensor([True, False, True, True]),),
    "third dimension": (None, None, signed(6, 2, 2)),
    "all dimensions": tuple(signed(n, 5) for n in SIZES),
    "nothing": (signed(4, 0),),
    "no true element": (None, torch.zeros_like(MASK)),
}


def at(indices, device):
    return [None if index is None else index.to(device) for index in indices]


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("values", ["whole", "broadcast", "scalar"])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_indices_mean_what_torch_says(device, name, values):
    indices = at(INDICES[name], device)
    input = random_floats(SIZES, torch.float64, device, 1)
    slices = [slice(None) if index is None else index for index in indices]
    shape = input[tuple(slices)].shape
    shape = {"whole": shape, "broadcast": shape[-1:], "scalar": ()}[values]
    assert_same_as(
        lambda x, y: index_put(x, indices, y, accumulate=True),
        lambda x, y: torch.ops.aten.index_put(x, indices, y, True),
        input,
        random_floats(shape, torch.float64, device, 1, seed=2),
    )


@each_dtype
def test_one_vector_is_index_add(device, dtype):
    input, values = (random_floats(s, dtype, device) for s in ((9, 4), (500, 4)))
    index = random_index((500,), 9, device)
    expected = index_add(input, 0, index, values)
    assert_bitwise_equal(index_put(input, (index,), values, True), expected)
    assert_bitwise_equal(index_put(input, (index - 9,), values, True), expected)


@each_dtype
def test_permuted_indices_keep_the_bits(device, dtype):
    values = torch.tensor(CANCELLING_300, device=device).to(dtype)
    indices = [random_index((300,), n, device, seed=n) for n in (2, 3)]
    first = index_put(values.new_ones(2, 3), indices, values, accumulate=True)
    for order in orders(300):
        moved = [index[order.to(device)] for index in indices]
        again = index_put(values.new_ones(2, 3), moved, values[order.to(device)], accumulate=True)
        assert_bitwise_equal(again, first)


def test_gradient_of_broadcast_values_does_not_depend_on_the_order():
    index, grad = torch.arange(300), torch.tensor(CANCELLING_300)
    seen = []
    for order in (torch.arange(300), *orders(300, 3)):
        value = torch.zeros((), requires_grad=True)
        index_put(torch.zeros(300), (index[order],), value, True).backward(grad[order])
        seen.append(value.grad)
    for again in seen[1:]:
        assert_bitwise_equal(again, seen[0])
    error = abs(fractions_of(seen[0])[0] - sum(fractions_of(grad)))
    assert error <= bound(grad, seen[0], False)


def test_gradients(device):
    input = random_floats((4, 3), torch.float64, device, 0)
    values = random_floats((6, 3), torch.float64, device, 0)
    index = random_index((6,), 4, device)
    assert_gradients(lambda x, y: index_put(x, (index,), y, True), input, values)
    column = index[:, None] % 3
    assert_gradients(lambda x, y: index_put(x, (None, column), y, True), input, values[:1, :1])


def test_compiles_in_one_graph(device):
    index = random_index((6,), 4, device)
    input, values = (random_floats(s, torch.float32, device) for s in ((4, 3), (6, 1)))
    assert_compiles(lambda x, y: index_put(x, (index - 4,), y, True), input, values)


def test_operator_checks(device):
    indices = [random_index((6,), n, device) for n in (4, 3)]
    torch.library.opcheck(torch.ops.truncdet._cells.default, (indices, [4, 3]))


def test_index_out_of_range(device):
    x, values = torch.zeros(2, 3, device=device), torch.ones(3, device=device)
    rows = torch.tensor([0, 0, 1], device=device)
    for bad in ([0, 3, 1], [0, -4, 1]):
        columns = torch.tensor(bad, device=device)
        if device.type == "cpu":
            text = rf"^index_put: indices must be in \[-3, 3\), got {bad[1]}$"
            with pytest.raises(ValueError, match=text):
                index_put(x, (rows, columns), values, True)
            continue
        out = index_put(x, (rows, columns), values, True)
        assert out.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        with pytest.raises(TruncdetError, match=r"^index_put: an index was out of range"):
            _sticky.check()


def test_wrong_arguments_are_named():
    x, i, v = torch.zeros(3, 4), torch.tensor([0, 1]), torch.ones(2, 4)
    for text, error, args in [
        ("accumulate must be True, got False", ValueError, (x, (i,), v)),
        ("input must be float64, .*, got torch.int64", TypeError, (x.long(), (i,), v, True)),
        (
            "values must have input's dtype, torch.float32",
            TypeError,
            (x, (i,), v.half(), True),
        ),
        ("indices must be int64, .*, got torch.float32", TypeError, (x, (i.float(),), v, True)),
        ("indices must be for at most 2 dimensions, got 3", ValueError, (x, (i, i, i), v, True)),
        ("indices must have at least one tensor, got none", ValueError, (x, (None,), v, True)),
        (
            r"indices must broadcast together, got \[2\], \[3\]",
            ValueError,
            (x, (i, torch.zeros(3).long()), v, True),
        ),
        (r"values must broadcast to \[2, 4\], got \[3, 4\]", ValueError, (x, (i,), x, True)),
        (r"a mask must have the shape .*, \[3\], got \[2\]", ValueError, (x, (i > 0,), v, True)),
        (
            "values must be on input's device, cpu, got meta",
            ValueError,
            (x, (i,), v.to("meta"), True),
        ),
    ]:
        with pytest.raises(error, match=f"^index_put: {text}"):
            index_put(*args)
