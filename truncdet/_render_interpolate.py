"""interpolate of truncdet.render, whose gradient repeats bit for bit: schema, autograd, function.

The maths and the plain-tensor reference are in _render_interpolate_reference.py, the kernels in
csrc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truncdet import _render_arguments as arguments
from truncdet import _render_interpolate_reference as reference
from truncdet._library import LIB
from truncdet._refusals import without_second_derivative
from truncdet._sticky import raise_pending

_INPUTS = "Tensor attr, Tensor rast, Tensor tri, Tensor? rast_db, int[] diff_attrs"
for _schema in (
    f"render_interpolate({_INPUTS}) -> (Tensor, Tensor)",
    f"render_interpolate_backward(Tensor grad, Tensor grad_da, {_INPUTS}, "
    "bool for_attr, bool for_rast, bool for_db) -> (Tensor, Tensor, Tensor)",
):
    LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("render_interpolate", reference.forward, "CompositeExplicitAutograd")
LIB.impl("render_interpolate_backward", reference.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("truncdet::render_interpolate", lib=LIB)
def _fake_forward(
    attr: Tensor, rast: Tensor, tri: Tensor, rast_db: Tensor | None, diff_attrs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    pixels = rast.shape[:3]
    return rast.new_empty((*pixels, attr.size(-1))), rast.new_empty((*pixels, 2 * len(diff_attrs)))


@torch.library.register_fake("truncdet::render_interpolate_backward", lib=LIB)
def _fake_backward(
    grad: Tensor,
    grad_da: Tensor,
    attr: Tensor,
    rast: Tensor,
    tri: Tensor,
    rast_db: Tensor | None,
    diff_attrs: Sequence[int],
    for_attr: bool,
    for_rast: bool,
    for_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        attr.new_empty(attr.shape if for_attr else (0,)),
        rast.new_empty(rast.shape if for_rast else (0,)),
        rast.new_empty(rast.shape if for_db else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    attr, rast, tri, rast_db, ctx.diff_attrs = inputs
    ctx.save_for_backward(attr, rast, tri, rast_db)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_da: Tensor | None) -> tuple[Tensor | None, ...]:
    attr, rast, tri, rast_db = ctx.saved_tensors
    if grad is None and grad_da is None:
        return None, None, None, None, None
    if grad is None:
        grad = rast.new_zeros((*rast.shape[:3], attr.size(-1)))
    # Differentials that nobody used add nothing, so they need not be looked at.
    diff_attrs = ctx.diff_attrs if grad_da is not None else []
    if grad_da is None:
        grad_da = rast.new_empty((*rast.shape[:3], 0))
    for_attr, for_rast, _, for_db, _ = ctx.needs_input_grad
    found = torch.ops.truncdet.render_interpolate_backward(
        *(grad, grad_da, attr, rast, tri, rast_db, diff_attrs, for_attr, for_rast, for_db)
    )
    kept = [g if w else None for g, w in zip(found, (for_attr, for_rast, for_db), strict=True)]
    return kept[0], kept[1], None, kept[2], None


torch.library.register_autograd(
    "truncdet::render_interpolate", _backward, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(
    "truncdet::render_interpolate_backward", without_second_derivative("interpolate"), lib=LIB
)


def interpolate(
    attr: Tensor,
    rast: Tensor,
    tri: Tensor,
    rast_db: Tensor | None = None,
    diff_attrs: Sequence[int] | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Interpolates values at vertices over the pixels of a rasterizer's buffer; gradients repeat.

    Takes the arguments of `nvdiffrast.torch.interpolate`; the buffer may be of any rasterizer. The
    gradient of `attr` is accumulated in fixed point with a scale for each vertex (docs/render.md;
    `truncdet.fixedpoint`), those of `rast` and `rast_db` are complete in one pixel: the same
    bits run to run, on CPU and GPU, whatever the order of triangles and pixels.

    Example:
        >>> rast = torch.tensor([0.25, 0.25, 0.0, 1.0]).reshape(1, 1, 1, 4)  # u, v, z/w, triangle
        >>> tri = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        >>> attr = torch.tensor([[4.0], [8.0], [2.0]])
        >>> truncdet.render.interpolate(attr, rast, tri)[0]
        tensor([[[[4.]]]])

    Args:
        attr: [V, A] or [1, V, A] for all images, or [N, V, A]; float32 or float64.
        rast: [N, H, W, 4] of (u, v, z/w, triangle + 1), 0 for background, of attr's dtype; u and v
            are the barycentric coordinates of a triangle's first two vertices.
        tri: [T, 3], int32: the vertices of each triangle.
        rast_db: [N, H, W, 4] of (du/dX, du/dY, dv/dX, dv/dY), X and Y in pixels; None, or a last
            dimension of 0, if there are none.
        diff_attrs: the attributes whose differentials are wanted, each at most once, or 'all';
            needs `rast_db`.

    Returns:
        Values [N, H, W, A], and differentials [N, H, W, 2 K] of the K attributes named: dA/dX,
        dA/dY of the first one, and so on. Background has zeros. With S the exact sum of the
        contributions to one cell of attr's gradient, n their number, m the largest finite magnitude
        of a contribution to this vertex and G = ceil(log2(3 P)), P being the pixels of an image, or
        of all where they share attr: |R - S| <= n * m * 2^(G - 62) + 2^-24 |R| for float32; for
        float64 n * m * 2^(2 G - 124) + 2^-53 |R|.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a shape, a device or a name does not fit; on the CPU, a pixel names a triangle,
            or a triangle a vertex, that there is not.
        TruncdetError: an earlier call met such a pixel on a GPU (it counts as background; see
            `truncdet.check`), or a second derivative is asked for.

    Formula: Laine et al., "Modular Primitives for High-Performance Differentiable Rendering", ACM
    Trans. Graphics 39(6), 2020, section 3.4.
    """
    raise_pending()
    rast = arguments.check_rast("interpolate", rast)
    attr = arguments.check_vertices("interpolate", "attr", attr, rast)
    tri = arguments.check_triangles("interpolate", tri, rast)
    rast_db = arguments.given_rast_db("interpolate", rast_db, rast)
    chosen = _attributes(diff_attrs, attr.size(-1), rast_db)
    result: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling():
        result = torch.ops.truncdet.render_interpolate(attr, rast, tri, rast_db, chosen)
        return result
    try:
        result = torch.ops.truncdet.render_interpolate(attr, rast, tri, rast_db, chosen)
    except RuntimeError:
        # The compiled kernel can only raise a RuntimeError.
        if rast.is_cpu:
            arguments.corners("interpolate", rast, tri, attr.size(-2))
        raise
    return result


def _attributes(given: object, attributes: int, rast_db: Tensor | None) -> list[int]:
    """The numbers of the attributes with differentials."""
    if given is None:
        return []
    if rast_db is None:
        raise ValueError("interpolate: rast_db must be given where diff_attrs is")
    if isinstance(given, str):
        if given != "all":
            raise ValueError(f"interpolate: diff_attrs must be a list or 'all', got {given!r}")
        return list(range(attributes))
    if not isinstance(given, Sequence) or not all(isinstance(i, int) for i in given):
        raise TypeError(f"interpolate: diff_attrs must be a list of int or 'all', got {given!r}")
    chosen = list(given)
    bad = [i for i in chosen if not 0 <= i < attributes]
    if bad:
        raise ValueError(f"interpolate: diff_attrs must be in [0, {attributes}), got {bad[0]}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"interpolate: diff_attrs must name an attribute once, got {chosen}")
    return chosen
