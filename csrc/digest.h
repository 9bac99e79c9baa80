// The sum that a digest is made of, shared by CPU and CUDA:
//   sum over i of mix64(word_i + (i + 1) * kWeyl)  (mod 2^64),
// mix64 the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) and kWeyl its increment.
// Integer addition is associative: threads and devices may add in any order.
#pragma once

#include <vector>

#include "checks.h"

namespace truncdet {

constexpr uint64_t kWeyl = 0x9E3779B97F4A7C15ull;

TRUNCDET_HD uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// Words are extended to 64 bits by the rule of their type: signed ones with their sign.
template <class T>
TRUNCDET_HD uint64_t digest_term(T word, uint64_t index) {
  const uint64_t wide = static_cast<uint64_t>(static_cast<int64_t>(word));
  return mix64(wide + (index + 1) * kWeyl);
}

// Whether the elements fill one piece of memory, in whatever order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  // The strides of a dense tensor, taken from the smallest, are the products of the sizes before.
  int64_t expected = 1;
  for (int64_t taken = 0; taken < tensor.dim(); ++taken) {
    bool found = false;
    for (int64_t d = 0; d < tensor.dim() && !found; ++d) {
      found = size[d] != 1 && stride[d] == expected;
      if (found) expected *= size[d];
    }
    if (!found) break;
  }
  return expected == tensor.numel();
}

inline void check_digest(const Tensor& words, const Tensor& sums, int64_t slot, int64_t start) {
  TRUNCDET_CHECK(is_dense(words), "_digest_words: words must be dense in memory");
  TRUNCDET_CHECK(sums.scalar_type() == ScalarType::Long && sums.dim() == 1 && sums.is_contiguous(),
                 "_digest_words: sums must be a contiguous vector of int64");
  TRUNCDET_CHECK(slot >= 0 && slot < sums.numel(), "_digest_words: slot must be from 0 to ",
                 sums.numel() - 1, ", got ", slot);
  TRUNCDET_CHECK(start >= 0, "_digest_words: start must not be negative, got ", start);
  TRUNCDET_CHECK(words.device() == sums.device(),
                 "_digest_words: words and sums must be on one device");
}

// For `_digest_many`, whose tensor i has slot + i.
inline void check_digest_many(const std::vector<Tensor>& tensors, const Tensor& sums,
                              int64_t slot) {
  TRUNCDET_CHECK(sums.scalar_type() == ScalarType::Long && sums.dim() == 1 && sums.is_contiguous(),
                 "_digest_many: sums must be a contiguous vector of int64");
  const int64_t count = static_cast<int64_t>(tensors.size());
  TRUNCDET_CHECK(slot >= 0 && slot <= sums.numel() - count, "_digest_many: slot must be from 0 to ",
                 sums.numel() - count, ", got ", slot);
  for (const Tensor& tensor : tensors) {
    TRUNCDET_CHECK(is_dense(tensor), "_digest_many: tensors must be dense in memory");
    TRUNCDET_CHECK(tensor.device() == sums.device(),
                   "_digest_many: tensors and sums must be on one device");
  }
}

}  // namespace truncdet

// Runs `...` with `word_t` standing for an integer of the elements' size.
#define TRUNCDET_DISPATCH_WORDS(element_size, ...)                                              \
  switch (element_size) {                                                                       \
    case 1: {                                                                                   \
      using word_t = uint8_t;                                                                   \
      __VA_ARGS__();                                                                            \
      break;                                                                                    \
    }                                                                                           \
    case 2: {                                                                                   \
      using word_t = int16_t;                                                                   \
      __VA_ARGS__();                                                                            \
      break;                                                                                    \
    }                                                                                           \
    case 4: {                                                                                   \
      using word_t = int32_t;                                                                   \
      __VA_ARGS__();                                                                            \
      break;                                                                                    \
    }                                                                                           \
    case 8: {                                                                                   \
      using word_t = int64_t;                                                                   \
      __VA_ARGS__();                                                                            \
      break;                                                                                    \
    }                                                                                           \
    default:                                                                                    \
      TRUNCDET_CHECK(false, "digest: words must be of 1, 2, 4 or 8 bytes, got ", element_size); \
  }
