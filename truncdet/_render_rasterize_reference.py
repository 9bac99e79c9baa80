"""The gradient of rasterization in plain tensor operations: the definition the kernels must meet.

A vertex has a position (x, y, z, w) in clip space. At the centre (px, py) of a pixel, which lies in
[-1, 1], the vertices of its triangle are seen at x' = x - px w and y' = y - py w. With (i, j, k)
cyclic over the three vertices and

    a_i = x'_j y'_k - y'_j x'_k,    S = (a_0 + a_1) + a_2,    r = 1 / S

the perspective-correct barycentric coordinates are u = a_0 r and v = a_1 r. The edge functions a_i
are affine in the place, with the slopes

    B_i = d a_i / d px = y'_j w_k - w_j y'_k,    C_i = d a_i / d py = w_j x'_k - x'_j w_k

so that du/dX = (2 / W) (B_0 - u (B_0 + B_1 + B_2)) r, and so on for v, and for Y with C and H. What
comes in are gradients of u, v and, where there are differentials, of these four; the rest is the
chain rule back to x', y' and w, from where w gets -(px d/dx' + py d/dy') as well. z gets nothing.

The nine numbers a pixel adds to its vertices are each rounded to a multiple of the vertex' scale
(see truncdet._render_vertices). u and v are those of the positions, not the buffer's. A pixel whose
incoming gradients are all zero adds nothing, nor does one whose triangle has no area there: with
|S| below the smallest normal number there are no barycentric coordinates.

Homogeneous edge functions: Olano and Greer, "Triangle Scan Conversion using 2D Homogeneous
Coordinates", Graphics Hardware 1997.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import fixedpoint as fp
from truncdet._render_arguments import corners, is_shared
from truncdet._render_vertices import headroom_bits, vertex_sums
from truncdet._sticky import RASTERIZE_GRADIENT

XYW = (0, 1, 3)


def _place(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Centres of the pixels along an axis, and how they change with the pixel."""
    number = torch.arange(size, device=like.device) * 2 + 1
    # A tensor, since on CUDA a division by a number is a multiplication by its reciprocal.
    sizes = torch.full((size,), size, dtype=like.dtype, device=like.device)
    return number.to(like.dtype) / sizes - 1, 2 / sizes


def backward(
    grad: Tensor | None, grad_db: Tensor | None, rast: Tensor, pos: Tensor, tri: Tensor
) -> Tensor:
    """The gradient of pos from those of rast and rast_db; None is zeros."""
    vertices, images = pos.size(-2), rast.size(0)
    shows, named = corners("rasterize_gradient", rast, tri, vertices, RASTERIZE_GRADIENT)
    shared = is_shared(pos, images)
    if not shared:
        named = named + (torch.arange(images, device=rast.device) * vertices).reshape(-1, 1, 1, 1)
    if grad is None:
        grad = torch.zeros_like(rast)
    asked = (grad[..., :2] != 0).any(-1)
    if grad_db is not None:
        asked = asked | (grad_db != 0).any(-1)
    shows = shows & asked

    def pixels(of_axis: Tensor, view: tuple[int, ...]) -> Tensor:
        return of_axis.reshape(view).expand(shows.shape)[shows]

    x_places, y_places = _place(rast.size(2), rast), _place(rast.size(1), rast)
    px, step_x = (pixels(part, (1, 1, -1)) for part in x_places)
    py, step_y = (pixels(part, (1, -1, 1)) for part in y_places)
    rows = named[shows]
    at = pos.reshape(-1, 4)[rows]  # [K, 3, 4]
    db = None if grad_db is None else grad_db[shows]
    if db is not None:
        db = db * torch.stack([step_x, step_y, step_x, step_y], -1)
    parts, adds = contributions(at, px, py, grad[shows], db)
    count = rast.size(1) * rast.size(2) * (images if shared else 1)
    flat, moved = rows[adds].reshape(-1), parts[adds].reshape(-1, 3)
    # z as well, so that the row of a vertex is one segment.
    whole = moved.new_zeros(len(moved), 4)
    whole[:, list(XYW)] = moved
    sums = vertex_sums(flat, whole, pos.numel() // 4, headroom_bits(count))
    return sums.reshape(pos.shape)


def contributions(
    at: Tensor, px: Tensor, py: Tensor, grad: Tensor, db: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What K pixels add to x, y, w of their vertices, [K, 3, 3], and which of them do, [K].

    `at` are the positions [K, 3, 4], (px, py) the centres, `grad` [K, 2 or more] the gradients of u
    and v, `db` [K, 4] those of the four slopes by px and py.
    """
    w = [at[:, i, 3] for i in range(3)]
    x = [at[:, i, 0] - px * w[i] for i in range(3)]
    y = [at[:, i, 1] - py * w[i] for i in range(3)]
    cyclic = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    a = [x[j] * y[k] - y[j] * x[k] for _, j, k in cyclic]
    area = (a[0] + a[1]) + a[2]
    adds = fp.magnitude(area) >= 1 << fp.FORMATS[area.dtype].fraction_bits
    area = torch.where(adds, area, 1)
    r = torch.ones_like(area) / area
    u, v = a[0] * r, a[1] * r
    gu, gv = grad[:, 0], grad[:, 1]
    common = torch.zeros_like(gu)
    if db is not None:
        b = [y[j] * w[k] - w[j] * y[k] for _, j, k in cyclic]
        c = [w[j] * x[k] - x[j] * w[k] for _, j, k in cyclic]
        sum_b, sum_c = (b[0] + b[1]) + b[2], (c[0] + c[1]) + c[2]
        ux, uy, vx, vy = db.unbind(-1)
        by_u = ux * ((b[0] - u * sum_b) * r) + uy * ((c[0] - u * sum_c) * r)
        by_v = vx * ((b[1] - v * sum_b) * r) + vy * ((c[1] - v * sum_c) * r)
        common = -((by_u + by_v) * r)
        gu = gu - (ux * sum_b + uy * sum_c) * r
        gv = gv - (vx * sum_b + vy * sum_c) * r
        mean_x, mean_y = ux * u + vx * v, uy * u + vy * v
        slope_x = [(ux - mean_x) * r, (vx - mean_x) * r, -(mean_x * r)]
        slope_y = [(uy - mean_y) * r, (vy - mean_y) * r, -(mean_y * r)]
    mean = gu * u + gv * v
    edge = [(gu - mean) * r + common, (gv - mean) * r + common, common - mean * r]
    parts = []
    for _, i, k in cyclic:
        along_x = edge[k] * y[i] - edge[i] * y[k]
        along_y = edge[i] * x[k] - edge[k] * x[i]
        depth = torch.zeros_like(along_x)
        if db is not None:
            along_x = along_x + (slope_y[i] * w[k] - slope_y[k] * w[i])
            along_y = along_y + (slope_x[k] * w[i] - slope_x[i] * w[k])
            turned = slope_y[k] * x[i] - slope_y[i] * x[k]
            depth = (slope_x[i] * y[k] - slope_x[k] * y[i]) + turned
        parts.append(torch.stack([along_x, along_y, depth - (px * along_x + py * along_y)], -1))
    return torch.stack(parts, 1), adds
