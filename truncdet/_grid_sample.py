"""grid_sample whose gradient repeats bit for bit: schema, autograd and the public function.

The maths and the plain-tensor reference are in _grid_sample_reference.py, the kernels in csrc. The
forward is PyTorch's own, which adds nothing by atomics.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from truncdet import _grid_sample_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet.fixedpoint import FORMATS

MODES = {"bilinear": 0, "nearest": 1, "bicubic": 2}
PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}

for _schema in (
    "grid_sample(Tensor input, Tensor grid, int mode, int padding_mode, bool align_corners) "
    "-> Tensor",
    "grid_sample_backward(Tensor grad, Tensor input, Tensor grid, int mode, int padding_mode, "
    "bool align_corners, bool input_gradient, bool grid_gradient) -> (Tensor, Tensor)",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _forward(input: Tensor, grid: Tensor, mode: int, padding_mode: int, align: bool) -> Tensor:
    out = torch.grid_sampler(input, grid, mode, padding_mode, align)
    return out.contiguous()


LIB.impl("grid_sample", _forward, "CompositeExplicitAutograd")
LIB.impl("grid_sample_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::grid_sample", lib=LIB)
def _fake_forward(input: Tensor, grid: Tensor, *_: Any) -> Tensor:
    return input.new_empty((*input.shape[:2], *grid.shape[1:-1]))


@torch.library.register_fake("truncdet::grid_sample_backward", lib=LIB)
def _fake_backward(
    grad: Tensor,
    input: Tensor,
    grid: Tensor,
    mode: int,
    padding_mode: int,
    align_corners: bool,
    input_gradient: bool,
    grid_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape if input_gradient else (0,)),
        grid.new_empty(grid.shape if grid_gradient else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, grid, *ctx.arguments = inputs
    ctx.save_for_backward(input, grid)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, grid = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    gradients = torch.ops.truncdet.grid_sample_backward(grad, input, grid, *ctx.arguments, *wanted)
    kept = (g if w else None for g, w in zip(gradients, wanted, strict=True))
    return (*kept, None, None, None)


torch.library.register_autograd(
    "truncdet::grid_sample", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::grid_sample_backward", without_second_derivative("grid_sample"), lib=LIB
)


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Samples `input` at the places that `grid` names, by interpolation; gradients repeat.

    A drop-in for `torch.nn.functional.grid_sample`, with PyTorch's own forward. The gradient of
    `input` is accumulated in fixed point (see `truncdet.fixedpoint`) and that of `grid` summed in a
    fixed order: the same bits run to run, on CPU and GPU, whatever the order of the places, and for
    one item whatever else is in the batch.

    Example:
        >>> image = torch.arange(9.0).reshape(1, 1, 3, 3)
        >>> middle_and_corner = torch.tensor([[[[0.0, 0.0], [1.0, 1.0]]]])
        >>> truncdet.grid_sample(image, middle_and_corner, align_corners=True)
        tensor([[[[4., 8.]]]])

    Args:
        input: [N, C, H, W] or [N, C, D, H, W]; float64, float32, float16 or bfloat16.
        grid: [N, H', W', 2] of (x, y), or [N, D', H', W', 3] of (x, y, z), of input's dtype (under
            autocast both are cast as PyTorch does). -1 and 1 are the first and last edges.
        mode: 'bilinear' (trilinear in three dimensions), 'nearest' or 'bicubic' (only in two).
        padding_mode: 'zeros', 'border' or 'reflection', for places outside.
        align_corners: whether -1 and 1 are the centres of the outer cells instead of their edges.
            None means False, with PyTorch's warning.

    Returns:
        [N, C, H', W'] or [N, C, D', H', W'] of input's dtype, contiguous. With S the exact sum of
        the contributions of one cell of input's gradient, n their number, P the number of places of
        an item, amax the item's largest finite gradient magnitude and G = ceil(log2(P)), one more
        for 'bicubic': |R - S| <= n * amax * 2^(G - 62) + 2^-24 |R| for float32 (2^-11 for float16,
        2^-8 for bfloat16); for float64 n * amax * 2^(2 G - 124) + 2^-53 |R|. Where `grid` is not
        finite, nothing reaches the gradients unless the padding clips it to the first cell.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a shape, a device or a name does not fit.
        TruncdetError: a second derivative is asked for.

    Formula: Jaderberg et al., "Spatial Transformer Networks", NIPS 2015; cubic weights: Keys, IEEE
    Trans. ASSP 29(6), 1981.
    """
    _check(input, grid, mode, padding_mode)
    if align_corners is None:
        warnings.warn(
            "grid_sample: align_corners was not given and is False, the default since torch 1.3",
            stacklevel=2,
        )
        align_corners = False
    input, grid = _as_autocast(input, grid)
    if grid.dtype != input.dtype:
        raise TypeError(
            f"grid_sample: grid must have input's dtype, {input.dtype}, got {grid.dtype}"
        )
    result: Tensor = torch.ops.truncdet.grid_sample(
        input, grid, MODES[mode], PADDINGS[padding_mode], align_corners
    )
    return result


def _as_autocast(input: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The casts of PyTorch's autocast: float32 on the CPU, the wider of both types elsewhere."""
    device = input.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return input, grid
    if torch.float64 in (input.dtype, grid.dtype):  # autocast leaves those alone
        return input, grid
    wide = torch.float32 if device == "cpu" else torch.promote_types(input.dtype, grid.dtype)
    return input.to(wide), grid.to(wide)


def _check(input: object, grid: object, mode: object, padding_mode: object) -> None:
    """Raises for arguments that grid_sample cannot take, naming the argument."""
    for name, x in (("input", input), ("grid", grid)):
        if not isinstance(x, Tensor):
            raise TypeError(f"grid_sample: {name} must be a Tensor, got {type(x).__name__}")
        if x.dtype not in FORMATS:
            raise TypeError(
                f"grid_sample: {name} must be float64, float32, float16 or bfloat16, got {x.dtype}"
            )
    assert isinstance(input, Tensor) and isinstance(grid, Tensor)
    for name, value, allowed in (("mode", mode, MODES), ("padding_mode", padding_mode, PADDINGS)):
        if value not in allowed:
            raise ValueError(
                f"grid_sample: {name} must be one of {', '.join(allowed)}, got {value!r}"
            )
    if input.dim() not in (4, 5):
        raise ValueError(
            "grid_sample: input must have shape [N, C, H, W] or [N, C, D, H, W], "
            f"got {list(input.shape)}"
        )
    dims = input.dim() - 2
    if mode == "bicubic" and dims == 3:
        raise ValueError(
            "grid_sample: mode must be 'bilinear' or 'nearest' in three dimensions, got 'bicubic'"
        )
    if grid.dim() != input.dim() or grid.size(0) != input.size(0) or grid.size(-1) != dims:
        places = ", ".join(("D'", "H'", "W'")[3 - dims :])
        raise ValueError(
            f"grid_sample: grid must have shape [{input.size(0)}, {places}, {dims}], "
            f"got {list(grid.shape)}"
        )
    if 0 in input.shape[2:]:
        raise ValueError(f"grid_sample: input must have cells, got shape {list(input.shape)}")
    if grid.device != input.device:
        raise ValueError(
            f"grid_sample: grid must be on input's device, {input.device}, got {grid.device}"
        )
