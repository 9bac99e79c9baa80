// The largest finite magnitude of a run of values, and whether any is not finite.
#pragma once

#include <algorithm>

#include "../fixedpoint.h"

namespace truncdet {

template <class C>
struct ValueStatistics {
  typename Format<C>::Word amax = 0;
  bool nonfinite = false;
};

template <class T, class C = typename Format<T>::Compute>
ValueStatistics<C> value_statistics(const T* values, int64_t count) {
  ValueStatistics<C> result;
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

}  // namespace truncdet
