// Counts of indices on the CPU.
#include "../count.h"

#include <algorithm>
#include <array>

namespace truncdet {
namespace {

Tensor count_cpu(Tensor index, int64_t cells) {
  const CountShape s = count_shape(index, cells);
  index = torch::stable::contiguous(index);
  const std::array<int64_t, 3> size{s.outer, s.cells, s.inner};
  Tensor out = torch::stable::new_empty(index, size);
  const int64_t* from = const_data<int64_t>(index);
  int64_t* to = mutable_data<int64_t>(out);
  std::fill(to, to + s.total_cells(), int64_t(0));
  for (int64_t row = 0; row < s.outer * s.count; ++row) {
    for (int64_t i = 0; i < s.inner; ++i) {
      const int64_t cell = from[row * s.inner + i];
      if (cell >= 0 && cell < s.cells) ++to[(row / s.count * s.cells + cell) * s.inner + i];
    }
  }
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) { m.impl("_count", TORCH_BOX(&truncdet::count_cpu)); }
