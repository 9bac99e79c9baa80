"""Operators whose CUDA kernels add floats in no fixed order, why, and what to do instead.

Keys are schema names without overload and without the underscore of in-place forms. Sources: the
kernels themselves (file names below) and the list in `torch.use_deterministic_algorithms`. Where
truncdet has an operator of its own the remedy names it, by the rows of truncdet._operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from truncdet._operators import instead_of
from truncdet.fixedpoint import FORMATS


class Entry(NamedTuple):
    """One operator: the reason, the remedy, whether PyTorch's own deterministic flag is a remedy,
    and the arguments for which any of it holds, in words as well."""

    why: str
    fix: str
    flag: bool = False
    when: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    calls: str = ""


_FLAG = "set torch.use_deterministic_algorithms(True) for it (slower)"
_STRIDE = "use a fixed kernel size and stride, or pool by reshape and mean"
_PAD = "pad with zeros, or by indexing with torch.flip and torch.cat"
_CPU = "compute it on the CPU"
_PRODUCTS = "of products: compute them on the CPU"


def _max_mode(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("mode") == 2)


def _adds(arguments: Mapping[str, Any]) -> bool:
    # Maxima and minima are order-free.
    return arguments.get("reduce") in ("sum", "mean", "prod", "add", "multiply")


def _adds_tensors(arguments: Mapping[str, Any]) -> bool:
    # One number added again and again gives the same in every order.
    return "src" in arguments and _adds(arguments)


def _weighted(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("weights") is not None


def _with_dim(arguments: Mapping[str, Any]) -> bool:
    return "dim" in arguments


def _beyond_integers(arguments: Mapping[str, Any]) -> bool:
    # It adds ones: exact, and so in any order, up to the last integer without a gap.
    x = arguments["self"]
    return x.dtype not in FORMATS or bool(x.numel() > 2 ** FORMATS[x.dtype].precision)


def _remedy(kernel: str, without: str = "", rest: str = "") -> str:
    """What truncdet has instead, and what remains; `without` if truncdet has nothing."""
    return "; ".join(part for part in (instead_of(kernel) or without, rest) if part)


_TORCHVISION = {
    f"torchvision::{name}_backward": Entry(
        f"float atomics {where}", _remedy(f"torchvision::{name}_backward", without)
    )
    for name, where, without in (
        ("_roi_align", "in roi_align_kernel.cu", ""),
        (
            "_roi_pool",
            "in roi_pool_kernel.cu",
            "truncdet.roi_align(..., pool_mode='max') instead",
        ),
        ("_ps_roi_align", "in ps_roi_align_kernel.cu", _CPU),
        ("_ps_roi_pool", "in ps_roi_pool_kernel.cu", _CPU),
        (
            "_deform_conv2d",
            "of col2im in deform_conv2d_kernel.cu",
            "use a plain convolution instead",
        ),
    )
}


def _gradient(name: str, source: str, without: str = "", flag: bool = False) -> dict[str, Entry]:
    """The entry of an operator's backward that adds by atomics."""
    kernel = f"aten::{name}_backward"
    fix = _remedy(kernel, without)
    return {kernel: Entry(f"float atomics in {source}", fix, flag=flag)}


_RESAMPLING = {
    **_gradient("grid_sampler_2d", "GridSampler.cu"),
    **_gradient("grid_sampler_3d", "GridSampler.cu"),
    **_gradient("cudnn_grid_sampler", "cuDNN"),
    # Under the flag F.interpolate takes another path for bilinear and trilinear.
    **_gradient("upsample_linear1d", "UpSampleLinear1d.cu"),
    **_gradient("upsample_bilinear2d", "UpSampleBilinear2d.cu"),
    **_gradient("upsample_trilinear3d", "UpSampleTrilinear3d.cu"),
    **_gradient("upsample_bicubic2d", "UpSampleBicubic2d.cu"),
    **_gradient("_upsample_bilinear2d_aa", "UpSampleBilinear2d.cu", "use antialias=False"),
    **_gradient("_upsample_bicubic2d_aa", "UpSampleBilinear2d.cu", "use antialias=False"),
    **_gradient("reflection_pad1d", "ReflectionPad.cu", _PAD),
    **_gradient("reflection_pad2d", "ReflectionPad.cu", _FLAG, flag=True),
    **_gradient("reflection_pad3d", "ReflectionPad.cu", _PAD),
    **_gradient("replication_pad1d", "ReplicationPadding.cu", _FLAG, flag=True),
    **_gradient("replication_pad2d", "ReplicationPadding.cu", _FLAG, flag=True),
    **_gradient("replication_pad3d", "ReplicationPadding.cu", _FLAG, flag=True),
}

_POOLING = {
    **_gradient("_adaptive_avg_pool2d", "AdaptiveAveragePooling.cu"),
    **_gradient("_adaptive_avg_pool3d", "AdaptiveAveragePooling3d.cu"),
    **_gradient("adaptive_max_pool2d", "AdaptiveMaxPooling2d.cu"),
    **_gradient("adaptive_max_pool3d", "AdaptiveMaxPooling3d.cu", _STRIDE),
    **_gradient("avg_pool3d", "AveragePool3d.cu", _STRIDE),
    **_gradient("max_pool3d_with_indices", "DilatedMaxPool3d.cu", _FLAG, flag=True),
    **_gradient("fractional_max_pool2d", "FractionalMaxPool2d.cu", _STRIDE),
    **_gradient("fractional_max_pool3d", "FractionalMaxPool3d.cu", _STRIDE),
    **{
        f"aten::max_unpool{dims}d": Entry(
            "the last writer wins in MaxUnpooling.cu", "unpool by scatter"
        )
        for dims in (2, 3)
    },
}

_LOSSES = {
    "aten::nll_loss2d_forward": Entry(
        "float atomics in NLLLoss2d.cu",
        _remedy("aten::nll_loss2d_forward"),
        when=lambda arguments: arguments.get("reduction") != 0,
    ),
    **_gradient("_ctc_loss", "LossCTC.cu"),
    "aten::embedding_dense_backward": Entry(
        "the order of equal indices in Embedding.cu",
        _remedy("aten::embedding_dense_backward"),
        flag=True,
    ),
    "aten::_embedding_bag_backward": Entry(
        "float atomics in EmbeddingBag.cu",
        "truncdet.enable(), or mode='sum' or 'mean'",
        when=_max_mode,
    ),
}

# index_put with accumulate=True, the backward of x[index], is absent on purpose: on CUDA it always
# takes the sorting kernel, whatever the flag says.
_INDEXING = {
    "aten::scatter_add": Entry(
        "float atomics in ScatterGatherKernel.cu", _remedy("aten::scatter_add"), flag=True
    ),
    "aten::scatter": Entry(
        "float atomics in ScatterGatherKernel.cu",
        _remedy("aten::scatter", rest=_PRODUCTS),
        when=_adds_tensors,
    ),
    "aten::scatter_reduce": Entry(
        "float atomics in ScatterGatherKernel.cu",
        _remedy("aten::scatter_reduce", rest=_PRODUCTS),
        flag=True,
        when=_adds,
    ),
    "aten::index_add": Entry("float atomics in Indexing.cu", _remedy("aten::index_add"), flag=True),
    "aten::index_reduce": Entry(
        "float atomics in Indexing.cu",
        _remedy("aten::index_reduce", rest=_PRODUCTS),
        when=_adds,
    ),
    "aten::put": Entry(
        "float atomics or the last writer in IndexKernel.cu",
        _remedy("aten::put", rest="without accumulate: name no place twice, by index_put"),
    ),
}

_STATISTICS = {
    "aten::histc": Entry(
        "float atomics in SummaryOps.cu", _remedy("aten::histc"), when=_beyond_integers
    ),
    "aten::bincount": Entry(
        "float atomics in SummaryOps.cu", _remedy("aten::bincount"), when=_weighted
    ),
    **{
        f"aten::{name}": Entry(
            "which of equal values gives the index in Sorting.cu",
            "a stable sort",
            when=_with_dim,
            calls="with indices",
        )
        for name in ("median", "nanmedian")
    },
    "aten::cumsum": Entry("decoupled look-back scan in ScanKernels.cpp", _FLAG, flag=True),
}

TABLE: Mapping[str, Entry] = {
    **_TORCHVISION,
    **_RESAMPLING,
    **_POOLING,
    **_LOSSES,
    **_INDEXING,
    **_STATISTICS,
}
