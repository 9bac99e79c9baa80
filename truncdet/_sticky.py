"""Out-of-range indices met on a GPU: reported by the next call, without waiting for the device.

A CUDA kernel cannot raise. It drops the contribution and sets a bit in pinned host memory; the next
truncdet call reads that memory (a plain load) and raises. `check()` waits for the device first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet._build import has_extension
from truncdet._errors import TruncdetError

RENDER_INTERPOLATE, RASTERIZE_GRADIENT = 1 << 3, 1 << 4
GATHER, INDEX_SELECT, INDEX_PUT, SCATTER_REDUCE, SCATTER = (1 << bit for bit in range(16, 21))
EMBEDDING, EMBEDDING_BAG = 1 << 21, 1 << 22
ROI_ALIGN_ROTATED = 1 << 26
ROI_POOL, PS_ROI_ALIGN, PS_ROI_POOL = 1 << 23, 1 << 24, 1 << 25
NLL_LOSS, CTC_LOSS, CROSS_ENTROPY = 1 << 28, 1 << 29, 1 << 30

OPERATORS = {
    1: "roi_align",
    2: "scatter_add",
    4: "index_add",
    RENDER_INTERPOLATE: "render.interpolate",
    RASTERIZE_GRADIENT: "render.rasterize_gradient",
    1 << 12: "ms_deform_attn",
    GATHER: "gather",
    INDEX_SELECT: "index_select",
    INDEX_PUT: "index_put",
    SCATTER_REDUCE: "scatter_reduce",
    SCATTER: "scatter",
    EMBEDDING: "embedding",
    EMBEDDING_BAG: "embedding_bag",
    ROI_ALIGN_ROTATED: "roi_align_rotated",
    ROI_POOL: "roi_pool",
    PS_ROI_ALIGN: "ps_roi_align",
    PS_ROI_POOL: "ps_roi_pool",
    NLL_LOSS: "nll_loss",
    CTC_LOSS: "ctc_loss",
    CROSS_ENTROPY: "cross_entropy",
}
"""The bit of each operator; csrc/cuda/launch.cuh has those that a kernel names by itself."""

# Bits the pure-PyTorch path found on a device: pinned words filled by asynchronous copies.
_pending: dict[int, Tensor] = {}


def note_out_of_range(bit: int, bad: Tensor) -> None:
    """Remembers, without a host synchronisation, whether the CUDA mask `bad` is set anywhere."""
    word = _pending.get(bit)
    if word is None:
        word = _pending[bit] = torch.zeros((), dtype=torch.int32, pin_memory=True)
    on_device = bad.any().to(torch.int32)
    word.copy_(torch.maximum(on_device, word.to(bad.device, non_blocking=True)), non_blocking=True)


def raise_pending() -> None:
    """Raises TruncdetError if a CUDA kernel has reported an out-of-range index so far."""
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return
    bits = int(torch.ops.truncdet._take_sticky()) if has_extension("cuda") else 0
    for bit, word in _pending.items():
        if int(word) != 0:
            bits |= bit
            word.zero_()
    if bits == 0:
        return
    names = ", ".join(name for bit, name in OPERATORS.items() if bits & bit)
    raise TruncdetError(
        f"{names}: an index was out of range on a CUDA device; its contributions were dropped"
    )


def check() -> None:
    """Waits for the current CUDA device and raises if any operator met an out-of-range index.

    On the CPU such indices raise at once and this function does nothing.

    Example:
        >>> truncdet.check()

    Raises:
        TruncdetError: naming the operators whose indices were out of range; their contributions
            were dropped.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    raise_pending()
