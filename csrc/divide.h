// The quotient of a finished sum and a count, rounded once to the storage type; shared by the CPU
// and the CUDA host functions.
#pragma once

#include "checks.h"

namespace truncdet {

// RN(value / count). Counts below 2 divide nothing: what is left is the plain conversion.
template <class T, class C = typename Format<T>::Compute>
TRUNCDET_HD T divide_and_round(C value, int64_t count) {
  const auto word = magnitude_word<C>(value);
  if (count < 2 || word == 0 || !is_finite(value)) return narrow<T>(value);
  const int bits = fraction_bits<C>();
  const int field = static_cast<int>(word >> bits);
  uint64_t significand = word & ((uint64_t(1) << bits) - 1);
  if (field != 0) significand |= uint64_t(1) << bits;
  // The leading bit to place 116: for every count below 2^61 the quotient keeps 56 bits, more than
  // any format needs, and one sticky bit below stands for all the others.
  const int up = 53 - bit_length(significand);
  const uint128 numerator = static_cast<uint128>(significand << up) << 64;
  const uint128 divisor = static_cast<uint128>(count);
  uint128 quotient = numerator / divisor;
  if (quotient * divisor != numerator) quotient |= 1u;
  const int exponent = (field != 0 ? field : 1) + Format<C>::kMinExponent - 1 - bits - up - 64;
  return round_scaled<T>(is_negative(value), quotient, exponent);
}

template <class From, class To>
constexpr bool computed_alike() {
  return std::is_same_v<typename Format<From>::Compute, typename Format<To>::Compute>;
}

// One count for `inner` consecutive values.
struct DivideShape {
  int64_t values, inner;
};

inline DivideShape divide_shape(const Tensor& values, const std::optional<Tensor>& counts,
                                ScalarType dtype) {
  TRUNCDET_CHECK(compute_type(values.scalar_type()) == compute_type(dtype),
                 "_divide: dtype must be computed in the type of values");
  const int64_t total = values.numel();
  if (!counts.has_value()) return {total, 1};
  TRUNCDET_CHECK(counts->scalar_type() == ScalarType::Long, "_divide: counts must be int64");
  TRUNCDET_CHECK(counts->is_cuda() == values.is_cuda() &&
                     counts->get_device_index() == values.get_device_index(),
                 "_divide: counts must be on values' device");
  TRUNCDET_CHECK(counts->dim() <= values.dim(),
                 "_divide: counts must have no more dimensions than values");
  for (int64_t d = 0; d < counts->dim(); ++d) {
    TRUNCDET_CHECK(counts->size(d) == values.size(d),
                   "_divide: counts must have the leading dimensions of values");
  }
  const int64_t count = counts->numel();
  return {total, count == 0 ? 1 : total / count};
}

}  // namespace truncdet
