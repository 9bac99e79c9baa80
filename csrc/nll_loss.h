// What the CPU and the CUDA host functions of nll_loss share. input: [images, classes, places],
// target: [images, places]; the term and the factor of a place are
//   term = -(input[n, t, l] * weight[t]), factor = weight[t] (1 without weights), t = target[n, l],
// both 0 where t is ignored or out of range.
#pragma once

#include "checks.h"

namespace truncdet {

struct NllShape {
  int64_t images, classes, places;
  int64_t ignore_index;

  int64_t targets() const { return images * places; }
  // The class of a place, or -1 if it is ignored. Out of range is ignored too, and noted in `bad`.
  TRUNCDET_HD int64_t used_class(int64_t target, bool* bad) const {
    if (target == ignore_index) return -1;
    const bool inside = target >= 0 && target < classes;
    *bad |= !inside;
    return inside ? target : -1;
  }
};

// Without weights nothing is multiplied, so that nothing can be flushed to zero.
template <class C>
TRUNCDET_HD C nll_term(C value, const C* weight) {
  return narrow<C>(weight != nullptr ? -(value * *weight) : -value);
}

inline void check_nll_others(const Tensor& like, const Tensor& target,
                             const std::optional<Tensor>& weight, int64_t classes) {
  TRUNCDET_CHECK(target.scalar_type() == ScalarType::Long, "nll_loss: target must be int64");
  TRUNCDET_CHECK(
      target.is_cuda() == like.is_cuda() && target.get_device_index() == like.get_device_index(),
      "nll_loss: target must be on input's device");
  if (!weight.has_value()) return;
  TRUNCDET_CHECK(weight->dim() == 1 && weight->size(0) == classes,
                 "nll_loss: weight must have one element for each of ", classes, " classes");
  TRUNCDET_CHECK(
      weight->is_cuda() == like.is_cuda() && weight->get_device_index() == like.get_device_index(),
      "nll_loss: weight must be on input's device");
}

inline NllShape nll_terms_shape(const Tensor& input, const Tensor& target,
                                const std::optional<Tensor>& weight, int64_t ignore_index) {
  TRUNCDET_CHECK(input.dim() == 3 && target.dim() == 2 && target.size(0) == input.size(0) &&
                     target.size(1) == input.size(2),
                 "nll_loss: input must be [N, C, L] and target [N, L]");
  TRUNCDET_CHECK(!weight.has_value() || weight->scalar_type() == input.scalar_type(),
                 "nll_loss: weight must have input's dtype");
  check_nll_others(input, target, weight, input.size(1));
  return {input.size(0), input.size(1), input.size(2), ignore_index};
}

inline NllShape nll_spread_shape(const Tensor& grad, const Tensor& target,
                                 const std::optional<Tensor>& weight, int64_t classes,
                                 int64_t ignore_index, ScalarType dtype) {
  TRUNCDET_CHECK(grad.dim() == 2 && target.dim() == 2 && target.size(0) == grad.size(0) &&
                     target.size(1) == grad.size(1),
                 "nll_loss: grad and target must be [N, L]");
  TRUNCDET_CHECK(grad.scalar_type() == compute_type(dtype),
                 "nll_loss: grad must have the type that dtype is computed in");
  TRUNCDET_CHECK(!weight.has_value() || weight->scalar_type() == dtype,
                 "nll_loss: weight must have the gradient's dtype");
  TRUNCDET_CHECK(classes >= 0, "nll_loss: classes must not be negative, got ", classes);
  check_nll_others(grad, target, weight, classes);
  return {grad.size(0), classes, grad.size(1), ignore_index};
}

}  // namespace truncdet
