"""Differentiable rendering that repeats: the gradients behind a rasterizer's buffer.

See docs/render.md. The operators take the buffers of any rasterizer (triangle and barycentric
coordinates of every pixel), and the arguments of `nvdiffrast.torch`.
"""

from truncdet._render_interpolate import interpolate as interpolate
from truncdet._render_rasterize import rasterize_gradient as rasterize_gradient
