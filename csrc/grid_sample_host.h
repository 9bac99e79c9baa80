// What the CPU and the CUDA host functions of grid_sample's backward share.
#pragma once

#include "accumulate.h"
#include "checks.h"
#include "grid_sample.h"

namespace truncdet {

struct GridSampleShape {
  int dims;
  int64_t images, channels;
  int64_t size[3];           // of the input: x, y, z (1 in two dimensions)
  int64_t cells, locations;  // of one image: of the input, of the grid
  Interpolation mode;
  Padding padding;
  bool align_corners;

  int64_t total_cells() const { return images * channels * cells; }
  // A location gives a cell at most weight 1, or less than 2 where cubic taps meet in it.
  int headroom_bits() const {
    return headroom(locations) + (mode == Interpolation::kCubic ? kCubicHeadroom : 0);
  }
};

inline GridSampleShape grid_sample_shape(const Tensor& grad, const Tensor& input,
                                         const Tensor& grid, int64_t mode, int64_t padding,
                                         bool align_corners) {
  const int64_t dims = input.dim() - 2;
  TRUNCDET_CHECK(dims == 2 || dims == 3, "grid_sample: input must have 4 or 5 dimensions");
  TRUNCDET_CHECK(grad.dim() == dims + 2 && grid.dim() == dims + 2 && grid.size(dims + 1) == dims,
                 "grid_sample: grad and grid must have input's dimensions");
  TRUNCDET_CHECK(mode >= 0 && mode <= (dims == 2 ? 2 : 1), "grid_sample: mode is not known");
  TRUNCDET_CHECK(padding >= 0 && padding <= 2, "grid_sample: padding_mode is not known");
  GridSampleShape shape{static_cast<int>(dims),
                        input.size(0),
                        input.size(1),
                        {1, 1, 1},
                        1,
                        1,
                        static_cast<Interpolation>(mode),
                        static_cast<Padding>(padding),
                        align_corners};
  TRUNCDET_CHECK(grid.size(0) == shape.images && grad.size(0) == shape.images &&
                     grad.size(1) == shape.channels,
                 "grid_sample: grad and grid must have input's batch size, grad its channels");
  for (int64_t axis = 0; axis < dims; ++axis) {
    shape.size[axis] = input.size(dims + 1 - axis);
    shape.cells *= shape.size[axis];
    TRUNCDET_CHECK(shape.size[axis] > 0, "grid_sample: input must have cells");
    TRUNCDET_CHECK(grad.size(dims + 1 - axis) == grid.size(dims - axis),
                   "grid_sample: grad must have the grid's sizes");
    shape.locations *= grid.size(dims - axis);
  }
  for (const Tensor* other : {&grad, &grid}) {
    TRUNCDET_CHECK(other->scalar_type() == input.scalar_type(),
                   "grid_sample: grad and grid must have input's dtype");
    TRUNCDET_CHECK(other->is_cuda() == input.is_cuda() &&
                       other->get_device_index() == input.get_device_index(),
                   "grid_sample: grad and grid must be on input's device");
  }
  // Cells along an axis are counted in 32 bits.
  TRUNCDET_CHECK(shape.cells < (int64_t(1) << 31),
                 "grid_sample: an image must have fewer than 2^31 cells, got ", shape.cells);
  TRUNCDET_CHECK(shape.headroom_bits() <= kMaxHeadroom,
                 "grid_sample: an image must have at most 2^", kMaxHeadroom, " samples");
  return shape;
}

// A contiguous gradient of `tensor`, or an empty stand-in where none is asked for.
inline Tensor gradient_like(const Tensor& tensor, bool wanted) {
  const int64_t none = 0;
  if (!wanted) return torch::stable::new_empty(tensor, {&none, 1});
  return torch::stable::new_empty(tensor, tensor.sizes());
}

// Runs f<scalar_t, kDims, kMode> for the dimensions and the interpolation of a call.
#define TRUNCDET_GRID_SAMPLE_DISPATCH(shape, f, ...)          \
  do {                                                        \
    if ((shape).dims == 3) {                                  \
      if ((shape).mode == Interpolation::kNearest) {          \
        f<scalar_t, 3, Interpolation::kNearest>(__VA_ARGS__); \
      } else {                                                \
        f<scalar_t, 3, Interpolation::kLinear>(__VA_ARGS__);  \
      }                                                       \
    } else if ((shape).mode == Interpolation::kNearest) {     \
      f<scalar_t, 2, Interpolation::kNearest>(__VA_ARGS__);   \
    } else if ((shape).mode == Interpolation::kLinear) {      \
      f<scalar_t, 2, Interpolation::kLinear>(__VA_ARGS__);    \
    } else {                                                  \
      f<scalar_t, 2, Interpolation::kCubic>(__VA_ARGS__);     \
    }                                                         \
  } while (false)

// One location of the grid as taps; `coordinates` are x, y, z.
template <class C, int kDims, Interpolation kMode>
struct Sample {
  static constexpr int K = taps_per_axis<kMode>();
  Axis<C, K> axis[kDims];
  C derivative[kDims];
};

template <int kDims, Interpolation kMode, class T, class C = typename Format<T>::Compute>
TRUNCDET_HD Sample<C, kDims, kMode> make_sample(const T* coordinates,
                                                const GridSampleShape& shape) {
  Sample<C, kDims, kMode> sample;
  for (int a = 0; a < kDims; ++a) {
    const auto axis = sample_axis<C, kMode>(widen(coordinates[a]), shape.size[a], shape.padding,
                                            shape.align_corners);
    sample.axis[a] = axis.taps;
    sample.derivative[a] = axis.derivative;
  }
  return sample;
}

}  // namespace truncdet
