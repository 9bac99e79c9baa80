// Non-maximum suppression on the CPU.
#include "../nms.h"

#include <algorithm>
#include <vector>

namespace truncdet {
namespace {

template <class T, class C = typename Format<T>::Compute>
void suppress(const T* boxes, const int64_t* groups, int64_t count, double threshold, bool* keep) {
  std::vector<Box<C>> all(count);
  for (int64_t i = 0; i < count; ++i) all[i] = load_box(boxes, i);
  std::fill(keep, keep + count, true);
  for (int64_t i = 0; i < count; ++i) {
    if (!keep[i]) continue;
    for (int64_t j = i + 1; j < count; ++j) {
      if (!keep[j] || (groups != nullptr && groups[i] != groups[j])) continue;
      keep[j] = !overlaps(all[i], all[j], threshold);
    }
  }
}

Tensor nms_keep_cpu(Tensor boxes, std::optional<Tensor> groups, double threshold) {
  const int64_t count = nms_boxes(boxes, groups);
  boxes = torch::stable::contiguous(boxes);
  if (groups.has_value()) groups = torch::stable::contiguous(*groups);
  Tensor keep = torch::stable::new_empty(boxes, {&count, 1}, ScalarType::Bool);
  TRUNCDET_DISPATCH(boxes.scalar_type(), "nms", [&] {
    suppress(const_data<scalar_t>(boxes),
             groups.has_value() ? const_data<int64_t>(*groups) : nullptr, count, threshold,
             mutable_data<bool>(keep));
  });
  return keep;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_nms_keep", TORCH_BOX(&truncdet::nms_keep_cpu));
}
