"""interpolate of truncdet.render in plain tensor operations: the definition kernels must meet.

A pixel that shows a triangle with the attribute values a0, a1, a2 at its vertices and barycentric
coordinates u, v, w = (1 - u) - v has

    A     = (u a0 + v a1) + w a2
    dA/dX = du/dX (a0 - a2) + dv/dX (a1 - a2),    dA/dY likewise,

and background has zeros. With g the gradient of A and h, k those of dA/dX and dA/dY, a pixel adds

    u g + s,  v g + t,  w g - (s + t)    with s = du/dX h + du/dY k,  t = dv/dX h + dv/dY k

to the gradient of the attribute at its three vertices: each is one number, rounded to a multiple of
the vertex' scale (see truncdet._render_vertices). A product with a zero is zero there, whatever the
other factor. The gradients of u, v and of the four differentials are complete in one pixel: sums
over the attributes in ascending order of g (a0 - a2), g (a1 - a2), h (a0 - a2) and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truncdet._render_arguments import corners, is_shared
from truncdet._render_vertices import headroom_bits, share, vertex_sums
from truncdet._roi_align_reference import narrow
from truncdet._sticky import RENDER_INTERPOLATE


def _rows(attr: Tensor, rast: Tensor, tri: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where triangles show, the rows of attr at their vertices, and attr as rows."""
    vertices = attr.size(-2)
    shows, named = corners("interpolate", rast, tri, vertices, RENDER_INTERPOLATE)
    if not is_shared(attr, rast.size(0)):
        first = torch.arange(rast.size(0), device=rast.device) * vertices
        named = named + first.reshape(-1, 1, 1, 1)
    return shows, named, attr.flatten(0, -2)


def _at_corners(shows: Tensor, named: Tensor, flat: Tensor) -> list[Tensor]:
    """The attributes [N, H, W, A] at each of the three vertices; zeros in the background."""
    if flat.size(0) == 0:
        return [flat.new_zeros((*shows.shape, flat.size(1)))] * 3
    mask = ~shows.unsqueeze(-1)
    return [flat[named[..., k]].masked_fill(mask, 0) for k in range(3)]


def _weights(rast: Tensor) -> list[Tensor]:
    u, v = rast[..., :1], rast[..., 1:2]
    return [u, v, (1 - u) - v]


def forward(
    attr: Tensor, rast: Tensor, tri: Tensor, rast_db: Tensor | None, diff_attrs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Values [N, H, W, A] and differentials [N, H, W, 2 K] of the K attributes named."""
    shows, named, flat = _rows(attr, rast, tri)
    a = _at_corners(shows, named, flat)
    weights = _weights(rast)
    out = (weights[0] * a[0] + weights[1] * a[1]) + weights[2] * a[2]
    mask = ~shows.unsqueeze(-1)
    out_da = rast.new_zeros((*rast.shape[:3], 2 * len(diff_attrs)))
    if rast_db is not None and len(diff_attrs) > 0:
        chosen = list(diff_attrs)
        along_u, along_v = ((x - a[2])[..., chosen] for x in a[:2])
        for axis in range(2):
            by_u, by_v = rast_db[..., axis, None], rast_db[..., 2 + axis, None]
            out_da[..., axis::2] = narrow(by_u * along_u + by_v * along_v, rast.dtype)
    return narrow(out, rast.dtype).masked_fill(mask, 0), out_da.masked_fill(mask, 0)


def backward(
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
    """Gradients of attr, rast and rast_db; an empty tensor for one that is not asked for."""
    shows, named, flat = _rows(attr, rast, tri)
    chosen = list(diff_attrs)
    attr_gradient, rast_gradient, db_gradient = (attr.new_empty(0) for _ in range(3))
    if for_attr:
        parts = [share(w, grad) for w in _weights(rast)]
        if rast_db is not None and chosen:
            along = [grad_da[..., axis::2] for axis in range(2)]
            by_u, by_v = (
                share(rast_db[..., i, None], along[0]) + share(rast_db[..., i + 1, None], along[1])
                for i in (0, 2)
            )
            parts[0][..., chosen] += by_u
            parts[1][..., chosen] += by_v
            parts[2][..., chosen] -= by_u + by_v
        pixels = rast.shape[1] * rast.shape[2]
        pixels *= rast.size(0) if is_shared(attr, rast.size(0)) else 1
        row = torch.cat([named[..., k][shows] for k in range(3)])
        contribution = torch.cat([part[shows] for part in parts])
        sums = vertex_sums(row, contribution, flat.size(0), headroom_bits(pixels))
        attr_gradient = sums.reshape(attr.shape)
    if for_rast or for_db:
        a = _at_corners(shows, named, flat)
        sides = [a[0] - a[2], a[1] - a[2]]
        # Gradients in the background stay out, whatever they are.
        mask = ~shows.unsqueeze(-1)
        grad, grad_da = grad.masked_fill(mask, 0), grad_da.masked_fill(mask, 0)
        uv = [_sum(grad * side) for side in sides]
        zero = torch.zeros_like(uv[0])
        db = [zero] * 4
        order = sorted(range(len(chosen)), key=lambda i: chosen[i])
        if rast_db is not None and chosen:
            ascending = [chosen[i] for i in order]
            db = [
                _sum(grad_da[..., axis::2][..., order] * side[..., ascending])
                for side in sides
                for axis in range(2)
            ]
        if for_rast:
            rast_gradient = narrow(torch.stack([*uv, zero, zero], -1), rast.dtype)
        if for_db:
            db_gradient = narrow(torch.stack(db, -1), rast.dtype)
    return attr_gradient, rast_gradient, db_gradient


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, in ascending order, from +0."""
    total = x.new_zeros(x.shape[:-1])
    for i in range(x.size(-1)):
        total = total + x[..., i]
    return total
