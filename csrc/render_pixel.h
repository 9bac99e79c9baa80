// What the pixels of a rasterizer's buffer name: a triangle and its vertices. Shared by the
// operators that send gradients from pixels to vertices.
#pragma once

#include "accumulate.h"
#include "checks.h"

namespace truncdet {

constexpr int kCorners = 3;

// One side of a call: pixels of images, triangles, and rows of values at vertices.
struct RenderShape {
  int64_t images, height, width;
  int64_t triangles, vertices;
  int64_t components;  // values in the row of a vertex
  bool shared;         // one set of vertices for all images

  TRUNCDET_HD int64_t image_pixels() const { return height * width; }
  TRUNCDET_HD int64_t pixels() const { return images * image_pixels(); }
  TRUNCDET_HD int64_t rows() const { return shared ? vertices : images * vertices; }
  TRUNCDET_HD int64_t first_row(int64_t image) const { return shared ? 0 : image * vertices; }
  int64_t cells() const { return rows() * components; }
  // A pixel gives a row at most three contributions, where the triangle's corners are one vertex;
  // each is at most the row's own maximum.
  int headroom_bits() const { return headroom(kCorners * (shared ? pixels() : image_pixels())); }
};

enum class Shown { kNothing, kTriangle, kUnknownTriangle, kUnknownVertex };

// The vertices of the triangle a pixel shows; `number` is the triangle's plus one. Written so that
// NaN is unknown.
template <class C>
TRUNCDET_HD Shown find_corners(C number, const int32_t* triangles, const RenderShape& s,
                               int32_t* corner) {
  if (!(number >= C(0) && number <= static_cast<C>(s.triangles))) return Shown::kUnknownTriangle;
  const int64_t whole = static_cast<int64_t>(number);
  if (static_cast<C>(whole) != number) return Shown::kUnknownTriangle;
  if (whole == 0) return Shown::kNothing;
  bool known = true;
  for (int k = 0; k < kCorners; ++k) {
    corner[k] = triangles[(whole - 1) * kCorners + k];
    known = known && corner[k] >= 0 && corner[k] < s.vertices;
  }
  return known ? Shown::kTriangle : Shown::kUnknownVertex;
}

inline const char* text_of(Shown shown) {
  return shown == Shown::kUnknownTriangle ? ": rast must have whole numbers in [0, T] as triangles"
                                          : ": tri must name vertices that there are";
}

// A factor of a contribution times another. A zero leaves nothing of whatever it meets: a
// non-finite value reaches a cell only if its weight is not zero.
template <class C>
TRUNCDET_HD C share(C weight, C value) {
  return weight == C(0) || value == C(0) ? C(0) : weight * value;
}

// The checks that both host functions make; `vertices` is [V, components], [1, V, components] or
// [N, V, components]. The number of a triangle must be exact in rast's type.
inline RenderShape render_shape(const char* op, const Tensor& rast, const Tensor& tri,
                                const Tensor& vertices) {
  TRUNCDET_CHECK(rast.dim() == 4 && rast.size(3) == 4, op, ": rast must have shape [N, H, W, 4]");
  TRUNCDET_CHECK(tri.dim() == 2 && tri.size(1) == kCorners, op, ": tri must have shape [T, 3]");
  TRUNCDET_CHECK(tri.scalar_type() == ScalarType::Int, op, ": tri must be int32");
  const int64_t dims = vertices.dim();
  TRUNCDET_CHECK(
      dims == 2 || (dims == 3 && (vertices.size(0) == 1 || vertices.size(0) == rast.size(0))), op,
      ": values at vertices must have shape [V, A], [1, V, A] or [N, V, A]");
  TRUNCDET_CHECK(
      rast.scalar_type() == ScalarType::Float || rast.scalar_type() == ScalarType::Double, op,
      ": rast must be float32 or float64");
  TRUNCDET_CHECK(vertices.scalar_type() == rast.scalar_type(), op,
                 ": values at vertices must have rast's dtype");
  for (const Tensor* other : {&tri, &vertices}) {
    TRUNCDET_CHECK(
        other->is_cuda() == rast.is_cuda() && other->get_device_index() == rast.get_device_index(),
        op, ": all tensors must be on rast's device");
  }
  const RenderShape shape{rast.size(0),
                          rast.size(1),
                          rast.size(2),
                          tri.size(0),
                          vertices.size(dims - 2),
                          vertices.size(dims - 1),
                          dims == 2 || (vertices.size(0) == 1 && rast.size(0) != 1)};
  const int bits = rast.scalar_type() == ScalarType::Float ? 24 : 31;
  TRUNCDET_CHECK(shape.triangles < (int64_t(1) << bits) && shape.vertices < (int64_t(1) << 31), op,
                 ": there must be fewer than 2^", bits, " triangles and 2^31 vertices");
  TRUNCDET_CHECK(shape.pixels() < (int64_t(1) << (kMaxHeadroom - 2)), op,
                 ": there must be fewer than 2^", kMaxHeadroom - 2, " pixels");
  return shape;
}

// A tensor beside rast of a known shape, dtype and device.
inline void check_beside(const char* op, const char* name, const Tensor& tensor, const Tensor& rast,
                         int64_t last) {
  TRUNCDET_CHECK(tensor.dim() == 4 && tensor.size(0) == rast.size(0) &&
                     tensor.size(1) == rast.size(1) && tensor.size(2) == rast.size(2) &&
                     tensor.size(3) == last,
                 op, ": ", name, " must have shape [N, H, W, ", last, "]");
  TRUNCDET_CHECK(tensor.scalar_type() == rast.scalar_type() && tensor.is_cuda() == rast.is_cuda() &&
                     tensor.get_device_index() == rast.get_device_index(),
                 op, ": ", name, " must have rast's dtype and device");
}

}  // namespace truncdet
