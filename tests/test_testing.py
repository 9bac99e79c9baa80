"""Checkers must fail: every comparison here is also made to raise."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from truncdet.testing import FARTHEST, assert_bitwise_equal, bits, ulp_distance

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
Pair = namedtuple("Pair", "left right")


def test_bits_of_known_floats(device):
    x = torch.tensor([1.0, -0.0], device=device)
    assert bits(x).tolist() == [0x3F800000, -(2**31)]
    assert bits(x.double()).tolist() == [0x3FF0000000000000, -(2**63)]
    assert bits(x.half()).tolist() == [0x3C00, -(2**15)]
    assert bits(x.bfloat16()).tolist() == [0x3F80, -(2**15)]
    assert bits(torch.tensor([True, False], device=device)).tolist() == [1, 0]
    assert bits(torch.tensor([1 - 2j], device=device)).tolist() == [[0x3F800000, -0x40000000]]
    assert bits(x.to(torch.float8_e5m2)).tolist() == [0x3C, 0x80]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_keep_shape_and_strides(dtype, device):
    x = torch.zeros(3, 4, dtype=dtype, device=device).t()
    assert bits(x).shape == (4, 3) and bits(x).stride() == x.stride()
    assert bits(x).element_size() == x.element_size()
    assert bits(x[0, 0]).shape == ()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulp_distance_counts_neighbours(dtype, device):
    word = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    one = torch.ones((), dtype=dtype, device=device)
    near = (one.view(word) + torch.arange(6, dtype=word, device=device)).view(dtype)
    assert ulp_distance(near, one.expand(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert ulp_distance(one.expand(6), near).tolist() == [0, 1, 2, 3, 4, 5]
    assert ulp_distance(-near, -one.expand(6)).tolist() == [0, 1, 2, 3, 4, 5]
    tiny = torch.tensor([1, 1, 0], dtype=word, device=device).view(dtype)
    zero = torch.tensor([0.0, -0.0, -0.0], dtype=dtype, device=device)
    assert ulp_distance(tiny, zero).tolist() == [1, 1, 0]
    assert ulp_distance(tiny, -tiny).tolist() == [2, 2, 0]
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype, device=device)
    assert ulp_distance(largest, largest * torch.inf).tolist() == [1]


def test_ulp_distance_saturates_and_knows_nan(device):
    nan, inf = torch.nan, torch.inf
    a = torch.tensor([nan, nan, inf, 1.0], dtype=torch.float64, device=device)
    b = torch.tensor([nan, 1.0, -inf, nan], dtype=torch.float64, device=device)
    assert ulp_distance(a, b).tolist() == [0, FARTHEST, FARTHEST, FARTHEST]


def test_ulp_distance_refuses_other_arguments():
    one = torch.ones(2)
    with pytest.raises(TypeError, match=r"ulp_distance: a must be of dtype .*, got torch.int32"):
        ulp_distance(one.int(), one.int())
    with pytest.raises(TypeError, match=r"b must be of dtype torch.float32, got torch.float64"):
        ulp_distance(one, one.double())
    with pytest.raises(ValueError, match=r"b must be of shape \[2\], got \[1, 2\]"):
        ulp_distance(one, one[None])


EQUAL = [
    torch.tensor([0.0, -0.0, torch.nan, torch.inf]),
    torch.zeros(0, 3),
    torch.tensor(2.0).bfloat16(),
    torch.tensor([1 + 1j]),
    {"a": torch.ones(2), "b": [1, "x", (torch.zeros(1), None)]},
    Pair(torch.ones(1), 2.5),
    float("nan"),
    -0.0,
]


@pytest.mark.parametrize("value", EQUAL, ids=lambda v: type(v).__name__)
def test_equal_values_pass(value):
    assert_bitwise_equal(value, value)


def test_containers_and_memory_format_may_differ(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    assert_bitwise_equal(x.to(memory_format=torch.channels_last), x.cpu())
    assert_bitwise_equal([x, 1], (x, 1))
    assert_bitwise_equal(OrderedDict(b=1, a=x), dict(a=x, b=1))


nan_payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
UNEQUAL = [
    (0.0, -0.0, "got 0.0, expected -0.0"),
    (1, True, "got int, expected bool"),
    (1.0, torch.ones(()), "got float, expected Tensor"),
    ("a", "b", "got 'a', expected 'b'"),
    ([1, 2], [1], "2 items, expected 1"),
    ({"a": 1}, {"b": 1}, "keys in only one of the two: 'a', 'b'"),
    ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, r"\['a'\]\[1\]\['b'\]: got 2, expected 3"),
    (torch.ones(2), torch.ones(2, 1), r"shape \[2\], expected \[2, 1\]"),
    (torch.ones(2), torch.ones(2).half(), "dtype torch.float32, expected torch.float16"),
    (
        torch.tensor([0.0]),
        torch.tensor([-0.0]),
        r"^1 of 1 elements differ in bits; first at \(0,\): 0.0 and -0.0, 0 ulp apart$",
    ),
    (nan_payload, nan_payload.view(torch.int32).add(1).view(torch.float32), "more ulp than can"),
    (
        torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-20]]),
        torch.tensor([[1.0, 1.0 + 2**-23], [1.0, 1.0]]),
        r"2 of 4 elements differ in bits; first at \(0, 1\): .* 1 ulp apart, at most 8 ulp$",
    ),
    (torch.tensor(3), torch.tensor(4), r"1 of 1 elements differ in bits; first at \(\): 3 and 4$"),
    (torch.tensor([1j, 2]), torch.tensor([1j, 2 + 1j]), r"1 of 2 .* first at \(1,\)"),
    (torch.ones(3, dtype=torch.float8_e5m2), torch.zeros(3).to(torch.float8_e5m2), "3 of 3"),
]


@pytest.mark.parametrize("actual, expected, text", UNEQUAL)
def test_unequal_values_raise(actual, expected, text):
    with pytest.raises(AssertionError, match=text):
        assert_bitwise_equal(actual, expected)


def test_message_is_put_first():
    with pytest.raises(AssertionError, match=r"^weights: \[0\]: got 1, expected 2$"):
        assert_bitwise_equal([1], [2], "weights")


def test_bits_refuse_what_has_none():
    with pytest.raises(TypeError, match=r"bits: tensor must be a torch.Tensor, got list"):
        bits([1.0])
    with pytest.raises(TypeError, match="bits: tensor must be dense"):
        bits(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="bits: tensor must have data"):
        bits(torch.ones(1, device="meta"))
