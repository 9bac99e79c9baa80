"""A 64-bit digest of tensors and state dicts that no schedule and no device can change.

Element i with word b contributes h_i = mix64(b + (i + 1) * WEYL), where mix64 is the finaliser of
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014) and WEYL its increment. The h_i are added modulo 2^64: integer addition is associative, so
threads, chunks and devices may add in any order, while position i makes a swap visible.
A leaf (one tensor or number) is mix64(sum_i h_i + salt), its salt a hash of key path, dtype and
shape; the digest is mix64 of the wrapping sum of all leaves, so insertion order plays no part.
It tells runs apart, with odds of 2^-64; it does not protect against someone who wants to deceive.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from truncdet._bits import WORDS, bits
from truncdet._library import LIB

CHUNK = 1 << 20  # elements hashed at once: bounds the int64 temporaries to a few times 8 MiB

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


class Digest:
    """A 64-bit digest that stays on its device until it is read.

    Reading is what waits for the device: `hex`, `str`, `int`, `==` and `hash`.

    Attributes:
        value: 0-d int64 tensor with the 64 bits, on the device of the hashed tensors.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._read: int | None = None

    def __int__(self) -> int:
        if self._read is None:
            self._read = int(self.value.item()) & _MASK
        return self._read

    @property
    def hex(self) -> str:
        """The digest as 16 hexadecimal digits."""
        return f"{int(self):016x}"

    def __str__(self) -> str:
        return self.hex

    def __repr__(self) -> str:
        return f"Digest({self.hex})"

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other) if isinstance(other, Digest) else NotImplemented

    def __hash__(self) -> int:
        return hash(int(self))


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    for shift, factor in _ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _xor_shift_(value: Tensor, shift: int) -> Tensor:
    # int64 shifts are arithmetic; the mask clears the copies of the sign bit.
    return value.bitwise_xor_((value >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(value: Tensor) -> Tensor:
    """`_mix_int` on an int64 tensor, in place; multiplication wraps, as is meant here."""
    for shift, factor in _ROUNDS:
        _xor_shift_(value, shift).mul_(_signed(factor))
    return _xor_shift_(value, _LAST_SHIFT)


def _chunks(words: Tensor) -> Iterator[Tensor]:
    """Cuts `words` into 1-d pieces of at most CHUNK elements, in logical order, any strides."""
    if words.numel() <= CHUNK:
        yield words.reshape(-1)
    elif (row := words[0].numel()) > CHUNK:
        for part in words.unbind(0):
            yield from _chunks(part)
    else:
        for block in words.split(CHUNK // row):
            yield block.reshape(-1)


LIB.define(
    "_digest_words(Tensor words, Tensor(a!) sums, int slot, int start) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def digest_words_reference(words: Tensor, sums: Tensor, slot: int, start: int) -> None:
    """Adds sum_i h_i of the words, the first with i = start, to the int64 in `slot` of `sums`.

    Words are the elements in the order of memory, which must be dense; floats count as their words.
    """
    words = words.detach().as_strided((words.numel(),), (1,))
    words = words.view(WORDS[words.element_size()])
    total, start = sums[slot], start + 1
    for chunk in _chunks(words):
        state = torch.arange(chunk.numel(), dtype=torch.int64, device=words.device)
        state.mul_(_signed(_WEYL)).add_(_signed(start * _WEYL)).add_(chunk.to(torch.int64))
        total += _mix_(state).sum()
        start += chunk.numel()


LIB.impl("_digest_words", digest_words_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::_digest_words", lib=LIB)
def _fake(words: Tensor, sums: Tensor, slot: int, start: int) -> None:
    return None


def _sum_of_words(words: Tensor) -> Tensor:
    sums = torch.zeros(1, dtype=torch.int64, device=words.device)
    start = 0
    # Others than contiguous ones by the piece: a copy of everything may not fit into memory.
    for part in (words,) if words.is_contiguous() else _chunks(words):
        torch.ops.truncdet._digest_words(part.contiguous(), sums, 0, start)
        start += part.numel()
    return sums[0]


def _salt(path: bytes, kind: str, content: bytes = b"") -> int:
    text = b"".join(struct.pack("<q", len(part)) + part for part in (path, kind.encode(), content))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _step(key: object, where: str) -> bytes:
    if not isinstance(key, (str, int)):
        raise TypeError(f"digest: keys of {where} must be str or int, got {type(key).__name__}")
    text = f"{type(key).__name__}:{key}".encode("utf-8", "surrogatepass")
    return struct.pack("<q", len(text)) + text


def _number(value: object) -> bytes:
    # Floats by their bits: -0.0 and the payload of a NaN count.
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, int):
        value = int(value)  # an IntEnum prints its name
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _leaf(value: Tensor, path: bytes, where: str) -> Tensor:
    try:
        words = bits(value)
    except TypeError as error:
        raise TypeError(f"digest: {where} " + str(error).removeprefix("bits: tensor ")) from None
    salt = _salt(path, f"{value.dtype}{tuple(value.shape)}")
    return _mix_(_sum_of_words(words).add_(_signed(salt)))


def _leaves(value: Any, path: bytes, where: str) -> Iterator[int | Tensor]:
    if isinstance(value, Tensor):
        yield _leaf(value, path, where)
    elif isinstance(value, Mapping):
        yield _mix_int(_salt(path, "mapping", str(len(value)).encode()))
        for key, item in value.items():
            yield from _leaves(item, path + b"k" + _step(key, where), f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield _mix_int(_salt(path, "sequence", str(len(value)).encode()))
        for index, item in enumerate(value):
            yield from _leaves(item, path + b"i" + _step(index, where), f"{where}[{index}]")
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        kinds = (bool, int, float, complex, str, bytes)
        kind = next((k.__name__ for k in kinds if isinstance(value, k)), "none")
        yield _mix_int(_salt(path, kind, _number(value)))
    elif isinstance(value, torch.dtype):
        yield _mix_int(_salt(path, "dtype", str(value).encode()))
    else:
        raise TypeError(
            f"digest: {where} must be a tensor, mapping, sequence, number, str, bytes or None, "
            f"got {type(value).__name__}"
        )


@torch.no_grad()
def digest(obj: Any) -> Digest:
    """Returns a 64-bit digest of every bit, dtype, shape and key of a tensor or (nested) mapping.

    It is the same on every device and for every memory format, and nothing waits for the device
    until the digest is read. A mapping's digest does not depend on the order of insertion; lists
    and tuples with equal items count as equal.

    Example:
        >>> a, b = torch.arange(4.0), torch.tensor([0.0, 2.0, 1.0, 3.0])
        >>> digest(a) == digest(a.clone()), digest(a) == digest(b)
        (True, False)

    Args:
        obj: tensor of any dense dtype and shape, number, str, bytes or None, or a nesting of
            mappings (keys str or int), lists and tuples of those, such as a state dict.

    Returns:
        The digest, on the device of the tensors (the first CUDA device among them, if any).

    Raises:
        TypeError: something inside `obj` cannot be hashed; the message names the place.
    """
    known, tensors = 0, []
    for leaf in _leaves(obj, b"", "obj"):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        else:
            known += leaf
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    # To the accelerator, never from it: this direction does not wait.
    moved = [t.to(device, non_blocking=True) for t in tensors]
    total = torch.stack(moved).sum() if moved else torch.zeros((), dtype=torch.int64)
    return Digest(_mix_(total.add_(_signed(known))))
