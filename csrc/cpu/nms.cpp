// Non-maximum suppression on the CPU.
#include "../nms.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace truncdet {
namespace {

// `places`: the boxes of one group, in order.
template <class C>
void suppress(const std::vector<Box<C>>& boxes, const int64_t* places, int64_t count,
              double threshold, bool* keep) {
  for (int64_t i = 0; i < count; ++i) {
    if (!keep[places[i]]) continue;
    for (int64_t j = i + 1; j < count; ++j) {
      bool& other = keep[places[j]];
      if (other) other = !overlaps(boxes[places[i]], boxes[places[j]], threshold);
    }
  }
}

template <class T, class C = typename Format<T>::Compute>
void suppress_groups(const T* boxes, const int64_t* groups, int64_t count, double threshold,
                     bool* keep) {
  std::vector<Box<C>> all(count);
  for (int64_t i = 0; i < count; ++i) all[i] = load_box(boxes, i);
  std::fill(keep, keep + count, true);
  std::vector<int64_t> places(count);
  std::iota(places.begin(), places.end(), int64_t(0));
  if (groups == nullptr) return suppress(all, places.data(), count, threshold, keep);
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return groups[a] < groups[b]; });
  for (int64_t first = 0, last = 0; first < count; first = last) {
    while (last < count && groups[places[last]] == groups[places[first]]) ++last;
    suppress(all, places.data() + first, last - first, threshold, keep);
  }
}

Tensor nms_keep_cpu(Tensor boxes, std::optional<Tensor> groups, double threshold) {
  const int64_t count = nms_boxes(boxes, groups);
  boxes = torch::stable::contiguous(boxes);
  if (groups.has_value()) groups = torch::stable::contiguous(*groups);
  Tensor keep = torch::stable::new_empty(boxes, {&count, 1}, ScalarType::Bool);
  TRUNCDET_DISPATCH(boxes.scalar_type(), "nms", [&] {
    suppress_groups(const_data<scalar_t>(boxes),
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
