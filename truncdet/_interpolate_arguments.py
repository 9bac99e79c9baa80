"""Arguments of interpolate: what is allowed, and the sizes and scales that follow."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truncdet._resample_reference import CUBIC, LINEAR
from truncdet.fixedpoint import FORMATS


class Mode(NamedTuple):
    """torch's operator, the kind of weights and the dimensions of the input."""

    operator: str
    kind: int
    dims: int


MODES = {
    "linear": Mode("upsample_linear1d", LINEAR, 3),
    "bilinear": Mode("upsample_bilinear2d", LINEAR, 4),
    "bicubic": Mode("upsample_bicubic2d", CUBIC, 4),
    "trilinear": Mode("upsample_trilinear3d", LINEAR, 5),
}
NEAREST = ("nearest", "nearest-exact")


def check_mode(mode: str, antialias: bool) -> None:
    """Raises for what no input could make right."""
    known = (*NEAREST, *MODES, "area")
    if mode not in known:
        raise ValueError(f"interpolate: mode must be one of {', '.join(known)}, got {mode!r}")
    if antialias:
        raise ValueError(
            "interpolate: antialias must be False, since its gradient is torch's own and does not "
            f"repeat, got {antialias}"
        )


def check_sizes(
    input: Tensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool | None,
    recompute: bool | None,
) -> tuple[list[int], list[float]]:
    """Returns the output's size and, for each axis, the scale that coordinates use (0: none)."""
    axes = _check_input(input, mode)
    if mode == "area" and align_corners is not None:
        raise ValueError(
            f"interpolate: align_corners must be None for mode 'area', got {align_corners}"
        )
    if (size is None) == (scale_factor is None):
        both = "neither" if size is None else "both"
        raise ValueError(f"interpolate: one of size and scale_factor must be given, got {both}")
    if size is not None:
        if recompute:
            raise ValueError(
                "interpolate: recompute_scale_factor must be False with a size, got True"
            )
        outputs = [_as_int(n) for n in _per_axis("size", size, axes)]
        scales = [0.0] * axes
    else:
        factors = [_as_float(f) for f in _per_axis("scale_factor", scale_factor, axes)]
        outputs = [torch.sym_int(n * f) for n, f in zip(input.shape[2:], factors, strict=True)]
        scales = [0.0] * axes if recompute else factors
    if not all(n > 0 for n in outputs):
        raise ValueError(f"interpolate: the output's sizes must be positive, got {outputs}")
    return outputs, scales


def _check_input(input: Tensor, mode: str) -> int:
    """The number of axes that are resized."""
    if not isinstance(input, Tensor):
        raise TypeError(f"interpolate: input must be a Tensor, got {type(input).__name__}")
    dims = (MODES[mode].dims,) if mode in MODES else (3, 4, 5)
    if input.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(
            f"interpolate: input must have {wanted} dimensions for mode {mode!r}, got {input.dim()}"
        )
    if input.dtype not in FORMATS:
        raise TypeError(
            f"interpolate: input must be float64, float32, float16 or bfloat16, got {input.dtype}"
        )
    if not all(n > 0 for n in input.shape[1:]):
        raise ValueError(
            "interpolate: input must have no empty dimension but the first, "
            f"got {list(input.shape)}"
        )
    return input.dim() - 2


def _per_axis(name: str, value: Any, axes: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * axes
    if len(value) != axes:
        raise ValueError(f"interpolate: {name} must have {axes} elements, got {list(value)}")
    return list(value)


def _as_int(value: Any) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"interpolate: size must be an int or one an axis, got {type(value).__name__}"
        ) from None


def _as_float(value: Any) -> float:
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if not isinstance(value, (int, float, torch.SymInt)) or not 0 < value < float("inf"):
        raise ValueError(f"interpolate: scale_factor must be a positive number, got {value!r}")
    return float(value)
