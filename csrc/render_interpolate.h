// Interpolation of values at vertices over the pixels of a rasterizer's buffer. With u and v the
// barycentric coordinates of a triangle's first two vertices, w = (1 - u) - v, and a0, a1, a2 an
// attribute at the vertices, a pixel has
//   (u a0 + v a1) + w a2    and, where asked for,    dA/dX = du/dX (a0 - a2) + dv/dX (a1 - a2)
// (dA/dY likewise). Every number here is one written order of single operations.
#pragma once

#include "render_pixel.h"

namespace truncdet {

// More differentiated attributes than this are only known as "all of them".
constexpr int kMaxDiffAttrs = 128;

// Which attributes have differentials, ascending, and where each lies among them.
struct DiffAttrs {
  int64_t count;
  bool all;  // position = attribute
  int32_t attribute[kMaxDiffAttrs], position[kMaxDiffAttrs];
};

// Walks over the attributes in ascending order.
class DiffCursor {
 public:
  TRUNCDET_HD explicit DiffCursor(const DiffAttrs& diff) : diff_(diff) {}
  // Where the differentials of `attribute` lie, or -1 if it has none.
  TRUNCDET_HD int64_t position(int64_t attribute) {
    if (diff_.all) return attribute;
    if (next_ == diff_.count || diff_.attribute[next_] != attribute) return -1;
    return diff_.position[next_++];
  }

 private:
  const DiffAttrs& diff_;
  int next_ = 0;
};

template <class C>
struct InterpolatedPixel {
  C weight[kCorners];
  C db[4];  // du/dX, du/dY, dv/dX, dv/dY; zeros where there are none
};

template <class C>
TRUNCDET_HD InterpolatedPixel<C> interpolated_pixel(const C* rast, const C* rast_db) {
  InterpolatedPixel<C> pixel;
  pixel.weight[0] = rast[0];
  pixel.weight[1] = rast[1];
  pixel.weight[2] = (C(1) - rast[0]) - rast[1];
  for (int i = 0; i < 4; ++i) pixel.db[i] = rast_db != nullptr ? rast_db[i] : C(0);
  return pixel;
}

template <class C>
TRUNCDET_HD C interpolated_value(const InterpolatedPixel<C>& p, C a0, C a1, C a2) {
  return (p.weight[0] * a0 + p.weight[1] * a1) + p.weight[2] * a2;
}
// axis 0: along X, 1: along Y
template <class C>
TRUNCDET_HD C interpolated_slope(const InterpolatedPixel<C>& p, int axis, C a0, C a1, C a2) {
  return p.db[axis] * (a0 - a2) + p.db[2 + axis] * (a1 - a2);
}

// What a pixel adds to the gradient of one attribute at its three vertices. `slopes` are the two
// gradients of the attribute's differentials, or null where it has none.
template <class C>
TRUNCDET_HD void interpolated_contributions(const InterpolatedPixel<C>& p, C grad, const C* slopes,
                                            C* contribution) {
  for (int k = 0; k < kCorners; ++k) contribution[k] = share(p.weight[k], grad);
  if (slopes == nullptr) return;
  const C by_u = share(p.db[0], slopes[0]) + share(p.db[1], slopes[1]);
  const C by_v = share(p.db[2], slopes[0]) + share(p.db[3], slopes[1]);
  contribution[0] = contribution[0] + by_u;
  contribution[1] = contribution[1] + by_v;
  contribution[2] = contribution[2] - (by_u + by_v);
}

// The gradients of u, v and of the four differentials in one pixel: sums over the attributes in
// ascending order.
template <class C>
struct PixelGradient {
  C uv[2] = {C(0), C(0)};
  C db[4] = {C(0), C(0), C(0), C(0)};

  TRUNCDET_HD void add(C grad, const C* slopes, C a0, C a1, C a2) {
    const C along[2] = {a0 - a2, a1 - a2};
    for (int i = 0; i < 2; ++i) {
      uv[i] = uv[i] + grad * along[i];
      if (slopes == nullptr) continue;
      for (int axis = 0; axis < 2; ++axis) {
        db[2 * i + axis] = db[2 * i + axis] + slopes[axis] * along[i];
      }
    }
  }
};

}  // namespace truncdet
