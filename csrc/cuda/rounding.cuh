// The final rounding where many cells of one thread are rounded in a row.
#pragma once

#include "../accumulate.h"

namespace truncdet {

// The short way of round_sum: every result is a normal float32 number, or zero, or overflows.
template <class T>
__device__ __forceinline__ T round_normal(int64_t sum, float unit) {
  if constexpr (std::is_same_v<T, float>) {
    return __ll2float_rn(sum) * unit;
  } else {
    return T{};  // never called: other types take round_any
  }
}

// round_sum with a call, so that its long way is not copied for every cell of a row.
template <class T>
static __device__ __noinline__ T round_any(int64_t sum, int quantum) {
  return round_sum<T>(sum, quantum);
}

template <class T, class C>
static __device__ __noinline__ T round_limbs(int64_t high, int64_t low, Scale<C> scale) {
  return finish_cell<T>(T{}, high, low, true, 0u, scale);
}

// A cell of a fresh output from its integer sum, or from both limbs of it.
template <class T, class C = typename Format<T>::Compute>
class Rounding {
 public:
  __device__ explicit Rounding(const Scale<C>& scale) : scale_(scale) {}

  __device__ __forceinline__ T operator()(int64_t high, int64_t low) const {
    if constexpr (std::is_same_v<C, double>) {
      return round_limbs<T>(high, low, scale_);
    } else {
      // The quantum is at most 128 + 60 - 62, so its power of two exists unless it is too small.
      const int quantum = scale_.quantum();
      if (std::is_same_v<T, float> && quantum >= Format<float>::kMinExponent) {
        return round_normal<T>(high, power_of_two(0.f, quantum));
      }
      return high == 0 ? T{} : round_any<T>(high, quantum);
    }
  }

 private:
  Scale<C> scale_;
};

}  // namespace truncdet
