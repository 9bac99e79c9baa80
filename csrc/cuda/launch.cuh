// Launching: error checks, the current stream, launch shapes from constants, and the sticky flag by
// which a kernel reports an out-of-range index without a host synchronisation.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../checks.h"

// These live in libtorch_cuda: weak, so that the library also loads beside a torch without CUDA.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

#define TRUNCDET_CUDA_CHECK(expression) STD_CUDA_CHECK(expression)
#define TRUNCDET_LAUNCH_CHECK() STD_CUDA_KERNEL_LAUNCH_CHECK()

namespace truncdet {

constexpr int kThreads = 256;
// Blocks of a grid-stride loop: a constant, not a property of the device, so that a launch has the
// same shape everywhere.
constexpr int64_t kMaxBlocks = 1 << 16;

inline unsigned blocks_for(int64_t items, int threads = kThreads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < kMaxBlocks ? blocks : kMaxBlocks));
}

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

using torch::stable::accelerator::DeviceGuard;

// Which operator met an out-of-range index; one bit each in the sticky word.
enum StickyBit : unsigned {
  kStickyRoiAlign = 1u,
  kStickyScatterAdd = 2u,
  kStickyIndexAdd = 4u,
  kStickyRenderInterpolate = 1u << 3,
  kStickyRasterizeGradient = 1u << 4,
  kStickyMsDeformAttn = 1u << 12,
  kStickyRoiAlignRotated = 1u << 26,
  kStickyRoiPool = 1u << 23,
  kStickyPsRoiAlign = 1u << 24,
  kStickyPsRoiPool = 1u << 25,
  kStickyCtcLoss = 1u << 29,
};

// A word in pinned host memory that every device can write. Allocated on first use, also while a
// stream is being captured.
unsigned* sticky_word();

__device__ inline void set_sticky(unsigned* sticky, StickyBit bit) {
  atomicOr_system(sticky, static_cast<unsigned>(bit));
}

}  // namespace truncdet
