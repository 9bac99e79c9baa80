// Checks and small helpers for host functions on the stable ABI. The Python layer has checked the
// arguments with friendlier words; these keep a direct call of an operator from reading out of
// bounds.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "fixedpoint.h"

#define TRUNCDET_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

// Runs `...` with `scalar_t` standing for the storage type of a floating tensor.
#define TRUNCDET_DISPATCH(scalar_type, op, ...)                                           \
  switch (scalar_type) {                                                                  \
    case torch::headeronly::ScalarType::Float: {                                          \
      using scalar_t = float;                                                             \
      __VA_ARGS__();                                                                      \
      break;                                                                              \
    }                                                                                     \
    case torch::headeronly::ScalarType::Double: {                                         \
      using scalar_t = double;                                                            \
      __VA_ARGS__();                                                                      \
      break;                                                                              \
    }                                                                                     \
    case torch::headeronly::ScalarType::Half: {                                           \
      using scalar_t = ::truncdet::half_t;                                                \
      __VA_ARGS__();                                                                      \
      break;                                                                              \
    }                                                                                     \
    case torch::headeronly::ScalarType::BFloat16: {                                       \
      using scalar_t = ::truncdet::bfloat16_t;                                            \
      __VA_ARGS__();                                                                      \
      break;                                                                              \
    }                                                                                     \
    default:                                                                              \
      TRUNCDET_CHECK(false, op, ": dtype must be float64, float32, float16 or bfloat16"); \
  }

namespace truncdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The type in which sums of a storage type are formed.
inline ScalarType compute_type(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Tensor::data_ptr is typed by torch's own scalar types; storage types of ours go through void.
template <class T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// True for a 4-d tensor whose memory order is N, H, W, C.
inline bool is_channels_last(const Tensor& t) {
  const auto size = t.sizes();
  const auto stride = t.strides();
  return t.dim() == 4 && stride[1] == 1 && stride[3] == size[1] && stride[2] == size[1] * size[3] &&
         stride[0] == size[1] * size[2] * size[3];
}

}  // namespace truncdet
