"""The gradient of rasterization for any rasterizer's buffer: schema, autograd, public function.

The maths and the plain-tensor reference are in _render_rasterize_reference.py, the kernels in
csrc. The forward is the identity, without a copy; so it is a function of autograd's, and only the
backward is an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truncdet import _render_arguments as arguments
from truncdet import _render_rasterize_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._sticky import raise_pending

LIB.define(
    "render_rasterize_backward(Tensor? grad, Tensor? grad_db, Tensor rast, Tensor pos, "
    "Tensor tri) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIB.impl("render_rasterize_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::render_rasterize_backward", lib=LIB)
def _fake_backward(
    grad: Tensor | None, grad_db: Tensor | None, rast: Tensor, pos: Tensor, tri: Tensor
) -> Tensor:
    return pos.new_empty(pos.shape)


torch.library.register_autograd(
    "truncdet::render_rasterize_backward", without_second_derivative("rasterize_gradient"), lib=LIB
)


class _Attach(torch.autograd.Function):
    """Buffers as they are, whose gradients go to the positions."""

    @staticmethod
    def forward(
        ctx: Any, rast: Tensor, pos: Tensor, tri: Tensor, rast_db: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rast, pos, tri)
        ctx.set_materialize_grads(False)
        if rast_db is None:
            return rast.detach(), rast.new_empty((*rast.shape[:3], 0))
        return rast.detach(), rast_db.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_db = grads
        rast, pos, tri = ctx.saved_tensors
        if grad_db is not None and grad_db.size(3) == 0:
            grad_db = None
        if grad is None and grad_db is None:
            return None, None, None, None
        backward = torch.ops.truncdet.render_rasterize_backward
        return None, backward(grad, grad_db, rast, pos, tri), None, None


def rasterize_gradient(
    rast: Tensor, pos: Tensor, tri: Tensor, rast_db: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attaches the gradient of rasterization to a rasterizer's buffer; its bits repeat.

    The buffer, of any rasterizer, is returned as it is; what is new is that gradients of the
    barycentric coordinates, and of their differentials, reach the positions of the vertices. They
    are accumulated in fixed point with a scale for each vertex (see docs/render.md and
    `truncdet.fixedpoint`): the same bits run to run, on CPU and GPU, whatever the order of
    triangles and pixels.

    Example:
        >>> pos = torch.tensor([[-1.0, -1, 0, 1], [3, -1, 0, 1], [-1, 3, 0, 1]], requires_grad=True)
        >>> tri = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        >>> seen = torch.tensor([0.5, 0.25, 0.0, 1.0]).reshape(1, 1, 1, 4)  # one pixel: the origin
        >>> rast, _ = truncdet.render.rasterize_gradient(seen, pos, tri)
        >>> rast[..., 0].sum().backward()  # u, the first vertex' coordinate
        >>> pos.grad[0]
        tensor([0.1250, 0.1250, 0.0000, 0.0000])

    Args:
        rast: [N, H, W, 4] of (u, v, z/w, triangle + 1), 0 for background; float32 or float64. Data:
            it gets no gradient. Row 0 is the lowest, y = -1 in clip space after the division by w,
            and column 0 the leftmost; pixels are sampled at their centres.
        pos: [V, 4] or [1, V, 4] for all images, or [N, V, 4]: (x, y, z, w) in clip space, of rast's
            dtype.
        tri: [T, 3], int32: the vertices of each triangle.
        rast_db: [N, H, W, 4] of (du/dX, du/dY, dv/dX, dv/dY), X and Y in pixels; None, or a last
            dimension of 0, if there are none.

    Returns:
        `rast`, and `rast_db` or [N, H, W, 0] where there is none: the same memory. With S the exact
        sum of the contributions to one cell of pos' gradient, n their number, m the largest finite
        magnitude of a contribution to this vertex and G = ceil(log2(3 P)), P being the pixels of an
        image, or of all where they share pos: |R - S| <= n * m * 2^(G - 62) + 2^-24 |R| for
        float32; for float64 n * m * 2^(2 G - 124) + 2^-53 |R|. z/w and the triangle send nothing,
        and the z of pos receives nothing.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a shape or a device does not fit; on the CPU, a pixel names a triangle, or a
            triangle a vertex, that there is not.
        TruncdetError: an earlier call met such a pixel on a GPU (it counts as background; see
            `truncdet.check`), or a second derivative is asked for.

    Formula: Laine et al., "Modular Primitives for High-Performance Differentiable Rendering", ACM
    Trans. Graphics 39(6), 2020, section 3.3; written out in `_render_rasterize_reference.py`.
    """
    raise_pending()
    rast = arguments.check_rast("rasterize_gradient", rast)
    pos = arguments.check_vertices("rasterize_gradient", "pos", pos, rast, 4)
    tri = arguments.check_triangles("rasterize_gradient", tri, rast)
    rast_db = arguments.given_rast_db("rasterize_gradient", rast_db, rast)
    if rast.is_cpu and not torch.compiler.is_compiling():
        arguments.corners("rasterize_gradient", rast, tri, pos.size(-2))
    result: tuple[Tensor, Tensor] = _Attach.apply(rast, pos, tri, rast_db)
    return result
