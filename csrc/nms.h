// Non-maximum suppression, shared by the CPU and the CUDA host functions: boxes come in descending
// order of their scores, and a box is dropped if one that is kept before it, of the same group,
// overlaps it by more than a threshold.
#pragma once

#include "checks.h"

namespace truncdet {

template <class C>
struct Box {
  C x1, y1, x2, y2;

  TRUNCDET_HD C area() const { return (x2 - x1) * (y2 - y1); }
};

template <class T, class C = typename Format<T>::Compute>
TRUNCDET_HD Box<C> load_box(const T* boxes, int64_t i) {
  return {widen(boxes[4 * i]), widen(boxes[4 * i + 1]), widen(boxes[4 * i + 2]),
          widen(boxes[4 * i + 3])};
}

// Of two numbers; where one is NaN, as these comparisons have it.
template <class C>
TRUNCDET_HD C larger(C a, C b) {
  return a < b ? b : a;
}
template <class C>
TRUNCDET_HD C smaller(C a, C b) {
  return b < a ? b : a;
}

// Whether intersection over union is above the threshold, `first` being the box of the higher
// score. The one expression of it: torchvision's on the CPU, where the quotient is compared in
// float64. A box with a NaN has no area that compares, so it overlaps none.
template <class C>
TRUNCDET_HD bool overlaps(const Box<C>& first, const Box<C>& second, double threshold) {
  const C left = larger(first.x1, second.x1), right = smaller(first.x2, second.x2);
  const C top = larger(first.y1, second.y1), bottom = smaller(first.y2, second.y2);
  const C width = larger(C(0), right - left), height = larger(C(0), bottom - top);
  const C both = width * height;
  const C either = (first.area() + second.area()) - both;
  return static_cast<double>(both / either) > threshold;
}

inline int64_t nms_boxes(const Tensor& boxes, const std::optional<Tensor>& groups) {
  TRUNCDET_CHECK(boxes.dim() == 2 && boxes.size(1) == 4, "nms: boxes must be [N, 4]");
  if (groups.has_value()) {
    TRUNCDET_CHECK(groups->dim() == 1 && groups->size(0) == boxes.size(0) &&
                       groups->scalar_type() == ScalarType::Long,
                   "nms: groups must be an int64 vector with an element for each box");
    TRUNCDET_CHECK(groups->is_cuda() == boxes.is_cuda() &&
                       groups->get_device_index() == boxes.get_device_index(),
                   "nms: groups must be on boxes' device");
  }
  return boxes.size(0);
}

}  // namespace truncdet
