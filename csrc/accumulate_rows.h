// Weighted rows of one matrix added to rows of another, shared by the CPU and the CUDA host
// functions:
//   out[c, i] = input[c, i] + sum over k with index[k] = c of src[rows[k], i] * weights[k].
// Indices and rows out of range are left out.
#pragma once

#include "accumulate.h"
#include "checks.h"

namespace truncdet {

struct RowsShape {
  int64_t cells, columns;  // input and output: [cells, columns]
  int64_t count;           // index, rows and weights
  int64_t sources;         // src: [sources, columns]
};

inline RowsShape rows_shape(const Tensor& input, const Tensor& index, const Tensor& src,
                            const Tensor& rows, const std::optional<Tensor>& weights) {
  TRUNCDET_CHECK(input.dim() == 2 && src.dim() == 2 && input.size(1) == src.size(1),
                 "_accumulate_rows: input and src must be matrices of equal width");
  TRUNCDET_CHECK(index.dim() == 1 && rows.dim() == 1 && index.size(0) == rows.size(0),
                 "_accumulate_rows: index and rows must be vectors of equal length");
  TRUNCDET_CHECK(index.scalar_type() == ScalarType::Long && rows.scalar_type() == ScalarType::Long,
                 "_accumulate_rows: index and rows must be int64");
  TRUNCDET_CHECK(src.scalar_type() == input.scalar_type() ||
                     compute_type(src.scalar_type()) == input.scalar_type(),
                 "_accumulate_rows: src must have input's dtype, or one that is computed in it");
  for (const Tensor* other : {&index, &src, &rows}) {
    TRUNCDET_CHECK(other->is_cuda() == input.is_cuda() &&
                       other->get_device_index() == input.get_device_index(),
                   "_accumulate_rows: all tensors must be on input's device");
  }
  if (weights.has_value()) {
    TRUNCDET_CHECK(weights->dim() == 1 && weights->size(0) == index.size(0) &&
                       weights->scalar_type() == src.scalar_type(),
                   "_accumulate_rows: weights must be a vector like index, of src's dtype");
    TRUNCDET_CHECK(weights->is_cuda() == input.is_cuda() &&
                       weights->get_device_index() == input.get_device_index(),
                   "_accumulate_rows: weights must be on input's device");
  }
  TRUNCDET_CHECK(headroom(index.size(0)) <= kMaxHeadroom,
                 "_accumulate_rows: index must have at most 2^", kMaxHeadroom, " elements");
  return {input.size(0), input.size(1), index.size(0), src.size(0)};
}

}  // namespace truncdet
