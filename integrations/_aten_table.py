"""The operators of aten that are overridden: one row each, for kernels, strict mode and status.

Not here because nothing is left to do: the names of torch_scatter, whose sums and means call
scatter_add; the gradients of gather, take_along_dim, index_select, take and x[index], which are
made of these operators; and the gradient of segment_reduce, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from truncdet.integrations import _aten_embedding as tables
from truncdet.integrations import _aten_index_put as places
from truncdet.integrations import _aten_losses as losses
from truncdet.integrations import _aten_resample as resample
from truncdet.integrations import _aten_sampling as sampling
from truncdet.integrations import _aten_scatter as scatter
from truncdet.integrations import _aten_statistics as statistics
from truncdet.integrations._aten_forms import (
    Applies,
    Compute,
    Form,
    always,
    changing,
    functional,
    in_place,
    into,
)


class Operator(NamedTuple):
    """One operator and its forms, each the end of an overload's name and how it becomes a kernel.

    `part` is what a user calls it, `tier` what it promises while overridden, and `by` the function
    of truncdet that has the same bits. Calls to which `applies` says no stay with PyTorch: `left`
    names those of them that differ from run to run. `also` are operators that call this one, as
    the strict checker sees them.
    """

    forms: Mapping[str, Form]
    compute: Compute
    part: str
    tier: str
    by: str
    applies: Applies = always
    left: str = ""
    also: tuple[str, ...] = ()


_ONLY_NEW: Mapping[str, Form] = {"": functional}
_ONLY_IN_PLACE: Mapping[str, Form] = {"_": changing}
_GRADIENT: Mapping[str, Form] = {"": functional, ".grad_input": into("grad_input")}
_METHOD: Mapping[str, Form] = {"": functional, "_": in_place, ".out": into("out")}
_HISTOGRAM: Mapping[str, Form] = {"": functional, ".out": into("out")}
_TWO: Mapping[str, Form] = {".two": functional, "_.two": in_place, ".two_out": into("out")}
_REDUCE: Mapping[str, Form] = {
    ".reduce": functional,
    "_.reduce": in_place,
    ".reduce_out": into("out"),
}

_GATHERED = "T1 T2 T3c"  # in one written order: there is no order of contributions to permute
_SUMMED = "T1 T2 T3o"
_SUMMED_BY_IMAGE = "T1 T2 T3o T3c"

_RESAMPLING: Mapping[str, Operator] = {
    **{
        f"aten::upsample_{mode}{axes}d_backward": Operator(
            _GRADIENT,
            resample.interpolation(mode),
            f"interpolate {mode}: backward",
            _GATHERED,
            "truncdet.interpolate",
        )
        for mode, axes in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
    },
    "aten::_adaptive_avg_pool2d_backward": Operator(
        _ONLY_NEW,
        resample.average_pooling(2),
        "adaptive_avg_pool1d, adaptive_avg_pool2d: backward",
        _GATHERED,
        "truncdet.adaptive_avg_pool2d",
    ),
    "aten::_adaptive_avg_pool3d_backward": Operator(
        _ONLY_NEW,
        resample.average_pooling(3),
        "adaptive_avg_pool3d: backward",
        _GATHERED,
        "truncdet.adaptive_avg_pool3d",
    ),
    "aten::adaptive_max_pool2d_backward": Operator(
        _GRADIENT,
        resample.max_pooling,
        "adaptive_max_pool1d, adaptive_max_pool2d: backward",
        _GATHERED,
        "truncdet.adaptive_max_pool2d",
    ),
    **{
        f"aten::grid_sampler_{dims}d_backward": Operator(
            _ONLY_NEW,
            sampling.sampling(dims),
            f"grid_sample of {what}: backward",
            _SUMMED_BY_IMAGE,
            "truncdet.grid_sample",
        )
        for dims, what in ((2, "images"), (3, "volumes"))
    },
    "aten::cudnn_grid_sampler_backward": Operator(
        _ONLY_NEW,
        sampling.sampling_cudnn,
        "grid_sample by cuDNN: backward",
        _SUMMED_BY_IMAGE,
        "truncdet.grid_sample",
    ),
}

_INDEXING: Mapping[str, Operator] = {
    "aten::scatter_add": Operator(
        _METHOD,
        scatter.scatter_add,
        "scatter_add: forward; gather, take_along_dim: backward",
        _SUMMED,
        "truncdet.scatter_add",
    ),
    "aten::index_add": Operator(
        _METHOD,
        scatter.index_add,
        "index_add: forward; index_select: backward",
        _SUMMED,
        "truncdet.index_add",
    ),
    "aten::scatter_reduce": Operator(
        _TWO,
        scatter.scatter_reduce,
        "scatter_reduce with 'sum', 'mean': forward",
        _SUMMED,
        "truncdet.scatter_reduce",
        scatter.sums_or_averages,
        left="with 'prod'",
    ),
    "aten::scatter": Operator(
        _REDUCE,
        scatter.scatter,
        "scatter with 'add': forward",
        _SUMMED,
        "truncdet.scatter_add",
        scatter.adds,
        left="with 'multiply'",
    ),
    "aten::index_reduce": Operator(
        _METHOD,
        scatter.index_reduce,
        "index_reduce with 'mean': forward",
        _SUMMED,
        "truncdet.scatter_reduce",
        scatter.averages,
        left="with 'prod'",
    ),
    "aten::_index_put_impl": Operator(
        _ONLY_IN_PLACE,
        places.index_put,
        "index_put with accumulate: forward; x[index]: backward",
        _SUMMED,
        "truncdet.index_put",
        places.accumulates,
        also=("aten::index_put", "aten::_unsafe_index_put"),
    ),
    "aten::put": Operator(
        _ONLY_IN_PLACE,
        places.put,
        "put with accumulate: forward; take: backward",
        _SUMMED,
        "truncdet.index_put",
        places.accumulates,
        left="without accumulate",
    ),
}

_TABLES: Mapping[str, Operator] = {
    "aten::embedding_dense_backward": Operator(
        _ONLY_NEW,
        tables.embedding,
        "embedding: backward",
        _SUMMED,
        "truncdet.embedding",
    ),
    "aten::_embedding_bag_dense_backward": Operator(
        _ONLY_NEW,
        tables.embedding_bag,
        "embedding_bag: backward",
        _SUMMED,
        "truncdet.embedding_bag",
        also=("aten::_embedding_bag_backward",),
    ),
}

_STATISTICS: Mapping[str, Operator] = {
    "aten::bincount": Operator(
        _ONLY_NEW,
        statistics.bincount,
        "bincount with weights: forward",
        _SUMMED,
        "truncdet.bincount",
        statistics.weighted,
    ),
    "aten::histc": Operator(
        _HISTOGRAM,
        statistics.histc,
        "histc of more than 2^24 elements: forward",
        _SUMMED,
        "truncdet.histc",
        statistics.counts_beyond_floats,
    ),
    "aten::segment_reduce": Operator(
        _ONLY_NEW,
        statistics.segment_reduce,
        "segment_reduce with 'sum', 'mean': forward",
        _SUMMED,
        "truncdet.segment_reduce",
        statistics.segment_sums,
    ),
}

_LOSSES: Mapping[str, Operator] = {
    "aten::nll_loss2d_forward": Operator(
        {"": functional, ".output": into("output", "total_weight")},
        losses.nll_loss,
        "nll_loss, cross_entropy of maps with a reduction: forward",
        _SUMMED,
        "truncdet.nll_loss",
        losses.reduces,
    ),
    "aten::_ctc_loss_backward": Operator(
        {"": functional, ".Tensor": functional},
        losses.ctc_loss,
        "ctc_loss: backward",
        _SUMMED_BY_IMAGE,
        "truncdet.ctc_loss",
    ),
}

OPERATORS: Mapping[str, Operator] = {
    **_RESAMPLING,
    **_INDEXING,
    **_TABLES,
    **_STATISTICS,
    **_LOSSES,
}

BY_NAME: Mapping[str, Operator] = {
    **OPERATORS,
    **{name: operator for operator in OPERATORS.values() for name in operator.also},
}
"""The operators of the table and those that call them."""
