"""Floating-point words as integers: views, the formats' numbers, and one rounding rule.

Everything that rounds here does so on the word. Float arithmetic would depend on the
flush-to-zero and denormals-are-zero modes, which differ between threads, builds and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format and the integer dtype of its words."""

    word: torch.dtype
    mantissa: int  # stored significand bits, without the implicit one
    bias: int

    @property
    def significand(self) -> int:
        """Significant bits of a normal number, the implicit one counted."""
        return self.mantissa + 1

    @property
    def infinity(self) -> int:
        """Word of +Inf; every larger magnitude is a NaN."""
        return (2 * self.bias + 1) << self.mantissa

    @property
    def magnitude(self) -> int:
        """Mask of all bits but the sign."""
        return self.infinity | ((1 << self.mantissa) - 1)

    @property
    def sign(self) -> int:
        """The sign bit, as the (negative) value it has in the signed word."""
        return -self.magnitude - 1


FORMATS = {
    torch.float16: Format(torch.int16, 10, 15),
    torch.bfloat16: Format(torch.int16, 7, 127),
    torch.float32: Format(torch.int32, 23, 127),
    torch.float64: Format(torch.int64, 52, 1023),
}


def format_of(dtype: torch.dtype, where: str, argument: str) -> Format:
    """Returns the format of `dtype`; raises TypeError naming `where` and `argument` if unknown."""
    if dtype not in FORMATS:
        names = ", ".join(str(known).removeprefix("torch.") for known in FORMATS)
        raise TypeError(f"{where}: {argument} must be of dtype {names}, got {dtype}")
    return FORMATS[dtype]


def bits(tensor: Tensor) -> Tensor:
    """Returns the words of a tensor as integers, element by element.

    Example:
        >>> bits(torch.tensor([1.0, -0.0]))
        tensor([ 1065353216, -2147483648], dtype=torch.int32)

    Args:
        tensor: any dense tensor of shape S, strides free.

    Returns:
        Integers of the element's size (uint8, int16, int32 or int64) and shape S; complex
        tensors get a last dimension of two, real and imaginary part. Shares memory with
        `tensor` unless a conjugate or negative view has to be resolved.

    Raises:
        TypeError: `tensor` is not a dense tensor with data.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"bits: tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError("bits: tensor must be dense, got a sparse, nested or quantized tensor")
    if tensor.is_meta:
        raise TypeError("bits: tensor must have data, got a meta tensor")
    if tensor._is_zerotensor():  # zeros of a transform, which have no memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(WORDS[plain.element_size()])


_HALF_LESS_ONE = (0, *((1 << bit) - 1 for bit in range(63)))


def round_half_even(magnitude: Tensor, drop: int | Tensor) -> Tensor:
    """Rounds non-negative integers to multiples of 2^drop, ties to the even multiple.

    Args:
        magnitude: integer tensor, at least one bit (the sign) below the dtype's range.
        drop: bits to clear, 0 to the dtype's width minus two; an int or a tensor of the same
            dtype that broadcasts.

    Returns:
        Rounded integers; on the word of a float the carry runs into the exponent, as it should.
    """
    if isinstance(drop, int):
        if drop == 0:
            return magnitude
        # A table rather than a shift: while tracing, `drop` may be a symbol, and Python's shift
        # of a number by a symbol is not traceable on every supported torch.
        half_less_one: int | Tensor = _HALF_LESS_ONE[drop]
        odd = (magnitude >> drop) & 1
    else:
        one = torch.ones_like(drop)
        half_less_one = ((one << drop) - 1) >> 1
        # Nothing is a tie when nothing is dropped: the odd bit must not be added then.
        odd = (magnitude >> drop) & (drop > 0).to(magnitude.dtype)
    return ((magnitude + half_less_one + odd) >> drop) << drop
