"""Every public operator of truncdet, one row each: what it replaces, promises and needs.

README's table and `truncdet.status()` are made of these rows, and the strict checker's remedies
name them. The letters of `error` and `memory` are explained below README's table.
"""

from __future__ import annotations

from typing import NamedTuple

_FLOATS = "float64, float32, float16, bfloat16"
_SUMMED = "T1 T2 T3o"
_BY_IMAGE = "T1 T2 T3o T3c"
_GATHERED = "T1 T2 T3c"
_OWN = "PyTorch's own"
_VALUES = "PyTorch's values"
_F = "F"
_MEAN = "F; a mean: one more rounding"
_AVERAGE = "1.01 k 2^-p A"
_WORDS = "W"
_NONE = "none"
_ALL = ("torchvision", "mmcv", "mmdet", "detectron2")
# Their CUDA kernels are compiled, and have not run on a GPU so far.
_NOT_RUN = "CPU; CUDA not yet run"


class OperatorRow(NamedTuple):
    """One operator, a function of the public name `name`.

    `also` are public modules and names that are the same operator; `forward` and `backward` tiers,
    or whose values they are; `memory` what a backward (or, without one, the forward) allocates
    beside its results; `patches` the integrations that make the originals use it; `kernels` the
    dispatcher's operators instead of which it can be called.
    """

    name: str
    replaces: str
    forward: str
    backward: str
    error: str = _F
    memory: str = _WORDS
    also: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    devices: str = "CPU, CUDA"
    dtypes: str = _FLOATS
    mode: str = "fixed_point"

    @property
    def tier(self) -> str:
        """Both tiers in one short text."""
        forward, backward = (text.partition(";")[0] for text in (self.forward, self.backward))
        if backward in (forward, _NONE):
            return forward
        return f"{backward}; forward: {forward}"


def _pooling(dims: int, *kernels: str) -> OperatorRow:
    return OperatorRow(
        f"adaptive_avg_pool{dims}d",
        f"torch.nn.functional.adaptive_avg_pool{dims}d",
        _OWN,
        _GATHERED,
        error=_AVERAGE,
        memory=_NONE,
        also=(f"AdaptiveAvgPool{dims}d",),
        patches=("aten",),
        kernels=kernels,
    )


ROWS: tuple[OperatorRow, ...] = (
    OperatorRow(
        "roi_align",
        "torchvision.ops.roi_align; mmcv.ops.roi_align (avg and max)",
        _BY_IMAGE,
        _BY_IMAGE,
        memory="lists, 8 KiB a RoI at most; max: W",
        also=("RoIAlign",),
        patches=_ALL,
        kernels=("torchvision::_roi_align_backward",),
    ),
    OperatorRow(
        "roi_align_rotated",
        "mmcv.ops.roi_align_rotated; detectron2's ROIAlignRotated",
        _BY_IMAGE,
        _BY_IMAGE,
        memory="weights, 24 KiB a RoI and 8 bytes a cell at most; float64: W",
        also=("RoIAlignRotated",),
        patches=("mmcv", "detectron2"),
    ),
    OperatorRow(
        "roi_pool",
        "torchvision.ops.roi_pool; mmcv.ops.roi_pool",
        _BY_IMAGE,
        _BY_IMAGE,
        memory="lists, 8 KiB a RoI at most",
        also=("RoIPool",),
        kernels=("torchvision::_roi_pool_backward",),
        patches=("torchvision", "mmcv"),
    ),
    OperatorRow(
        "ps_roi_align",
        "torchvision.ops.ps_roi_align",
        _BY_IMAGE,
        _BY_IMAGE,
        memory="lists, 8 KiB a RoI at most",
        also=("PSRoIAlign",),
        kernels=("torchvision::_ps_roi_align_backward",),
        patches=("torchvision",),
    ),
    OperatorRow(
        "ps_roi_pool",
        "torchvision.ops.ps_roi_pool",
        _BY_IMAGE,
        _BY_IMAGE,
        memory="lists, 8 KiB a RoI at most",
        also=("PSRoIPool",),
        kernels=("torchvision::_ps_roi_pool_backward",),
        patches=("torchvision",),
    ),
    OperatorRow(
        "deform_conv2d",
        "torchvision.ops.deform_conv2d; mmcv's and detectron2's deformable layers",
        "T1; the sampling T2 T3c",
        "T1; the sampling's part T2 T3o T3c; weight and bias: the vendor library's",
        memory="columns of a chunk (2^26 elements, or one image's); W of the chunk",
        also=("DeformConv2d",),
        kernels=("torchvision::_deform_conv2d_backward",),
        patches=("torchvision", "mmcv", "detectron2"),
    ),
    OperatorRow(
        "nll_loss",
        "torch.nn.functional.nll_loss",
        _SUMMED,
        _SUMMED,
        memory=_NONE,
        also=("NLLLoss",),
        patches=("aten",),
        kernels=("aten::nll_loss2d_forward",),
    ),
    OperatorRow(
        "cross_entropy",
        "torch.nn.functional.cross_entropy",
        "T1 T3o",
        "T1 T3o",
        memory="as PyTorch's",
        also=("CrossEntropyLoss",),
        patches=("aten",),
    ),
    OperatorRow(
        "ctc_loss",
        "torch.nn.functional.ctc_loss",
        _BY_IMAGE,
        _BY_IMAGE,
        error="T 2^-50 (A + 4), then one rounding",
        memory="16 bytes an item, time and state",
        also=("CTCLoss",),
        patches=("aten",),
        kernels=("aten::_ctc_loss_backward",),
    ),
    OperatorRow(
        "nms",
        "torchvision.ops.nms; mmcv.ops.nms",
        "T1 T2",
        _NONE,
        error="none: boxes are chosen",
        memory="N^2 / 8 bytes",
        patches=("mmcv",),
    ),
    OperatorRow(
        "batched_nms",
        "torchvision.ops.batched_nms",
        "T1 T2 T3c",
        _NONE,
        error="none: boxes are chosen",
        memory="N^2 / 8 bytes",
        patches=("mmcv",),
    ),
    OperatorRow(
        "topk",
        "torch.topk",
        "T1 T2",
        "T1 T2",
        error="none: elements are chosen",
        memory="8 bytes an element",
    ),
    OperatorRow(
        "interpolate",
        "torch.nn.functional.interpolate, without antialias",
        _OWN,
        _GATHERED,
        error=_AVERAGE,
        memory="tables, 48 bytes a row or column at most",
        also=("Upsample",),
        patches=("aten",),
        kernels=(
            "aten::upsample_linear1d_backward",
            "aten::upsample_bilinear2d_backward",
            "aten::upsample_bicubic2d_backward",
            "aten::upsample_trilinear3d_backward",
        ),
    ),
    _pooling(1),
    _pooling(2, "aten::_adaptive_avg_pool2d_backward"),
    _pooling(3, "aten::_adaptive_avg_pool3d_backward"),
    OperatorRow(
        "adaptive_max_pool2d",
        "torch.nn.functional.adaptive_max_pool2d",
        _OWN,
        _GATHERED,
        error="1.01 (m - 1) 2^-p A",
        memory=_NONE,
        also=("AdaptiveMaxPool2d",),
        patches=("aten",),
        kernels=("aten::adaptive_max_pool2d_backward",),
    ),
    OperatorRow(
        "grid_sample",
        "torch.nn.functional.grid_sample",
        _OWN,
        _BY_IMAGE,
        patches=("aten",),
        kernels=(
            "aten::grid_sampler_2d_backward",
            "aten::grid_sampler_3d_backward",
            "aten::cudnn_grid_sampler_backward",
        ),
    ),
    OperatorRow(
        "ms_deform_attn",
        "the function behind mmcv.ops.MultiScaleDeformableAttention",
        _BY_IMAGE,
        _BY_IMAGE,
        error="F with amax = 2 A B",
        patches=("mmcv",),
    ),
    OperatorRow(
        "scatter_add",
        "torch.scatter_add",
        _SUMMED,
        _SUMMED,
        patches=("aten",),
        kernels=("aten::scatter_add", "aten::scatter"),
    ),
    OperatorRow(
        "index_add",
        "torch.index_add",
        _SUMMED,
        _SUMMED,
        patches=("aten",),
        kernels=("aten::index_add",),
    ),
    OperatorRow(
        "index_put",
        "torch.index_put with accumulate; x[index] (backward)",
        _SUMMED,
        _SUMMED,
        memory="W; through enable() of the named cells alone where they are few",
        patches=("aten",),
        kernels=("aten::put",),
    ),
    OperatorRow(
        "scatter_reduce",
        "torch.scatter_reduce with 'sum', 'mean'",
        _SUMMED,
        _SUMMED,
        error=_MEAN,
        patches=("aten",),
        kernels=("aten::scatter_reduce", "aten::index_reduce"),
    ),
    OperatorRow(
        "segment_reduce",
        "torch.segment_reduce with 'sum', 'mean'",
        _SUMMED,
        _SUMMED,
        error=_MEAN,
        patches=("aten",),
    ),
    OperatorRow(
        "gather",
        "torch.gather",
        _VALUES,
        _SUMMED,
        patches=("aten",),
        dtypes=f"{_FLOATS}; integers",
    ),
    OperatorRow(
        "index_select",
        "torch.index_select",
        _VALUES,
        _SUMMED,
        patches=("aten",),
        dtypes=f"{_FLOATS}; integers",
    ),
    OperatorRow(
        "embedding",
        "torch.nn.functional.embedding",
        _VALUES,
        _SUMMED,
        memory="W, of the named rows alone where they are few",
        patches=("aten",),
        kernels=("aten::embedding_dense_backward",),
    ),
    OperatorRow(
        "embedding_bag",
        "torch.nn.functional.embedding_bag with 'sum', 'mean'",
        _OWN,
        f"{_SUMMED}; sample weights: {_OWN}",
        memory="W, of the named rows alone where they are few",
        patches=("aten",),
    ),
    OperatorRow(
        "bincount",
        "torch.bincount with weights",
        _SUMMED,
        _NONE,
        patches=("aten",),
        kernels=("aten::bincount",),
        dtypes="integers; weights: float64, float32",
    ),
    OperatorRow(
        "histc",
        "torch.histc",
        _SUMMED,
        _NONE,
        error="none: integers",
        memory="copies of the input, 8 bytes an element",
        patches=("aten",),
        kernels=("aten::histc",),
    ),
    OperatorRow(
        "dynamic_scatter",
        "mmcv.ops.dynamic_scatter",
        _SUMMED,
        _SUMMED,
        error=_MEAN,
        also=("DynamicScatter",),
        patches=("mmcv",),
    ),
    OperatorRow(
        "scatter",
        "torch_scatter.scatter with 'sum', 'mean'",
        _SUMMED,
        _SUMMED,
        error=_MEAN,
        also=("scatter_sum", "scatter_mean"),
        patches=("aten",),
    ),
    OperatorRow(
        "render.interpolate",
        "nvdiffrast.torch.interpolate",
        _GATHERED,
        f"{_BY_IMAGE}; of shared vertices T1 T2 T3o",
        memory="12 bytes a cell at most",
        devices=_NOT_RUN,
        dtypes="float64, float32",
    ),
    OperatorRow(
        "render.rasterize_gradient",
        "the gradient of nvdiffrast.torch.rasterize",
        "its input",
        f"{_BY_IMAGE}; of shared vertices T1 T2 T3o",
        memory="9 bytes a cell",
        devices=_NOT_RUN,
        dtypes="float64, float32",
    ),
    OperatorRow(
        "wrap",
        "any callable (truncate)",
        "T0",
        "T0",
        error="`bits` significant bits are kept",
        memory="copies in float64",
        patches=_ALL,
        devices="where it runs",
        dtypes="where it runs",
        mode="truncate",
    ),
    OperatorRow(
        "snap",
        "any values of weight one",
        _SUMMED,
        "straight through",
        error="count u / 2",
        memory=_NONE,
        devices="any",
        mode="snap",
    ),
)

BY_KERNEL = {kernel: row for row in ROWS for kernel in row.kernels}


def instead_of(kernel: str) -> str | None:
    """What to call instead of a dispatcher operator, or how to make it ours; None if nothing."""
    row = BY_KERNEL.get(kernel)
    if row is None:
        return None
    switch = "truncdet.enable()" if row.patches else ""
    return " or ".join(part for part in (switch, f"truncdet.{row.name}") if part)
