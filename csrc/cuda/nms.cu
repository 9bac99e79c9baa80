// Non-maximum suppression on CUDA. First every pair of boxes is compared: word j of box i has a bit
// for each of the boxes 64 j .. 64 j + 63 that come after i and that i would drop. Then one block
// goes through the boxes 64 at a time: which of them stay depends on the words they have of each
// other, and those that stay drop later ones by the rest of their words.
#include "../nms.h"

#include "launch.cuh"

namespace truncdet {
namespace {

constexpr int kBits = 64;  // boxes of a word
constexpr int kKeepThreads = 512;
constexpr int kSharedWords = 2048;
constexpr int64_t kMaxRows = 65535;  // the hardware's limit on gridDim.y

template <class T>
struct NmsParams {
  const T* boxes;         // [count, 4] in descending order of scores
  const int64_t* groups;  // [count], or null
  int64_t count, words;   // words of a box
  double threshold;
  uint64_t* drops;  // [count, words]; word j of box i is written for j >= i / 64 only
  uint64_t* gone;   // [words] where shared memory has no room for them
  bool* keep;       // [count], zeroed
};

// A block compares 64 boxes, a thread each, with 64 others.
template <class T>
__global__ void __launch_bounds__(kBits) compare_kernel(NmsParams<T> p) {
  using C = typename Format<T>::Compute;
  __shared__ Box<C> others[kBits];
  __shared__ int64_t groups[kBits];
  for (int64_t row = blockIdx.y; row < p.words; row += gridDim.y) {
    for (int64_t word = row + blockIdx.x; word < p.words; word += gridDim.x) {
      const int64_t i = row * kBits + threadIdx.x, loaded = word * kBits + threadIdx.x;
      __syncthreads();  // the turn before has been read
      if (loaded < p.count) {
        others[threadIdx.x] = load_box(p.boxes, loaded);
        groups[threadIdx.x] = p.groups != nullptr ? p.groups[loaded] : 0;
      }
      __syncthreads();
      if (i >= p.count) continue;
      const Box<C> own = load_box(p.boxes, i);
      const int64_t group = p.groups != nullptr ? p.groups[i] : 0;
      const int64_t left = p.count - word * kBits;
      const int last = static_cast<int>(left < kBits ? left : kBits);
      uint64_t bits = 0;
      for (int j = word == row ? static_cast<int>(threadIdx.x) + 1 : 0; j < last; ++j) {
        if (groups[j] == group && overlaps(own, others[j], p.threshold)) bits |= uint64_t(1) << j;
      }
      p.drops[i * p.words + word] = bits;
    }
  }
}

// One block. Thread 0 decides which of 64 boxes stay while others fetch what it needs next.
template <class T>
__global__ void __launch_bounds__(kKeepThreads) keep_kernel(NmsParams<T> p) {
  __shared__ uint64_t own[2][kBits];  // the words that the 64 boxes of a turn have of each other
  __shared__ uint64_t shared_gone[kSharedWords];
  __shared__ int kept[kBits];
  __shared__ int kept_count;
  uint64_t* gone = p.words <= kSharedWords ? shared_gone : p.gone;
  for (int64_t word = threadIdx.x; word < p.words; word += blockDim.x) gone[word] = 0;
  const auto fetch = [&](int64_t row, int j) {
    const int64_t i = row * kBits + j;
    if (j >= 0 && j < kBits && i < p.count) own[row % 2][j] = p.drops[i * p.words + row];
  };
  fetch(0, static_cast<int>(threadIdx.x));
  __syncthreads();
  for (int64_t row = 0; row < p.words; ++row) {
    if (threadIdx.x == 0) {
      const int64_t left = p.count - row * kBits;
      uint64_t alive = ~gone[row];
      if (left < kBits) alive &= (uint64_t(1) << left) - 1;
      int count = 0;
      while (alive != 0) {
        const int j = __ffsll(static_cast<long long>(alive)) - 1;
        kept[count++] = j;
        alive &= ~(own[row % 2][j] | uint64_t(1) << j);
      }
      kept_count = count;
    }
    fetch(row + 1, static_cast<int>(threadIdx.x) - 32);  // not by the warp of thread 0
    __syncthreads();
    const int count = kept_count;
    for (int m = threadIdx.x; m < count; m += blockDim.x) p.keep[row * kBits + kept[m]] = true;
    for (int64_t word = row + 1 + threadIdx.x; word < p.words; word += blockDim.x) {
      uint64_t found = gone[word];
#pragma unroll 8
      for (int m = 0; m < count; ++m) {
        found |= p.drops[(row * kBits + kept[m]) * p.words + word];
      }
      gone[word] = found;
    }
    __syncthreads();  // before `kept` changes and the next word of `gone` is read
  }
}

Tensor nms_keep_cuda(Tensor boxes, std::optional<Tensor> groups, double threshold) {
  const int64_t count = nms_boxes(boxes, groups);
  const DeviceGuard guard(boxes.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  if (groups.has_value()) groups = torch::stable::contiguous(*groups);
  Tensor keep = torch::stable::new_empty(boxes, {&count, 1}, ScalarType::Bool);
  if (count == 0) return keep;
  const int64_t words = (count + kBits - 1) / kBits;
  const int64_t needed = (count + 1) * words;
  const Tensor memory = torch::stable::new_empty(boxes, {&needed, 1}, ScalarType::Long);
  uint64_t* drops = mutable_data<uint64_t>(memory);
  const cudaStream_t stream = current_stream(boxes);
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(mutable_data<bool>(keep), 0, count, stream));
  const dim3 grid(static_cast<unsigned>(words < kMaxRows ? words : kMaxRows),
                  static_cast<unsigned>(words < kMaxRows ? words : kMaxRows));
  TRUNCDET_DISPATCH(boxes.scalar_type(), "nms", [&] {
    const NmsParams<scalar_t> params{const_data<scalar_t>(boxes),
                                     groups.has_value() ? const_data<int64_t>(*groups) : nullptr,
                                     count,
                                     words,
                                     threshold,
                                     drops,
                                     drops + count * words,
                                     mutable_data<bool>(keep)};
    compare_kernel<scalar_t><<<grid, kBits, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
    keep_kernel<scalar_t><<<1, kKeepThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return keep;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_nms_keep", TORCH_BOX(&truncdet::nms_keep_cuda));
}
