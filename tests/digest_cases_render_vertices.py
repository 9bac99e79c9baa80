"""The digest cases of truncdet.render's interpolate and rasterize_gradient.

The buffers are formulas as well, not those of the tests' rasterizer, whose linear systems another
library may solve with other bits: any triangle and coordinates in any pixel will do.
"""

import torch
from roi_cases import hashed_words, values

from truncdet import render

DTYPES = (torch.float32, torch.float64)
TRIANGLES, VERTICES, ATTRIBUTES = 60, 40, 5
PIXELS = (2, 21, 37)


def buffers(dtype, device):
    """(rast, rast_db, tri); runs of four pixels in a row show the same triangle, some none."""
    rast = values((*PIXELS, 4), 11, dtype, device, spread=2)
    count = PIXELS[0] * PIXELS[1] * PIXELS[2]
    words = hashed_words(count, 12).astype("int64")
    number = torch.from_numpy(words)[torch.arange(count) // 4 * 4] % (TRIANGLES + 1)
    rast[..., 3] = number.reshape(PIXELS).to(device=device, dtype=dtype)
    corner = torch.from_numpy(hashed_words(3 * TRIANGLES, 13).astype("int64")) % VERTICES
    tri = corner.reshape(-1, 3).to(device=device, dtype=torch.int32)
    return rast, values((*PIXELS, 4), 14, dtype, device), tri


def render_vertices_cases(named, short):
    """Registers the cases with `named`; `short` names a dtype."""
    for dtype in DTYPES:
        for kind, lead in {"instanced": (2,), "shared": ()}.items():
            _add_interpolate(named, f"render/interpolate/{kind}/{short(dtype)}", dtype, lead)
            _add_rasterize(named, f"render/rasterize/{kind}/{short(dtype)}", dtype, lead, kind)


def _add_interpolate(named, name, dtype, lead):
    @named(name)
    def run(device):
        rast, db, tri = buffers(dtype, device)
        attr = values((*lead, VERTICES, ATTRIBUTES), 15, dtype, device)
        leaves = [x.requires_grad_() for x in (attr, rast, db)]
        out = render.interpolate(attr, rast, tri, db, [4, 0, 1])
        grads = [values(x.shape, 16 + i, dtype, device, spread=20) for i, x in enumerate(out)]
        grads[0][0, 0, :3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, grads)]


def _add_rasterize(named, name, dtype, lead, kind):
    @named(name)
    def run(device):
        rast, db, tri = buffers(dtype, device)
        pos = values((*lead, VERTICES, 4), 18, dtype, device).requires_grad_()
        # With differentials and without.
        given = db if kind == "instanced" else None
        out = render.rasterize_gradient(rast, pos, tri, given)
        grads = [values(x.shape, 19 + i, dtype, device, spread=20) for i, x in enumerate(out)]
        used = 2 if given is not None else 1
        return list(torch.autograd.grad(out[:used], pos, grads[:used]))
