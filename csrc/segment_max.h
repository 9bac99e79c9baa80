// Keys that compare as floats do, shared by the CPU and the CUDA host functions of _segment_max:
// the largest element of every group and column, and the lowest row that has it.
#pragma once

#include "checks.h"

namespace truncdet {

// Zeros of both signs have one key; NaN has key 0, below that of every number.
template <class C>
TRUNCDET_HD uint64_t ordered_key(C value) {
  if (is_nan(value)) return 0;
  constexpr uint64_t kMiddle = uint64_t(1) << 63;
  const uint64_t size = magnitude_word<C>(value);
  return is_negative(value) ? kMiddle - size : kMiddle + size;
}

struct SegmentShape {
  int64_t rows, columns, groups;  // values: [rows, columns], index: [rows]
};

inline SegmentShape segment_shape(const Tensor& values, const Tensor& index, int64_t groups) {
  TRUNCDET_CHECK(values.dim() == 2 && index.dim() == 1 && index.size(0) == values.size(0),
                 "_segment_max: values must be a matrix and index a vector of its rows");
  TRUNCDET_CHECK(index.scalar_type() == ScalarType::Long, "_segment_max: index must be int64");
  TRUNCDET_CHECK(groups >= 0, "_segment_max: groups must not be negative, got ", groups);
  TRUNCDET_CHECK(
      index.is_cuda() == values.is_cuda() && index.get_device_index() == values.get_device_index(),
      "_segment_max: index must be on values' device");
  return {values.size(0), values.size(1), groups};
}

// What a group without a number has.
template <class T>
TRUNCDET_HD T minus_infinity() {
  using Word = typename Format<T>::Word;
  const Word sign = static_cast<Word>(Word(1) << (8 * sizeof(Word) - 1));
  return bit_copy<T>(static_cast<Word>(sign | infinity_word<T>()));
}

}  // namespace truncdet
