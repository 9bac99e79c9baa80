"""Arguments that the operators of truncdet.render share: what is allowed, and what pixels name.

A buffer of a rasterizer has in every pixel (u, v, z/w, triangle + 1), 0 for background; u and v are
the barycentric coordinates of the triangle's first and second vertex.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truncdet import _sticky

FLOATS = (torch.float32, torch.float64)

MAX_TRIANGLES = {torch.float32: 1 << 24, torch.float64: 1 << 31}
"""Beyond these a triangle's number plus one is no float of this type, or no int32."""


def check_tensor(op: str, name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    return x


def check_float(op: str, name: str, x: object) -> Tensor:
    tensor = check_tensor(op, name, x)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be float32 or float64, got {tensor.dtype}")
    return tensor


def check_like(op: str, name: str, x: object, other: str, like: Tensor) -> Tensor:
    """A floating tensor of the dtype and on the device of `like`."""
    tensor = check_float(op, name, x)
    if tensor.dtype != like.dtype:
        raise TypeError(f"{op}: {name} must have {other}'s dtype, {like.dtype}, got {tensor.dtype}")
    check_device(op, name, tensor, other, like)
    return tensor


def check_device(op: str, name: str, x: Tensor, other: str, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(f"{op}: {name} must be on {other}'s device, {like.device}, got {x.device}")


def check_rast(op: str, rast: object, name: str = "rast") -> Tensor:
    """A buffer of pixels, [N, H, W, 4]."""
    tensor = check_float(op, name, rast)
    if tensor.dim() != 4 or tensor.size(3) != 4:
        raise ValueError(f"{op}: {name} must have shape [N, H, W, 4], got {list(tensor.shape)}")
    return tensor


def check_rast_db(op: str, rast_db: object, rast: Tensor) -> Tensor:
    """The differentials of a buffer: of its very shape."""
    tensor = check_like(op, "rast_db", rast_db, "rast", rast)
    if tensor.shape != rast.shape:
        raise ValueError(
            f"{op}: rast_db must have rast's shape, {list(rast.shape)}, got {list(tensor.shape)}"
        )
    return tensor


def check_triangles(op: str, tri: object, like: Tensor, other: str = "rast") -> Tensor:
    """Triangles, [T, 3] of int32, on the device of `like`."""
    tensor = check_tensor(op, "tri", tri)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{op}: tri must be int32, got {tensor.dtype}")
    if tensor.dim() != 2 or tensor.size(1) != 3:
        raise ValueError(f"{op}: tri must have shape [T, 3], got {list(tensor.shape)}")
    most = MAX_TRIANGLES[like.dtype]
    if tensor.size(0) >= most:
        raise ValueError(
            f"{op}: tri must have fewer than {most} triangles beside {like.dtype}, "
            f"got {tensor.size(0)}"
        )
    check_device(op, "tri", tensor, other, like)
    return tensor


def check_vertices(op: str, name: str, x: object, rast: Tensor, width: int | None = None) -> Tensor:
    """Values at vertices: [V, width] or [1, V, width] for all images, or [N, V, width]."""
    tensor = check_like(op, name, x, "rast", rast)
    last = "A" if width is None else str(width)
    right = tensor.dim() in (2, 3) and (width is None or tensor.size(-1) == width)
    if not right or (tensor.dim() == 3 and tensor.size(0) not in (1, rast.size(0))):
        raise ValueError(
            f"{op}: {name} must have shape [V, {last}], [1, V, {last}] or "
            f"[{rast.size(0)}, V, {last}], got {list(tensor.shape)}"
        )
    if tensor.size(-2) >= 1 << 31:
        raise ValueError(f"{op}: {name} must have fewer than 2^31 vertices, got {tensor.size(-2)}")
    return tensor


def is_shared(vertices: Tensor, images: int) -> bool:
    """Whether every image has the same vertices, so that a row of them is in all images."""
    return vertices.dim() == 2 or (vertices.size(0) == 1 and images != 1)


def corners(
    op: str, rast: Tensor, tri: Tensor, vertices: int, sticky: int = 0
) -> tuple[Tensor, Tensor]:
    """Which pixels show a triangle, [N, H, W], and its three vertices there, [N, H, W, 3] int64.

    A number that names no triangle, and a triangle with a vertex that does not exist, raise on the
    CPU; elsewhere the pixel is background and the operator's bit `sticky` is noted.
    """
    number = rast[..., 3]
    # Written so that NaN is no triangle.
    known = (number >= 0) & (number <= tri.size(0)) & (number == number.trunc())
    shows = known & (number > 0)
    if tri.size(0) == 0:
        named = number.new_zeros((*number.shape, 3), dtype=torch.int64)
    else:
        named = tri.to(torch.int64)[number.masked_fill(~shows, 1).to(torch.int64) - 1]
    there = ((named >= 0) & (named < vertices)).all(-1)
    if rast.is_cpu:
        _raise_unknown(op, number[~known], tri.size(0))
        bad = named[shows & ~there].flatten()
        bad = bad[(bad < 0) | (bad >= vertices)]
        if bad.numel() > 0:
            raise ValueError(f"{op}: tri must name vertices in [0, {vertices}), got {int(bad[0])}")
    elif sticky != 0:
        _sticky.note_out_of_range(sticky, ~known | (shows & ~there))
    shows = shows & there
    return shows, named.masked_fill(~shows.unsqueeze(-1), 0)


def _raise_unknown(op: str, bad: Tensor, triangles: int) -> None:
    if bad.numel() > 0:
        raise ValueError(
            f"{op}: rast must have whole numbers in [0, {triangles}] as triangles, "
            f"got {bad[0].item()}"
        )


def given_rast_db(op: str, rast_db: object, rast: Tensor) -> Tensor | None:
    """Checked differentials, or None where there are none: None, or a last dimension of 0."""
    if rast_db is None or (isinstance(rast_db, Tensor) and rast_db.shape == (*rast.shape[:3], 0)):
        return None
    return check_rast_db(op, rast_db, rast)
