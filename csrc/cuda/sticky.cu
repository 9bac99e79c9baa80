// The sticky word: which operators met an out-of-range index since somebody last looked.
#include <mutex>

#include "launch.cuh"

namespace truncdet {

unsigned* sticky_word() {
  static unsigned* word = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    // Allocating is forbidden for a capturing thread unless it says that it knows what it does.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    TRUNCDET_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    void* memory = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&memory, sizeof(unsigned), cudaHostAllocPortable | cudaHostAllocMapped);
    TRUNCDET_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    TRUNCDET_CUDA_CHECK(status);
    *static_cast<volatile unsigned*>(memory) = 0u;
    word = static_cast<unsigned*>(memory);
  });
  return word;
}

namespace {

// Reads and clears the word without waiting for the device.
int64_t take_sticky() { return __atomic_exchange_n(sticky_word(), 0u, __ATOMIC_ACQ_REL); }

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) { m.def("_take_sticky() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(truncdet, CompositeExplicitAutograd, m) {
  m.impl("_take_sticky", TORCH_BOX(&truncdet::take_sticky));
}
