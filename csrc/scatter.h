// The primitive behind scatter_add and index_add, shared by the CPU and the CUDA host functions:
//   out[o, index[o, k, i], i] = input[o, index[o, k, i], i] + sum of src[o, k, i] over such k.
// The Python layer brings every call to these three dimensions. `operator` is the bit of the
// operator to blame for an index out of range; 0 where such indices are meant to be left out.
#pragma once

#include "accumulate.h"
#include "checks.h"

namespace truncdet {

struct ScatterShape {
  int64_t outer, cells, inner;  // input and output: [outer, cells, inner]
  int64_t count;                // index and src: [outer, count, inner]
  int64_t index_outer, index_count,
      index_inner;  // element strides of index, 0 where it is expanded

  int64_t total_cells() const { return outer * cells * inner; }
  int64_t contributions() const { return outer * count * inner; }
};

inline ScatterShape scatter_shape(const Tensor& input, const Tensor& index, const Tensor& src) {
  TRUNCDET_CHECK(input.dim() == 3 && index.dim() == 3 && src.dim() == 3,
                 "_accumulate: input, index and src must have 3 dimensions");
  TRUNCDET_CHECK(index.scalar_type() == ScalarType::Long, "_accumulate: index must be int64");
  TRUNCDET_CHECK(src.scalar_type() == input.scalar_type() ||
                     compute_type(src.scalar_type()) == input.scalar_type(),
                 "_accumulate: src must have input's dtype, or one that is computed in it");
  for (const Tensor* other : {&index, &src}) {
    TRUNCDET_CHECK(other->is_cuda() == input.is_cuda() &&
                       other->get_device_index() == input.get_device_index(),
                   "_accumulate: index and src must be on input's device");
    TRUNCDET_CHECK(other->size(0) == input.size(0) && other->size(2) == input.size(2) &&
                       other->size(1) == index.size(1),
                   "_accumulate: index and src must have shape [", input.size(0), ", ",
                   index.size(1), ", ", input.size(2), "]");
  }
  TRUNCDET_CHECK(headroom(index.size(1)) <= kMaxHeadroom, "_accumulate: index must have at most 2^",
                 kMaxHeadroom, " elements along dim");
  const auto stride = index.strides();
  return {input.size(0), input.size(1), input.size(2), index.size(1),
          stride[0],     stride[1],     stride[2]};
}

}  // namespace truncdet
