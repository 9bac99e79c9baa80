// Maxima of groups of rows on the CPU.
#include "../segment_max.h"

#include <array>
#include <tuple>
#include <vector>

namespace truncdet {
namespace {

template <class T>
void segment_max(const T* values, const int64_t* index, const SegmentShape& s, T* largest,
                 int64_t* argmax) {
  std::vector<uint64_t> best(s.groups * s.columns, 0);
  for (int64_t at = 0; at < s.groups * s.columns; ++at) {
    largest[at] = minus_infinity<T>();
    argmax[at] = s.rows;
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    if (index[row] < 0 || index[row] >= s.groups) continue;
    for (int64_t i = 0; i < s.columns; ++i) {
      const T value = values[row * s.columns + i];
      const uint64_t key = ordered_key(widen(value));
      const int64_t at = index[row] * s.columns + i;
      if (key <= best[at]) continue;
      best[at] = key;
      largest[at] = value;
      argmax[at] = row;
    }
  }
}

std::tuple<Tensor, Tensor> segment_max_cpu(Tensor values, Tensor index, int64_t groups) {
  const SegmentShape shape = segment_shape(values, index, groups);
  values = torch::stable::contiguous(values);
  index = torch::stable::contiguous(index);
  const std::array<int64_t, 2> size{shape.groups, shape.columns};
  Tensor largest = torch::stable::new_empty(values, size);
  Tensor argmax = torch::stable::new_empty(index, size);
  TRUNCDET_DISPATCH(values.scalar_type(), "_segment_max", [&] {
    segment_max(const_data<scalar_t>(values), const_data<int64_t>(index), shape,
                mutable_data<scalar_t>(largest), mutable_data<int64_t>(argmax));
  });
  return {largest, argmax};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_segment_max", TORCH_BOX(&truncdet::segment_max_cpu));
}
