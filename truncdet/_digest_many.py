"""Digests of many tensors by one call, which on a GPU is one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet._digest import digest_words_reference
from truncdet._library import LIB

# CPU and CUDA kernels share this schema; tensor i adds to slot + i.
LIB.define(
    "_digest_many(Tensor[] tensors, Tensor(a!) sums, int slot) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def digest_many_reference(tensors: list[Tensor], sums: Tensor, slot: int) -> None:
    """Adds the sum of `_digest_words` of each tensor, dense in memory, to the slots from `slot`."""
    for number, tensor in enumerate(tensors):
        digest_words_reference(tensor, sums, slot + number, 0)


LIB.impl("_digest_many", digest_many_reference, "CompositeExplicitAutograd")
# Words have no gradient: autograd is passed over, also where a tensor requires one.
LIB.impl("_digest_many", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("truncdet::_digest_many", lib=LIB)
def _fake(tensors: list[Tensor], sums: Tensor, slot: int) -> None:
    return None


digest_many = torch.ops.truncdet._digest_many.default
