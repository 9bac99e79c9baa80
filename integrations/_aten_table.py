"""The operators of aten that are overridden: one row each, for kernels, strict mode and status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from truncdet.integrations._aten_forms import Compute, Form, functional, in_place, into
from truncdet.integrations._aten_resample import average_pooling, interpolation, max_pooling
from truncdet.integrations._aten_scatter import index_add, scatter_add


class Operator(NamedTuple):
    """One operator and its forms, each the end of an overload's name and how it becomes a kernel.

    `part` is what a user calls it, `tier` what it promises while overridden, and `by` the function
    of truncdet that has the same bits.
    """

    forms: Mapping[str, Form]
    compute: Compute
    part: str
    tier: str
    by: str


_ONLY_NEW: Mapping[str, Form] = {"": functional}
_GRADIENT: Mapping[str, Form] = {"": functional, ".grad_input": into("grad_input")}
_METHOD: Mapping[str, Form] = {"": functional, "_": in_place, ".out": into("out")}

_GATHERED = "T1 T2 T3c"  # in one written order: there is no order of contributions to permute
_SUMMED = "T1 T2 T3o"

OPERATORS: Mapping[str, Operator] = {
    **{
        f"aten::upsample_{mode}{axes}d_backward": Operator(
            _GRADIENT,
            interpolation(mode),
            f"interpolate {mode}: backward",
            _GATHERED,
            "truncdet.interpolate",
        )
        for mode, axes in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
    },
    "aten::_adaptive_avg_pool2d_backward": Operator(
        _ONLY_NEW,
        average_pooling(2),
        "adaptive_avg_pool1d, adaptive_avg_pool2d: backward",
        _GATHERED,
        "truncdet.adaptive_avg_pool2d",
    ),
    "aten::_adaptive_avg_pool3d_backward": Operator(
        _ONLY_NEW,
        average_pooling(3),
        "adaptive_avg_pool3d: backward",
        _GATHERED,
        "truncdet.adaptive_avg_pool3d",
    ),
    "aten::adaptive_max_pool2d_backward": Operator(
        _GRADIENT,
        max_pooling,
        "adaptive_max_pool1d, adaptive_max_pool2d: backward",
        _GATHERED,
        "truncdet.adaptive_max_pool2d",
    ),
    "aten::scatter_add": Operator(
        _METHOD,
        scatter_add,
        "scatter_add: forward; gather, take_along_dim: backward",
        _SUMMED,
        "truncdet.scatter_add",
    ),
    "aten::index_add": Operator(
        _METHOD,
        index_add,
        "index_add: forward; index_select: backward",
        _SUMMED,
        "truncdet.index_add",
    ),
}
