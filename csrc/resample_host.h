// The primitive behind interpolate and adaptive average pooling, shared by the CPU and the CUDA
// host functions. The Python layer brings every call to
//   grad [outer, depth, height, width, inner]  ->  [outer, depth, height, width, inner],
// contiguous, with inner = 1 for N, C, H, W and the channels where they are last in memory.
#pragma once

#include "checks.h"
#include "resample.h"

namespace truncdet {

struct ResampleArguments {
  int64_t in[3];  // depth, height, width of the result
  int64_t kind;
  bool align_corners;
  double scale[3];  // output steps a cell as the caller gave them, 0 where not given
  int64_t copied;   // bit a: axis a is copied
};

struct ResampleShape {
  int64_t outer, inner;
  int32_t in[3], out[3];

  // Of one outer position.
  TRUNCDET_HD int64_t cells() const { return int64_t(in[0]) * in[1] * in[2] * inner; }
  TRUNCDET_HD int64_t outputs() const { return int64_t(out[0]) * out[1] * out[2] * inner; }
};

inline ResampleShape resample_shape(const Tensor& grad, const ResampleArguments& a) {
  TRUNCDET_CHECK(grad.dim() == 5 && grad.is_contiguous(),
                 "_resample_backward: grad must be contiguous with 5 dimensions");
  TRUNCDET_CHECK(a.kind >= kLinear && a.kind <= kAverage,
                 "_resample_backward: kind must be 0, 1 or 2, got ", a.kind);
  ResampleShape shape{grad.size(0), grad.size(4), {}, {}};
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t out = grad.size(axis + 1);
    // One more than a size, and a size more than a position, must be int32 as well.
    TRUNCDET_CHECK(a.in[axis] >= 0 && a.in[axis] < (int64_t(1) << 30) && out < (int64_t(1) << 30),
                   "_resample_backward: a dimension must have fewer than 2^30 cells, got ",
                   a.in[axis], " and ", out);
    const bool copied = (a.copied >> axis & 1) != 0;
    TRUNCDET_CHECK(!copied || a.in[axis] == out, "_resample_backward: a copied axis must keep its ",
                   "size ", a.in[axis], ", got ", out);
    shape.in[axis] = static_cast<int32_t>(a.in[axis]);
    shape.out[axis] = static_cast<int32_t>(out);
  }
  return shape;
}

// torch's scale of an axis, in the type its kernels compute coordinates in.
template <class C>
ResampleAxis<C> resample_axis(const ResampleShape& shape, const ResampleArguments& a, int axis) {
  const int32_t in = shape.in[axis], out = shape.out[axis];
  C scale = C(0);
  if (a.align_corners) {
    if (out > 1) scale = static_cast<C>(in - 1) / static_cast<C>(out - 1);
  } else if (a.scale[axis] > 0) {
    scale = static_cast<C>(1.0 / a.scale[axis]);
  } else if (out > 0) {
    scale = static_cast<C>(in) / static_cast<C>(out);
  }
  return {in, out, static_cast<int>(a.kind), a.align_corners, (a.copied >> axis & 1) != 0, scale};
}

inline Tensor empty_cells(const Tensor& grad, const ResampleShape& shape) {
  const int64_t sizes[5] = {shape.outer, shape.in[0], shape.in[1], shape.in[2], shape.inner};
  return torch::stable::new_empty(grad, {sizes, 5});
}

}  // namespace truncdet
