// The primitive behind gather and index_select: out[o, k, i] = input[o, index[o, k, i], i], zero
// where the index is out of range.
#pragma once

#include "checks.h"

namespace truncdet {

struct PickShape {
  int64_t outer, cells, inner, count;  // input: [outer, cells, inner], index: [outer, count, inner]
};

inline PickShape pick_shape(const Tensor& input, const Tensor& index) {
  TRUNCDET_CHECK(input.dim() == 3 && index.dim() == 3 && index.size(0) == input.size(0) &&
                     index.size(2) == input.size(2),
                 "_pick: input and index must have 3 dimensions and agree in the first and last");
  TRUNCDET_CHECK(index.scalar_type() == ScalarType::Long, "_pick: index must be int64");
  TRUNCDET_CHECK(
      index.is_cuda() == input.is_cuda() && index.get_device_index() == input.get_device_index(),
      "_pick: index must be on input's device");
  return {input.size(0), input.size(1), input.size(2), index.size(1)};
}

}  // namespace truncdet
