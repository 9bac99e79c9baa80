"""segment_reduce: torch's segments, sums and means without an order."""

import pytest
import torch
from scatter_cases import each_dtype, random_floats
from scatter_group import CANCELLING_300, assert_compiles, assert_gradients, assert_same_as, orders

from truncdet import scatter_reduce, segment_reduce
from truncdet.testing import assert_bitwise_equal

each_reduce = pytest.mark.parametrize("reduce", ["sum", "mean"])
each_initial = pytest.mark.parametrize("initial", [None, 1.5])
SEGMENTS = {
    "lengths": ({"lengths": [2, 0, 4, 3]}, 0),
    "offsets": ({"offsets": [0, 2, 2, 9]}, 0),
    "rows of lengths": ({"lengths": [[2, 0, 4, 3], [1, 1, 7, 0]]}, 1),
    "rows of offsets": ({"offsets": [[0, 2, 9], [0, 9, 9]]}, 1),
    "one": ({"lengths": [9]}, 0),
    "empty ends": ({"lengths": [0, 9, 0, 0]}, 0),
}


@each_reduce
@each_initial
@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_values_and_gradients_are_torchs(device, reduce, initial, name, kind):
    given, axis = SEGMENTS[name]
    segments = {k: torch.tensor(v, dtype=kind, device=device) for k, v in given.items()}
    data = random_floats((2, 9, 3)[1 - axis :], torch.float64, device, 1)

    def through(op):
        return lambda x: op(x, reduce, axis=axis, initial=initial, **segments)

    assert_same_as(through(segment_reduce), through(torch.segment_reduce), data)


@each_dtype
@each_reduce
def test_permutations_inside_the_segments_keep_the_bits(device, dtype, reduce):
    data = torch.tensor(CANCELLING_300, device=device).to(dtype)
    lengths = torch.tensor([100, 0, 150, 50], device=device)
    index = torch.repeat_interleave(torch.arange(4, device=device), lengths)
    first = segment_reduce(data, reduce, lengths=lengths, initial=0.0)
    expected = scatter_reduce(data.new_zeros(4), 0, index, data, reduce, include_self=False)
    assert_bitwise_equal(first, expected)
    for order in orders(300):
        kept = order.to(device)[index[order.to(device)].argsort(stable=True)]
        again = segment_reduce(data[kept], reduce, lengths=lengths, initial=0.0)
        assert_bitwise_equal(again, first)


@each_reduce
def test_unsafe_leaves_out_what_no_segment_covers(device, reduce):
    data = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)
    lengths = torch.tensor([1, 2], device=device)
    got = segment_reduce(data, reduce, lengths=lengths, unsafe=True)
    assert got.tolist() == ([1.0, 6.0] if reduce == "sum" else [1.0, 3.0])
    late = torch.tensor([1, 3], device=device)
    got = segment_reduce(data, reduce, offsets=late, unsafe=True)
    assert got.tolist() == ([6.0] if reduce == "sum" else [3.0])


def test_a_mean_of_nothing_is_not_a_number(device):
    data, none = torch.ones(2, device=device), torch.tensor([0, 2], device=device)
    mean = segment_reduce(data, "mean", lengths=none)
    assert mean.isnan().tolist() == [True, False]
    empty = segment_reduce(data[:0], "sum", lengths=none[:1], unsafe=True)
    assert empty.tolist() == [0.0]


@each_reduce
@each_initial
def test_gradients(device, reduce, initial):
    data = random_floats((6, 2), torch.float64, device, 0)
    lengths = torch.tensor([2, 1, 3], device=device)
    assert_gradients(lambda x: segment_reduce(x, reduce, lengths=lengths, initial=initial), data)


@each_reduce
def test_compiles_in_one_graph(device, reduce):
    data = random_floats((6, 2), torch.float32, device)
    lengths = torch.tensor([2, 1, 3], device=device)
    assert_compiles(lambda x: segment_reduce(x, reduce, lengths=lengths), data)


def test_operator_checks(device):
    offsets = torch.tensor([0, 2, 6], device=device)
    arguments = (offsets, "offsets", 6, False)
    torch.library.opcheck(torch.ops.truncdet._segment_index.default, arguments)


def test_wrong_arguments_are_named(device):
    x, n = torch.ones(4, 2, device=device), torch.tensor([1, 3], device=device)
    for text, error, kwargs in [
        ("reduce must be 'sum' or 'mean', got 'max'", ValueError, {"reduce": "max", "lengths": n}),
        ("indices must be None", ValueError, {"lengths": n, "indices": n}),
        ("one of lengths and offsets must be given", ValueError, {}),
        ("one of lengths and offsets must be given", ValueError, {"lengths": n, "offsets": n}),
        ("lengths must be int64 or int32, got torch.float32", TypeError, {"lengths": n.float()}),
        (r"axis must be in \[-2, 1\], got 2", ValueError, {"lengths": n, "axis": 2}),
        (
            "axis must be the last dimension of lengths, 0, got 1",
            ValueError,
            {"lengths": n, "axis": 1},
        ),
        (
            "lengths must have data's dimensions before axis",
            ValueError,
            {"lengths": n[None], "axis": 1},
        ),
        ("offsets must not be empty", ValueError, {"offsets": n[:0]}),
        (
            "lengths must cover the 4 elements along axis in ascending order",
            ValueError,
            {"lengths": n + 1},
        ),
        ("lengths must cover", ValueError, {"lengths": torch.tensor([5, -1], device=device)}),
        ("offsets must cover", ValueError, {"offsets": torch.tensor([1, 4], device=device)}),
    ]:
        with pytest.raises(error, match=f"^segment_reduce: {text}"):
            segment_reduce(x, kwargs.pop("reduce", "sum"), **kwargs)
    with pytest.raises(TypeError, match=r"^segment_reduce: data must be float64"):
        segment_reduce(x.long(), "sum", lengths=n)
