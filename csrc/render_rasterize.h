// The gradient of rasterization: from a pixel's barycentric coordinates, and their differentials by
// the pixel's place, to the clip-space positions (x, y, z, w) of its triangle's vertices.
//
// At the centre (px, py) of a pixel, in [-1, 1], let x'_i = x_i - px w_i and y'_i = y_i - py w_i.
// With (i, j, k) cyclic, the edge functions are a_i = x'_j y'_k - y'_j x'_k, and the
// perspective-correct coordinates u = a_0 / S, v = a_1 / S with S = a_0 + a_1 + a_2. The edge
// functions are affine in the place, with the slopes B_i = d a_i / d px = y'_j w_k - w_j y'_k and
// C_i = d a_i / d py = w_j x'_k - x'_j w_k, so du/dX = 2/W (B_0 - u sum B) / S, and so on.
// What follows is the chain rule through these, in one written order of single operations.
#pragma once

#include "render_pixel.h"

namespace truncdet {

// A position has four values, of which z has no gradient.
constexpr int kPositionSize = 4, kMoved = 3;
TRUNCDET_HD int moved_component(int m) { return m == 2 ? 3 : m; }  // x, y, w

// One axis of a pixel's place: the centre in [-1, 1], and how it changes with the pixel.
template <class C>
struct PixelPlace {
  C at, step;
};
template <class C>
TRUNCDET_HD PixelPlace<C> pixel_place(int64_t index, int64_t size) {
  return {static_cast<C>(2 * index + 1) / static_cast<C>(size) - C(1), C(2) / static_cast<C>(size)};
}

// The incoming gradients of one pixel.
template <class C>
struct RasterGradient {
  C uv[2];
  C db[4];  // of du/dX, du/dY, dv/dX, dv/dY
  bool any_db;

  // Pixels that nobody asks for give nothing, whatever their triangle looks like.
  TRUNCDET_HD bool is_zero() const {
    bool zero = uv[0] == C(0) && uv[1] == C(0);
    for (int i = 0; any_db && i < 4; ++i) zero = zero && db[i] == C(0);
    return zero;
  }
};

// What a pixel adds to the gradients of x, y and w at each of its three vertices, whose positions
// are rows of `position`. False if it adds nothing: a triangle that has no area, seen from this
// pixel, has no barycentric coordinates.
template <class C>
TRUNCDET_HD bool raster_contributions(const C (&position)[kCorners][kPositionSize],
                                      const PixelPlace<C>& px, const PixelPlace<C>& py,
                                      const RasterGradient<C>& grad,
                                      C (&contribution)[kCorners][kMoved]) {
  C x[kCorners], y[kCorners], w[kCorners], a[kCorners];
  for (int i = 0; i < kCorners; ++i) {
    w[i] = position[i][3];
    x[i] = position[i][0] - px.at * w[i];
    y[i] = position[i][1] - py.at * w[i];
  }
  for (int i = 0; i < kCorners; ++i) {
    const int j = (i + 1) % 3, k = (i + 2) % 3;
    a[i] = x[j] * y[k] - y[j] * x[k];
  }
  const C area = (a[0] + a[1]) + a[2];
  // From the word, so that no denormal mode plays a part: below it 1 / area may overflow.
  const auto smallest = typename Format<C>::Word(1) << fraction_bits<C>();
  if (magnitude_word<C>(area) < smallest) return false;
  const C r = C(1) / area, u = a[0] * r, v = a[1] * r;

  C gu = grad.uv[0], gv = grad.uv[1], common = C(0);
  C slope_x[kCorners] = {}, slope_y[kCorners] = {};  // gradients of B and C
  if (grad.any_db) {
    C b[kCorners], c[kCorners];
    for (int i = 0; i < kCorners; ++i) {
      const int j = (i + 1) % 3, k = (i + 2) % 3;
      b[i] = y[j] * w[k] - w[j] * y[k];
      c[i] = w[j] * x[k] - x[j] * w[k];
    }
    const C sum_b = (b[0] + b[1]) + b[2], sum_c = (c[0] + c[1]) + c[2];
    const C ux = grad.db[0] * px.step, uy = grad.db[1] * py.step;
    const C vx = grad.db[2] * px.step, vy = grad.db[3] * py.step;
    const C by_u = ux * ((b[0] - u * sum_b) * r) + uy * ((c[0] - u * sum_c) * r);
    const C by_v = vx * ((b[1] - v * sum_b) * r) + vy * ((c[1] - v * sum_c) * r);
    common = -((by_u + by_v) * r);
    gu = gu - (ux * sum_b + uy * sum_c) * r;
    gv = gv - (vx * sum_b + vy * sum_c) * r;
    const C mean_x = ux * u + vx * v, mean_y = uy * u + vy * v;
    slope_x[0] = (ux - mean_x) * r;
    slope_x[1] = (vx - mean_x) * r;
    slope_x[2] = -(mean_x * r);
    slope_y[0] = (uy - mean_y) * r;
    slope_y[1] = (vy - mean_y) * r;
    slope_y[2] = -(mean_y * r);
  }
  const C mean = gu * u + gv * v;
  const C edge[kCorners] = {(gu - mean) * r + common, (gv - mean) * r + common, common - mean * r};
  for (int m = 0; m < kCorners; ++m) {
    const int i = (m + 1) % 3, k = (m + 2) % 3;
    C along_x = edge[k] * y[i] - edge[i] * y[k];
    C along_y = edge[i] * x[k] - edge[k] * x[i];
    C depth = C(0);
    if (grad.any_db) {
      along_x = along_x + (slope_y[i] * w[k] - slope_y[k] * w[i]);
      along_y = along_y + (slope_x[k] * w[i] - slope_x[i] * w[k]);
      depth = (slope_x[i] * y[k] - slope_x[k] * y[i]) + (slope_y[k] * x[i] - slope_y[i] * x[k]);
    }
    contribution[m][0] = along_x;
    contribution[m][1] = along_y;
    contribution[m][2] = depth - (px.at * along_x + py.at * along_y);
  }
  return true;
}

inline RenderShape rasterize_shape(const std::optional<Tensor>& grad,
                                   const std::optional<Tensor>& grad_db, const Tensor& rast,
                                   const Tensor& pos, const Tensor& tri) {
  const RenderShape shape = render_shape("rasterize_gradient", rast, tri, pos);
  TRUNCDET_CHECK(shape.components == kPositionSize,
                 "rasterize_gradient: pos must have 4 values a vertex");
  if (grad.has_value()) check_beside("rasterize_gradient", "grad", *grad, rast, 4);
  if (grad_db.has_value()) check_beside("rasterize_gradient", "grad_db", *grad_db, rast, 4);
  return shape;
}

}  // namespace truncdet
