// The gradient of adaptive max pooling: a cell receives the gradients of all outputs that chose it,
// added in ascending order of the outputs. Windows overlap where sizes do not divide, so several
// outputs can choose one cell. Shared by CPU and CUDA.
#pragma once

#include "checks.h"
#include "resample.h"

namespace truncdet {

struct MaxPoolShape {
  int64_t planes;
  int32_t in[2], out[2];  // height, width

  TRUNCDET_HD int64_t cells() const { return int64_t(in[0]) * in[1]; }
  TRUNCDET_HD int64_t outputs() const { return int64_t(out[0]) * out[1]; }

  // The outputs of an axis whose windows contain a cell.
  TRUNCDET_HD OutputRange outputs_of(int axis, int32_t cell) const {
    return {window_start(cell, in[axis], out[axis]), window_end(cell, in[axis], out[axis])};
  }
};

TRUNCDET_HD bool contains(const OutputRange& range, int32_t output) {
  return output >= range.first && output < range.last;
}

inline MaxPoolShape max_pool_shape(const Tensor& grad, const Tensor& indices, int64_t height,
                                   int64_t width) {
  TRUNCDET_CHECK(
      grad.dim() == 3 && grad.is_contiguous() && indices.dim() == 3 && indices.is_contiguous(),
      "_max_pool_backward: grad and indices must be contiguous with 3 dimensions");
  TRUNCDET_CHECK(indices.scalar_type() == ScalarType::Long,
                 "_max_pool_backward: indices must be int64");
  TRUNCDET_CHECK(
      indices.is_cuda() == grad.is_cuda() && indices.get_device_index() == grad.get_device_index(),
      "_max_pool_backward: indices must be on grad's device");
  for (int i = 0; i < 3; ++i) {
    TRUNCDET_CHECK(indices.size(i) == grad.size(i),
                   "_max_pool_backward: indices must have the shape of grad");
  }
  for (const int64_t size : {height, width, grad.size(1), grad.size(2)}) {
    TRUNCDET_CHECK(size >= 0 && size < (int64_t(1) << 30),
                   "_max_pool_backward: a dimension must have fewer than 2^30 cells, got ", size);
  }
  return {grad.size(0),
          {static_cast<int32_t>(height), static_cast<int32_t>(width)},
          {static_cast<int32_t>(grad.size(1)), static_cast<int32_t>(grad.size(2))}};
}

inline Tensor empty_planes(const Tensor& grad, const MaxPoolShape& shape) {
  const int64_t sizes[3] = {shape.planes, shape.in[0], shape.in[1]};
  return torch::stable::new_empty(grad, {sizes, 3});
}

}  // namespace truncdet
