"""Operators whose CUDA kernels add floats in no fixed order, why, and what to do instead.

Keys are schema names without overload and without the underscore of in-place forms. Sources: the
kernels themselves (file names below) and the list in `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One operator: the reason, the remedy, whether PyTorch's own deterministic flag is a remedy,
    and the arguments for which any of it holds."""

    why: str
    fix: str
    flag: bool = False
    when: Callable[[Mapping[str, Any]], bool] = lambda arguments: True


_FLAG = "set torch.use_deterministic_algorithms(True) for it (slower)"
_SAMPLES = "sample with fixed weights (a convolution or matrix product) instead"
_STRIDE = "use a fixed kernel size and stride, or pool by reshape and mean"
_NEAREST = "use mode='nearest'"
_PAD = "pad with zeros, or by indexing with torch.flip and torch.cat"
_CPU = "compute it on the CPU"


def _max_mode(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("mode") == 2)


def _adds(arguments: Mapping[str, Any]) -> bool:
    # Maxima and minima are order-free.
    return arguments.get("reduce") in ("sum", "mean", "prod", "add", "multiply")


def _weighted(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("weights") is not None


def _with_dim(arguments: Mapping[str, Any]) -> bool:
    return "dim" in arguments


_TORCHVISION = {
    "_roi_align_backward": Entry(
        "float atomics in roi_align_kernel.cu",
        "truncdet.integrations.torchvision.patch(), or truncdet.roi_align",
    ),
    "_roi_pool_backward": Entry(
        "float atomics in roi_pool_kernel.cu", "truncdet.roi_align(..., pool_mode='max') instead"
    ),
    "_ps_roi_align_backward": Entry("float atomics in ps_roi_align_kernel.cu", _CPU),
    "_ps_roi_pool_backward": Entry("float atomics in ps_roi_pool_kernel.cu", _CPU),
    "_deform_conv2d_backward": Entry(
        "float atomics of col2im in deform_conv2d_kernel.cu", "use a plain convolution instead"
    ),
}

_RESAMPLING = {
    **{
        f"{name}_backward": Entry("float atomics in GridSampler.cu", _SAMPLES)
        for name in ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
    },
    **{
        f"{name}_backward": Entry(f"float atomics in {source}.cu", remedy)
        for name, source, remedy in (
            ("upsample_linear1d", "UpSampleLinear1d", _NEAREST),
            # Under the flag F.interpolate takes another path and these two are never called.
            ("upsample_bilinear2d", "UpSampleBilinear2d", f"{_NEAREST}, or {_FLAG}"),
            ("upsample_trilinear3d", "UpSampleTrilinear3d", f"{_NEAREST}, or {_FLAG}"),
            ("upsample_bicubic2d", "UpSampleBicubic2d", _NEAREST),
            ("_upsample_bilinear2d_aa", "UpSampleBilinear2d", _NEAREST),
            ("_upsample_bicubic2d_aa", "UpSampleBilinear2d", _NEAREST),
        )
    },
    **{
        f"reflection_pad{dim}d_backward": Entry(
            "float atomics in ReflectionPad.cu", _FLAG if dim == 2 else _PAD, flag=dim == 2
        )
        for dim in (1, 2, 3)
    },
    **{
        f"replication_pad{dim}d_backward": Entry(
            "float atomics in ReplicationPadding.cu", _FLAG, flag=True
        )
        for dim in (1, 2, 3)
    },
}

_POOLING = {
    "_adaptive_avg_pool2d_backward": Entry("float atomics in AdaptiveAveragePooling.cu", _STRIDE),
    "_adaptive_avg_pool3d_backward": Entry("float atomics in AdaptiveAveragePooling3d.cu", _STRIDE),
    "adaptive_max_pool2d_backward": Entry("float atomics in AdaptiveMaxPooling2d.cu", _STRIDE),
    "adaptive_max_pool3d_backward": Entry("float atomics in AdaptiveMaxPooling3d.cu", _STRIDE),
    "avg_pool3d_backward": Entry("float atomics in AveragePool3d.cu", _STRIDE),
    "max_pool3d_with_indices_backward": Entry(
        "float atomics in DilatedMaxPool3d.cu", _FLAG, flag=True
    ),
    "fractional_max_pool2d_backward": Entry("float atomics in FractionalMaxPool2d.cu", _STRIDE),
    "fractional_max_pool3d_backward": Entry("float atomics in FractionalMaxPool3d.cu", _STRIDE),
    "max_unpool2d": Entry("the last writer wins in MaxUnpooling.cu", "unpool by scatter"),
    "max_unpool3d": Entry("the last writer wins in MaxUnpooling.cu", "unpool by scatter"),
}

_LOSSES = {
    "nll_loss2d_forward": Entry(
        "float atomics in NLLLoss2d.cu",
        "reduce the loss of reduction='none' yourself",
        when=lambda arguments: arguments.get("reduction") != 0,
    ),
    "_ctc_loss_backward": Entry("float atomics in LossCTC.cu", _CPU),
    "embedding_dense_backward": Entry(
        "the order of equal indices in Embedding.cu", _FLAG, flag=True
    ),
    "_embedding_bag_backward": Entry(
        "float atomics in EmbeddingBag.cu", "mode='sum' or 'mean'", when=_max_mode
    ),
}

# index_put with accumulate=True, the backward of x[index], is absent on purpose: on CUDA it always
# takes the sorting kernel, whatever the flag says.
_INDEXING = {
    "scatter_add": Entry(
        "float atomics in ScatterGatherKernel.cu", "truncdet.scatter_add", flag=True
    ),
    "scatter": Entry("float atomics in ScatterGatherKernel.cu", "truncdet.scatter_add", when=_adds),
    "scatter_reduce": Entry(
        "float atomics in ScatterGatherKernel.cu",
        "truncdet.scatter_add, and a count for the mean",
        flag=True,
        when=_adds,
    ),
    "index_add": Entry("float atomics in Indexing.cu", "truncdet.index_add", flag=True),
    "index_reduce": Entry(
        "float atomics in Indexing.cu", "truncdet.index_add and a count", when=_adds
    ),
    "put": Entry("float atomics or the last writer in IndexKernel.cu", "truncdet.scatter_add"),
}

_STATISTICS = {
    "histc": Entry("float atomics in SummaryOps.cu", "torch.bincount of integer bins"),
    "bincount": Entry("float atomics in SummaryOps.cu", "truncdet.index_add", when=_weighted),
    "median": Entry(
        "which of equal values gives the index in Sorting.cu", "a stable sort", when=_with_dim
    ),
    "nanmedian": Entry(
        "which of equal values gives the index in Sorting.cu", "a stable sort", when=_with_dim
    ),
    "cumsum": Entry("decoupled look-back scan in ScanKernels.cpp", _FLAG, flag=True),
}

TABLE: Mapping[str, Entry] = {
    **{f"torchvision::{name}": entry for name, entry in _TORCHVISION.items()},
    **{
        f"aten::{name}": entry
        for group in (_RESAMPLING, _POOLING, _LOSSES, _INDEXING, _STATISTICS)
        for name, entry in group.items()
    },
}
