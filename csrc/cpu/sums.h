// Integer sums of many cells with one scale, for the CPU kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "../accumulate.h"

namespace truncdet {

template <class C>
struct Statistics {
  typename Format<C>::Word amax = 0;
  bool nonfinite = false;

  int exponent() const { return exponent_above<C>(amax); }
};

template <class T, class C = typename Format<T>::Compute>
Statistics<C> statistics(const T* values, int64_t count) {
  Statistics<C> result;
  for (int64_t at = 0; at < count; ++at) {
    const auto word = magnitude_word<C>(widen(values[at]));
    if (word >= infinity_word<C>()) {
      result.nonfinite = true;
    } else {
      result.amax = std::max(result.amax, word);
    }
  }
  return result;
}

template <class C>
class Sums {
 public:
  Sums(int64_t cells, Scale<C> scale, bool two_limbs, bool nonfinite)
      : scale_(scale),
        high_(cells, 0),
        low_(two_limbs ? cells : 0, 0),
        flags_(nonfinite ? cells : 0, 0) {}

  const Scale<C>& scale() const { return scale_; }

  // `contribution` is of values that the scale has normalised.
  void add(int64_t cell, C contribution) {
    const int64_t rounded = scale_.quantise(contribution);
    high_[cell] += rounded;
    if (!low_.empty()) low_[cell] += scale_.quantise_rest(contribution, rounded);
  }
  void flag(int64_t cell, uint32_t seen) { flags_[cell] |= static_cast<uint8_t>(seen); }

  template <class T>
  void finish(const T* existing, T* out) const {
    const bool two_limbs = !low_.empty();
    for (size_t cell = 0; cell < high_.size(); ++cell) {
      out[cell] = finish_cell<T>(existing[cell], high_[cell], two_limbs ? low_[cell] : 0, two_limbs,
                                 flags_.empty() ? 0u : flags_[cell], scale_);
    }
  }

 private:
  Scale<C> scale_;
  std::vector<int64_t> high_, low_;  // `low` is empty with one limb
  std::vector<uint8_t> flags_;       // empty if every contribution is finite
};

}  // namespace truncdet
