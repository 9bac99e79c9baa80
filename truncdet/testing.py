"""Comparisons that look at bits: equal means the same words, -0.0 and NaN payloads included."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truncdet._bits import bits as bits
from truncdet._bits import format_of
from truncdet._certify import midpoint_case as midpoint_case

FARTHEST = torch.iinfo(torch.int64).max  # distance that is not a number, or beyond int64


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns how many steps between neighbouring floats lie between `a` and `b`.

    Example:
        >>> ulp_distance(torch.tensor([1.0, -0.0]), torch.tensor([1.0 + 2**-23, 0.0]))
        tensor([1, 0])

    Args:
        a: float16, bfloat16, float32 or float64 tensor.
        b: tensor of the same dtype and shape, on the same device.

    Returns:
        int64 tensor of that shape, in units in the last place. Zeros of both signs are one
        place. Infinity is the neighbour of the largest finite number. A NaN is at distance 0
        from the same bits and at `FARTHEST` from all others; larger distances saturate there.

    Raises:
        TypeError: a dtype is not floating, or the dtypes differ.
        ValueError: the shapes differ.
    """
    form = format_of(a.dtype, "ulp_distance", "a")
    if b.dtype != a.dtype:
        raise TypeError(f"ulp_distance: b must be of dtype {a.dtype}, got {b.dtype}")
    if b.shape != a.shape:
        raise ValueError(f"ulp_distance: b must be of shape {_shape(a)}, got {_shape(b)}")

    def place(words: Tensor) -> Tensor:
        magnitude = (words & form.magnitude).to(torch.int64)
        return torch.where(words < 0, -magnitude, magnitude)

    words_a, words_b = bits(a), bits(b)
    low = torch.minimum(place(words_a), place(words_b))
    high = torch.maximum(place(words_a), place(words_b))
    distance = high - low  # wraps below zero when it does not fit
    unknown = (distance < 0) | ((a.isnan() | b.isnan()) & (words_a != words_b))
    return distance.masked_fill_(unknown, FARTHEST)


def assert_bitwise_equal(actual: Any, expected: Any, msg: str | None = None) -> None:
    """Asserts that two tensors, or nestings of tensors, are equal bit for bit.

    Example:
        >>> assert_bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
        Traceback (most recent call last):
        ...
        AssertionError: 1 of 1 elements differ in bits; first at (0,): 0.0 and -0.0, 0 ulp apart

    Args:
        actual: tensor, number or any other value, or a nesting of mappings and sequences.
        expected: what `actual` must be; shapes, dtypes and bits count, devices do not.
        msg: text put before the message.

    Raises:
        AssertionError: something differs; the message names the place, how many elements
            differ, the first of them with both values, and the distance in ulp.
    """
    problem = _difference(actual, expected, "")
    if problem is not None:
        raise AssertionError(problem if msg is None else f"{msg}: {problem}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _difference(actual: Any, expected: Any, path: str) -> str | None:
    """Describes the first difference, or returns None."""
    at = f"{path}: " if path else ""
    if isinstance(actual, (np.ndarray, np.generic)) and type(actual) is type(expected):
        actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        problem = _tensor_difference(actual, expected)
        return problem and at + problem
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        if actual.keys() != expected.keys():
            odd = sorted(map(repr, actual.keys() ^ expected.keys()))
            return f"{at}keys in only one of the two: {', '.join(odd)}"
        pairs = [(key, actual[key], expected[key]) for key in expected]
    elif _is_sequence(actual) and _is_sequence(expected):
        if len(actual) != len(expected):
            return f"{at}{len(actual)} items, expected {len(expected)}"
        pairs = list(zip(range(len(expected)), actual, expected, strict=True))
    elif type(actual) is not type(expected):
        return f"{at}got {type(actual).__name__}, expected {type(expected).__name__}"
    elif _plain(actual) != _plain(expected):
        return f"{at}got {actual!r}, expected {expected!r}"
    else:
        return None
    found = (_difference(a, b, f"{path}[{key!r}]") for key, a, b in pairs)
    return next((problem for problem in found if problem is not None), None)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _plain(value: object) -> object:
    """Floats compare by their bits as well: -0.0 is not 0.0, and a NaN is itself."""
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return struct.pack("<d", value) if isinstance(value, float) else value


def _tensor_difference(actual: Tensor, expected: Tensor) -> str | None:
    if actual.shape != expected.shape:
        return f"shape {_shape(actual)}, expected {_shape(expected)}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    actual, expected = actual.detach(), expected.detach().to(actual.device)
    unequal = bits(actual) != bits(expected)
    if actual.is_complex():
        unequal = unequal.any(-1)
    count = int(unequal.sum())
    if count == 0:
        return None
    first = tuple(unequal.nonzero()[0].tolist())
    text = (
        f"{count} of {unequal.numel()} elements differ in bits; first at {first}: "
        f"{actual[first].item()!r} and {expected[first].item()!r}"
    )
    try:
        steps = ulp_distance(actual, expected)
    except TypeError:  # integers and exotic floats have no ulp worth naming
        return text
    here, most = int(steps[first]), int(steps.max())
    return f"{text}, {_ulp(here)} apart" + (f", at most {_ulp(most)}" if count > 1 else "")


def _ulp(steps: int) -> str:
    return "more ulp than can be counted" if steps == FARTHEST else f"{steps} ulp"
