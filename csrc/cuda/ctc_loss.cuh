// What the kernels of ctc_loss share: the arguments of a call and the shape of a launch.
#pragma once

#include "../ctc_loss.h"
#include "launch.cuh"

namespace truncdet {

constexpr int kCtcThreads = 512;  // of a block at most, since float64 needs the registers

template <class T>
struct CtcParams {
  CtcShape shape;
  const T* log_probs;
  const int64_t *targets, *input_lengths, *target_lengths;

  __device__ __forceinline__ CtcItem<T> item(int64_t n, bool* bad) const {
    return CtcItem<T>(shape, log_probs, targets, input_lengths, target_lengths, n, bad);
  }
};

inline int threads_for(int64_t states) {
  int threads = 32;
  while (threads < kCtcThreads && threads < states) threads *= 2;
  return threads;
}

inline unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>(items < kMaxBlocks ? items : kMaxBlocks);
}

}  // namespace truncdet
