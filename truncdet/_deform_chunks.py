"""The operator deform_conv2d: sampling and matrix products, chunk by chunk, and its autograd.

With the columns [C, taps, N, places] of _deform_sample as a matrix of C * taps rows and a column a
place, each group of the weight gives

    output = weight @ columns + bias        d columns = weight^T @ d output
    d weight = d output @ columns^T         d bias = sum of d output over images and places

These products and sums are the vendor library's. They add nothing by atomics: their bits repeat on
one GPU (tier T1), given what the library asks for (CUBLAS_WORKSPACE_CONFIG, see `enable`), and may
differ on another. What lies between them, the sampling and its gradients, has the same bits on
every device, and for one image whatever else is in the batch, as long as the columns' gradient has
(tiers T2 and T3c).

The batch is worked through in chunks of `chunk_images` images, in ascending order, so that columns
never take more room than CHUNK_ELEMENTS or one image. The products see a chunk as one matrix, and d
weight is added up chunk by chunk: the rule is a part of the definition. Columns are sampled again
in the backward instead of being kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truncdet import _deform_sample as _deform_sample  # registers the operators used here
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative

CHUNK_ELEMENTS = 1 << 26
"""Most elements of a chunk's columns, unless a single image has more (256 MiB of float32)."""

_TENSORS = "Tensor input, Tensor weight, Tensor offset, Tensor? mask"
_STEPS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
for _schema in (
    f"deform_conv2d({_TENSORS}, Tensor? bias, {_STEPS}) -> Tensor",
    f"deform_conv2d_backward(Tensor grad, {_TENSORS}, {_STEPS}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def chunk_images(elements: int) -> int:
    """Images of a chunk, where the columns of one have `elements` elements."""
    return max(1, CHUNK_ELEMENTS // elements)


class _Call(NamedTuple):
    """What is sampled, whole or a chunk of it, and the matrices of the weight's groups."""

    input: Tensor
    offset: Tensor
    mask: Tensor | None
    geometry: list[int]
    matrices: Tensor  # [groups, O / groups, C / groups * taps]

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        *steps: Sequence[int],
    ) -> _Call:
        groups, rows = input.size(1) // weight.size(1), weight.shape[1:].numel()
        geometry = [*weight.shape[2:], *(number for step in steps for number in step)]
        matrices = weight.reshape(groups, weight.size(0) // groups, rows)
        # Contiguous, as all factors are: the library may sum another layout in another order.
        return cls(input, offset, mask, geometry, matrices.contiguous())

    @property
    def columns_shape(self) -> tuple[int, int, int, int]:
        taps = self.geometry[0] * self.geometry[1]
        return self.input.size(1), taps, self.input.size(0), self.offset.shape[2:].numel()

    def chunks(self) -> Iterator[tuple[slice, _Call]]:
        """Which images, and their part of the call; one part without images if there are none."""
        channels, taps, images, places = self.columns_shape
        step = chunk_images(channels * taps * places)
        for first in range(0, max(images, 1), step):
            some = slice(first, first + step)
            mask = None if self.mask is None else self.mask[some]
            part = self._replace(input=self.input[some], offset=self.offset[some], mask=mask)
            yield some, part

    def sample(self) -> Tensor:
        """The columns as one matrix a group."""
        columns: Tensor = torch.ops.truncdet._deform_sample(*self[:4])
        groups, _, rows = self.matrices.shape
        return columns.view(groups, rows, columns.size(2) * columns.size(3))

    def gradients(self, grad: Tensor, input: bool, offset: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Those of input, offset and mask that are asked for; `grad` is one matrix a group."""
        if not (input or offset):
            return self.input.new_empty(0), self.input.new_empty(0), self.input.new_empty(0)
        columns = torch.bmm(self.matrices.transpose(1, 2), grad).view(self.columns_shape)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.truncdet._deform_sample_backward(
            columns, *self[:4], input, offset
        )
        return gradients


def _forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *steps: Sequence[int],
) -> Tensor:
    parts = []
    with torch.autocast(input.device.type, enabled=False):
        for _, chunk in _Call.of(input, weight, offset, mask, *steps).chunks():
            product = torch.bmm(chunk.matrices, chunk.sample())
            shape = (weight.size(0), chunk.input.size(0), *offset.shape[2:])
            parts.append(product.view(shape).transpose(0, 1))
        out = _join(parts)
        return out if bias is None else out.add_(bias[:, None, None])


def _join(parts: Sequence[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).contiguous()


def _backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of input, weight, offset and mask; empty tensors for those not asked for."""
    call = _Call.of(input, weight, offset, mask, stride, padding, dilation)
    groups, outputs, _ = call.matrices.shape
    for_weight = torch.zeros_like(call.matrices)
    parts = []
    with torch.autocast(input.device.type, enabled=False):
        for images, chunk in call.chunks():
            g = grad[images].transpose(0, 1)
            g = g.reshape(groups, outputs, g.shape[1:].numel()).contiguous()
            # The gradient's columns are gone when those of the input are sampled again.
            parts.append(chunk.gradients(g, wanted[0], wanted[2] or wanted[3]))
            if wanted[1]:
                for_weight.baddbmm_(g, chunk.sample().transpose(1, 2))
    for_input, for_offset, for_mask = (_join(some) for some in zip(*parts, strict=True))
    found = (for_input, for_weight.view(weight.shape), for_offset, for_mask)
    return tuple(  # type: ignore[return-value]
        x if want else x.new_empty(0) for x, want in zip(found, wanted, strict=True)
    )


LIB.impl("deform_conv2d", _forward, "CompositeExplicitAutograd")
LIB.impl("deform_conv2d_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::deform_conv2d", lib=LIB)
def _fake_forward(input: Tensor, weight: Tensor, offset: Tensor, *_: Any) -> Tensor:
    return input.new_empty((input.size(0), weight.size(0), *offset.shape[2:]))


@torch.library.register_fake("truncdet::deform_conv2d_backward", lib=LIB)
def _fake_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = zip((input, weight, offset, mask), wanted, strict=True)
    shapes = [x.shape if x is not None and want else (0,) for x, want in tensors]
    return tuple(input.new_empty(shape) for shape in shapes)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, offset, mask, _, *ctx.steps = inputs
    ctx.save_for_backward(input, weight, offset, mask)


def _formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    gradients: tuple[Tensor | None, ...] = (None,) * 4
    if any(wanted):
        backward = torch.ops.truncdet.deform_conv2d_backward
        found = backward(grad, *ctx.saved_tensors, *ctx.steps, wanted)
        gradients = tuple(x if want else None for x, want in zip(found, wanted, strict=True))
    # Contiguous, since another layout may be summed in another order.
    for_bias = grad.contiguous().sum((0, 2, 3)) if ctx.needs_input_grad[4] else None
    return (*gradients, for_bias, None, None, None)


torch.library.register_autograd(
    "truncdet::deform_conv2d", _formula, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::deform_conv2d_backward", without_second_derivative("deform_conv2d"), lib=LIB
)
