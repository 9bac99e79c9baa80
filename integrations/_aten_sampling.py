"""The gradients of grid_sample, from aten's arguments to truncdet's.

Each function checks what the original checks, so that a wrong call is left to it and its error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from truncdet.integrations._aten_forms import Compute, supported

from truncdet._grid_sample import MODES, PADDINGS


def sampling(dims: int) -> Compute:
    """Returns the gradients in the arguments of `aten::grid_sampler_{dims}d_backward`."""
    modes = [number for name, number in MODES.items() if dims == 2 or name != "bicubic"]

    def compute(
        grad_output: Tensor,
        input: Tensor,
        grid: Tensor,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor] | None:
        if interpolation_mode not in modes or padding_mode not in PADDINGS.values():
            return None
        if not _samples(grad_output, input, grid, dims):
            return None
        to_input, to_grid = output_mask
        gradients: tuple[Tensor, Tensor] = torch.ops.truncdet.grid_sample_backward(
            grad_output, input, grid, interpolation_mode, padding_mode, align_corners, *output_mask
        )
        # aten always has a second result, wanted or not.
        return (
            gradients[0] if to_input else None,
            gradients[1] if to_grid else grid.new_zeros(grid.shape),
        )

    return compute


def sampling_cudnn(
    self: Tensor, grid: Tensor, grad_output: Tensor
) -> tuple[Tensor | None, Tensor] | None:
    """The gradients in the arguments of `aten::cudnn_grid_sampler_backward`.

    PyTorch calls it for what cuDNN knows: bilinear, zeros around, aligned corners, float32.
    """
    arguments = MODES["bilinear"], PADDINGS["zeros"], True, (True, True)
    return sampling(2)(grad_output, self, grid, *arguments)  # type: ignore[return-value]


def _samples(grad: Tensor, input: Tensor, grid: Tensor, dims: int) -> bool:
    """Whether `grad` can be the gradient of sampling `input` at `grid`."""
    return (
        supported(grad, input, grid)
        and input.dim() == grid.dim() == dims + 2
        and grid.size(0) == input.size(0)
        and grid.size(-1) == dims
        and 0 not in input.shape[2:]
        and grad.shape == (*input.shape[:2], *grid.shape[1:-1])
    )
