// Sums at vertices on the CPU: the definition, read directly. Every row of values has a scale of
// its own, from the largest contribution to it.
#pragma once

#include <algorithm>
#include <vector>

#include "../render_pixel.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace truncdet {

// Subnormal numbers count while one of these lives, whatever the thread's mode: contributions are
// products of factors of any size. Elsewhere than on x86 the mode is left alone.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(mode_); }

 private:
  unsigned mode_;
#else
  KeepDenormals() {}
  ~KeepDenormals() {}
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

template <class C>
class VertexSums {
 public:
  VertexSums(int64_t rows, int64_t components, int headroom)
      : components_(components), headroom_(headroom), amax_(rows, 0) {}

  // First all contributions are seen, then all are added.
  void see(int64_t row, C contribution) {
    const auto word = magnitude_word<C>(contribution);
    if (word >= infinity_word<C>()) {
      nonfinite_ = true;
    } else {
      amax_[row] = std::max(amax_[row], word);
    }
  }
  void start_adding() {
    const size_t cells = amax_.size() * static_cast<size_t>(components_);
    high_.assign(cells, 0);
    low_.assign(kTwoLimbs ? cells : 0, 0);
    flags_.assign(nonfinite_ ? cells : 0, 0);
  }
  void add(int64_t row, int64_t component, C contribution) {
    const int64_t cell = row * components_ + component;
    if (!is_finite(contribution)) {
      flags_[cell] |= static_cast<uint8_t>(nonfinite_flag(contribution));
      return;
    }
    const Scale<C> scale = scale_of(row);
    const C normal = scale.normalise(contribution);
    const int64_t rounded = scale.quantise(normal);
    high_[cell] += rounded;
    if (kTwoLimbs) low_[cell] += scale.quantise_rest(normal, rounded);
  }
  void finish(C* out) const {
    for (size_t row = 0; row < amax_.size(); ++row) {
      const Scale<C> scale = scale_of(row);
      for (int64_t i = 0; i < components_; ++i) {
        const size_t cell = row * static_cast<size_t>(components_) + static_cast<size_t>(i);
        out[cell] = finish_cell<C>(C(0), high_[cell], kTwoLimbs ? low_[cell] : 0, kTwoLimbs,
                                   flags_.empty() ? 0u : flags_[cell], scale);
      }
    }
  }

 private:
  static constexpr bool kTwoLimbs = std::is_same_v<C, double>;

  Scale<C> scale_of(size_t row) const { return {exponent_above<C>(amax_[row]), headroom_}; }

  int64_t components_;
  int headroom_;
  bool nonfinite_ = false;
  std::vector<typename Format<C>::Word> amax_;
  std::vector<int64_t> high_, low_;  // `low` is empty with one limb
  std::vector<uint8_t> flags_;       // empty if every contribution is finite
};

}  // namespace truncdet
