// Digests of words on CUDA: one pass at the speed of the memory, no host synchronisation.
#include "../digest.h"

#include "launch.cuh"

namespace truncdet {
namespace {

constexpr int kVectorBytes = 16;
constexpr int64_t kVectorsPerThread = 4;
constexpr int64_t kMaxDigestBlocks = 2048;

template <class T>
struct alignas(kVectorBytes) Words {
  T word[kVectorBytes / sizeof(T)];
};

// Words before `begin` and after the last whole vector are taken one by one; the rest in loads of
// 16 bytes.
template <class T>
__global__ void digest_kernel(const T* words, int64_t count, int64_t start, int64_t begin,
                              int64_t vectors, unsigned long long* sum) {
  constexpr int kEach = kVectorBytes / sizeof(T);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  uint64_t total = 0;
  const Words<T>* whole = reinterpret_cast<const Words<T>*>(words + begin);
  for (int64_t at = thread; at < vectors; at += stride) {
    const Words<T> loaded = whole[at];
    for (int i = 0; i < kEach; ++i)
      total += digest_term(loaded.word[i], start + begin + at * kEach + i);
  }
  const int64_t end = begin + vectors * kEach, single = begin + (count - end);
  for (int64_t at = thread; at < single; at += stride) {
    const int64_t i = at < begin ? at : end + (at - begin);
    total += digest_term(words[i], start + i);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_down_sync(0xffffffffu, static_cast<unsigned long long>(total), offset);
  }
  __shared__ unsigned long long block;
  if (threadIdx.x == 0) block = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&block, static_cast<unsigned long long>(total));
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(sum, block);
}

void digest_words_cuda(Tensor words, Tensor sums, int64_t slot, int64_t start) {
  check_digest(words, sums, slot, start);
  const int64_t count = words.numel();
  if (count == 0) return;
  const DeviceGuard guard(words.get_device_index());
  const cudaStream_t stream = current_stream(words);
  auto* sum = reinterpret_cast<unsigned long long*>(mutable_data<int64_t>(sums)) + slot;
  TRUNCDET_DISPATCH_WORDS(words.element_size(), [&] {
    constexpr int64_t kEach = kVectorBytes / sizeof(word_t);
    const word_t* from = const_data<word_t>(words);
    // A view may start anywhere, but at a multiple of its own element.
    const int64_t past = reinterpret_cast<uintptr_t>(from) % kVectorBytes / sizeof(word_t);
    const int64_t lead = past == 0 ? 0 : kEach - past;
    const int64_t begin = lead < count ? lead : count;
    const int64_t vectors = (count - begin) / kEach;
    const int64_t items = vectors > 0 ? vectors / kVectorsPerThread + 1 : count;
    const int64_t wanted = (items + kThreads - 1) / kThreads;
    const int64_t blocks = wanted < kMaxDigestBlocks ? wanted : kMaxDigestBlocks;
    digest_kernel<word_t><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
        from, count, start, begin, vectors, sum);
  });
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_digest_words", TORCH_BOX(&truncdet::digest_words_cuda));
}
