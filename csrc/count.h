// How often an index names a cell, shared by the CPU and the CUDA host functions:
//   out[o, c, i] = number of k with index[o, k, i] = c; indices out of range are not counted.
#pragma once

#include "checks.h"

namespace truncdet {

struct CountShape {
  int64_t outer, cells, inner;  // out: [outer, cells, inner]
  int64_t count;                // index: [outer, count, inner], contiguous

  int64_t total_cells() const { return outer * cells * inner; }
  int64_t indices() const { return outer * count * inner; }
};

inline CountShape count_shape(const Tensor& index, int64_t cells) {
  TRUNCDET_CHECK(index.dim() == 3, "_count: index must have 3 dimensions");
  TRUNCDET_CHECK(index.scalar_type() == ScalarType::Long, "_count: index must be int64");
  TRUNCDET_CHECK(cells >= 0, "_count: cells must not be negative, got ", cells);
  return {index.size(0), cells, index.size(2), index.size(1)};
}

}  // namespace truncdet
