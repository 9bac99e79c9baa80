// From integer sums to values: what the CPU and the CUDA kernels do with one cell once every
// contribution has arrived.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

// float64 needs both limbs to be accurate to its own precision; others on request (`exact`).
template <class C>
TRUNCDET_HD bool needs_two_limbs(bool exact) {
  return exact || std::is_same_v<C, double>;
}

// existing + sum with one rounding. Flagged cells are NaN or infinite whatever was summed, and a
// zero sum leaves `existing` as it is, sign of zero and NaN payload included.
template <class T, class C>
TRUNCDET_HD T finish_cell(T existing, int64_t high, int64_t low, bool two_limbs, uint32_t flags,
                          const Scale<C>& scale) {
  if (flags != 0) return nonfinite_value<T>(flags | nonfinite_flag(existing));
  if (two_limbs) {
    return add_and_round<T>(existing, join_limbs(high, low, scale.headroom), scale.rest_quantum());
  }
  if (high == 0) return existing;
  // Fresh output is common, and rounding a plain integer is much cheaper than adding to a value.
  if (magnitude_word<T>(existing) == 0) return round_sum<T>(high, scale.quantum());
  return add_and_round<T>(existing, high, scale.quantum());
}

}  // namespace truncdet
