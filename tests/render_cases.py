"""What the tests of truncdet.render share: meshes, and a small rasterizer whose buffers they use.

The rasterizer is as plain as can be: every triangle at every pixel, in float64. A pixel is sampled
at its centre (half integers), row 0 is the lowest (y = -1), column 0 the leftmost; u and v belong
to the first two vertices; the nearest triangle with -1 <= z/w <= 1 wins, the first among equals.
"""

import pytest
import torch

import truncdet as truncdet  # loads the kernels

each_float = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)

compiled_kernel = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::render_interpolate", "CPU"),
    reason="checks of the compiled kernels",
)


def randn(shape, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def places(height, width, dtype=torch.float64):
    """Centres of the pixels, [H, W, 2] of (x, y)."""
    x = (torch.arange(width, dtype=dtype) * 2 + 1) / width - 1
    y = (torch.arange(height, dtype=dtype) * 2 + 1) / height - 1
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)


def barycentrics(corner, place):
    """Coordinates [..., 3] of places [..., 2] in triangles [..., 3, 4], and their slopes by place.

    A place is a multiple of the mean of (x, y, w) that the coordinates weight: a linear system.
    """
    matrix = corner[..., [0, 1, 3]].transpose(-1, -2)
    ones = torch.ones_like(place[..., :1])
    raw = torch.linalg.solve(matrix, torch.cat([place, ones], -1)[..., None])[..., 0]
    axes = torch.eye(3, dtype=place.dtype)[:, :2].expand(*matrix.shape[:-1], 2)
    slopes = torch.linalg.solve(matrix, axes).transpose(-1, -2)
    total = raw.sum(-1, keepdim=True)
    coordinates = raw / total
    slopes = (slopes - coordinates.unsqueeze(-2) * slopes.sum(-1, keepdim=True)) / total[..., None]
    return coordinates, slopes  # [..., 3], [..., 2, 3]


def buffers(corner, place, height, width):
    """(u, v) and (du/dX, du/dY, dv/dX, dv/dY) of pixels, differentiable by the corners."""
    coordinates, slopes = barycentrics(corner, place)
    by_x, by_y = slopes[..., 0, :] * (2 / width), slopes[..., 1, :] * (2 / height)
    db = [by_x[..., 0], by_y[..., 0], by_x[..., 1], by_y[..., 1]]
    return coordinates[..., :2], torch.stack(db, -1)


def rasterize(pos, tri, resolution, ranges=None):
    """rast and rast_db, both [N, H, W, 4] of pos' dtype.

    pos [N, V, 4], or [V, 4] with `ranges`, for each image its first triangle and their number.
    """
    height, width = resolution
    images = len(pos) if ranges is None else len(ranges)
    rast = torch.zeros(images, height, width, 4, dtype=torch.float64)
    rast_db = torch.zeros_like(rast)
    at = places(height, width)
    for image in range(images):
        vertices = (pos[image] if ranges is None else pos).double()
        first, count = (0, len(tri)) if ranges is None else ranges[image]
        nearest = torch.full((height, width), torch.inf, dtype=torch.float64)
        for number in range(first, first + count):
            corner = vertices[tri[number].long()]
            if corner[:, [0, 1, 3]].det() == 0:
                continue
            corner = corner.expand(height, width, 3, 4)
            coordinates, _ = barycentrics(corner, at)
            depth = (coordinates * corner[..., 2]).sum(-1)
            w = (coordinates * corner[..., 3]).sum(-1)
            z = depth / w
            seen = (coordinates >= 0).all(-1) & (w > 0) & (z.abs() <= 1) & (z < nearest)
            if not seen.any():
                continue
            nearest = torch.where(seen, z, nearest)
            uv, db = buffers(corner[seen], at[seen], height, width)
            rest = torch.stack([z[seen], torch.full_like(z[seen], number + 1)], -1)
            rast[image][seen] = torch.cat([uv, rest], -1)
            rast_db[image][seen] = db
    return rast.to(pos.dtype), rast_db.to(pos.dtype)


def clip(points, depth=2.5):
    """Points [..., 3] seen by a camera on the z axis, as clip-space positions [..., 4]."""
    x, y, z = points.unbind(-1)
    w = depth - z
    return torch.stack([1.6 * x, 1.6 * y, (w - 2) * 0.7, w], -1)


def hills(side, images=2, seed=1):
    """A height field of side x side vertices, another one for every image."""
    line = torch.linspace(-1, 1, side, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    jitter = 0.3 / side * randn((images, side, side, 3), seed=seed)
    jitter[..., 2] += 0.2 * torch.sin(3 * x) * torch.cos(2 * y)
    points = torch.stack([x, y, torch.zeros_like(x)], -1) + jitter
    cells = (torch.arange(side - 1)[:, None] * side + torch.arange(side - 1)).flatten()
    one = torch.stack([cells, cells + 1, cells + side], -1)
    two = torch.stack([cells + 1, cells + side + 1, cells + side], -1)
    tri = torch.stack([one, two], 1).reshape(-1, 3).to(torch.int32)
    return clip(points).reshape(images, -1, 4), tri


def fan(triangles):
    """Triangles around one vertex, the first."""
    angle = torch.arange(triangles, dtype=torch.float64) * (2 * torch.pi / triangles)
    points = torch.stack([angle.cos(), angle.sin(), 0.3 * torch.sin(5 * angle)], -1)
    points = torch.cat([torch.zeros(1, 3, dtype=torch.float64), points])
    number = torch.arange(triangles)
    tri = torch.stack([torch.zeros_like(number), number + 1, (number + 1) % triangles + 1], -1)
    return clip(points)[None], tri.to(torch.int32)


def overlapping(count=9, seed=4):
    """Large triangles through each other, two of them in the same place; some face away."""
    points = randn((1, count, 3, 3), seed=seed) * torch.tensor([0.8, 0.8, 0.4])
    points[:, 1] = points[:, 0]
    return clip(points).reshape(1, -1, 4), torch.arange(3 * count, dtype=torch.int32).reshape(-1, 3)


def degenerate():
    """A triangle among others without area, with one corner three times, and far too near."""
    pos, tri = hills(3, 1)
    extra = torch.tensor([[0, 1, 1], [2, 2, 2], [0, 4, 8]], dtype=torch.int32)
    pos[0, 8] = 2 * pos[0, 4] - pos[0, 0]
    return pos, torch.cat([tri, extra])


MESHES = {
    "hills": (lambda: hills(5), (13, 17)),
    "subpixel": (lambda: hills(24, 1), (9, 8)),
    "one_vertex": (lambda: fan(1000), (24, 24)),
    "overlapping": (overlapping, (11, 7)),
    "degenerate": (degenerate, (12, 10)),
    "one_pixel": (lambda: hills(2, 3), (1, 1)),
    "large": (lambda: fan(3), (37, 35)),
}
each_mesh = pytest.mark.parametrize("mesh", MESHES)

_made = {}


def make_case(mesh, dtype=torch.float32, device="cpu", shared=False):
    """(rast, rast_db, pos, tri); `shared`: two images that see parts of one set of vertices."""
    key = (mesh, dtype, shared)
    if key not in _made:
        build, resolution = MESHES[mesh]
        pos, tri = build()
        pos = pos.to(dtype)
        if shared:
            pos, third = pos[0], len(tri) // 3
            ranges = [(0, len(tri)), (third, len(tri) - third)]
            _made[key] = (*rasterize(pos, tri, resolution, ranges), pos, tri)
        else:
            _made[key] = (*rasterize(pos, tri, resolution), pos, tri)
    return tuple(x.clone().to(device) for x in _made[key])


def shuffle_triangles(rast, tri, seed=0):
    """The same picture with the triangles in another order."""
    order = torch.randperm(len(tri), generator=torch.Generator().manual_seed(seed)).to(tri.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    number = rast[..., 3].long()
    moved = torch.where(number > 0, place[(number - 1).clamp(min=0)] + 1, 0)
    return torch.cat([rast[..., :3], moved[..., None].to(rast.dtype)], -1), tri[order]


def turned(x):
    """The same values with the last dimension outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def shifted(x):
    """Contiguous, but not where a wide load could start."""
    memory = x.new_empty(x.numel() + 1)
    memory[1:] = x.reshape(-1)
    return memory[1:].view(x.shape)
