// What comes before the adding, in one launch: sums become zero, and each segment's largest
// magnitude and non-finite values are found.
#pragma once

#include "accumulate.cuh"

namespace truncdet {

// Independent loads a thread has under way while it looks for the maximum.
constexpr int kAmaxUnroll = 4;

template <class T>
struct AmaxParams {
  using Word = typename Format<typename Format<T>::Compute>::Word;
  const T* values;  // [segments, per_segment]
  int64_t segments, per_segment;
  Word* amax;           // [segments], zeroed
  uint32_t* nonfinite;  // [segments], zeroed
  dim3 grid = {};       // set by launch_prepare
  bool packed = false;  // likewise

  __host__ __device__ unsigned blocks() const { return segments == 0 ? 0 : grid.x * grid.y; }
};

// What block (x, y) of p.grid does.
// kPack elements a load; the values are aligned and, but for the last segment, full packs.
template <class T, int kPack>
__device__ void find_amax(const AmaxParams<T>& p, int64_t x, int64_t y) {
  using C = typename Format<T>::Compute;
  using StoredWord = typename Format<T>::Word;
  const int64_t stride = static_cast<int64_t>(p.grid.x) * blockDim.x;
  const int64_t start = x * blockDim.x + threadIdx.x;
  const int64_t packs = p.per_segment / kPack;
  for (int64_t segment = y; segment < p.segments; segment += p.grid.y) {
    const T* values = p.values + segment * p.per_segment;
    StoredWord largest = 0;
    bool nonfinite = false;
    const auto see = [&](T value) {
      const StoredWord word = magnitude_word<T>(value);
      const bool finite = word < infinity_word<T>();
      nonfinite |= !finite;
      largest = finite && word > largest ? word : largest;
    };
    for (int64_t i = start; i < packs; i += kAmaxUnroll * stride) {
      Pack<T, kPack> loaded[kAmaxUnroll];
#pragma unroll
      for (int j = 0; j < kAmaxUnroll; ++j) {
        // Past the end the first pack is seen again, which changes nothing.
        const int64_t at = i + j * stride;
        loaded[j] = load_pack<T, kPack>(values + (at < packs ? at : i) * kPack);
      }
#pragma unroll
      for (int j = 0; j < kAmaxUnroll; ++j) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) see(loaded[j].at[k]);
      }
    }
    for (int64_t i = packs * kPack + start; i < p.per_segment; i += stride) see(values[i]);
    // Words are ordered as magnitudes in every format, so widening could wait until here.
    merge_statistics(magnitude_word<C>(widen(bit_copy<T>(largest))), nonfinite, p.amax + segment,
                     p.nonfinite + segment);
  }
}

// Zeros by `threads` threads of which this one is number `thread`; 16-byte alignment.
__device__ __forceinline__ void zero_bytes(char* memory, int64_t bytes, int64_t thread,
                                           int64_t threads) {
  uint4* const packs = reinterpret_cast<uint4*>(memory);
#pragma unroll 4
  for (int64_t i = thread; i < bytes / 16; i += threads) packs[i] = make_uint4(0, 0, 0, 0);
  if (thread < bytes % 16) memory[bytes / 16 * 16 + thread] = 0;
}

// Memory that becomes zero.
struct Zeros {
  char* memory;
  int64_t bytes;

  unsigned blocks() const { return blocks_for(bytes / 64) < 4096 ? blocks_for(bytes / 64) : 4096; }
  __device__ void operator()(unsigned block, unsigned blocks) const {
    zero_bytes(memory, bytes, int64_t(block) * kThreads + threadIdx.x, int64_t(blocks) * kThreads);
  }
};

template <class T, class W>
struct PrepareParams {
  AmaxParams<T> first;
  AmaxParams<W> second;  // of no segments where values have no second factor
  Zeros zeros;
  const uint32_t* nonfinite;  // [segments], of both
  int64_t segments;
  uint32_t* finished;
  Flags flags;
  int64_t cells;  // of the output, for the flags
};

template <class T>
__device__ __forceinline__ void find_amax(const AmaxParams<T>& p, unsigned block) {
  const unsigned y = block / p.grid.x, x = block - y * p.grid.x;
  if (p.packed) {
    find_amax<T, kPackBytes / sizeof(T)>(p, x, y);
  } else {
    find_amax<T, 1>(p, x, y);
  }
}

// Blocks that look at values come first, since they wait longest. The last of them clears the flags
// if there is need: one block is slow at it, but steps with a NaN or an infinity are few.
template <class T, class W>
__global__ void __launch_bounds__(kThreads) prepare_kernel(PrepareParams<T, W> p) {
  const unsigned first = p.first.blocks(), looking = first + p.second.blocks();
  if (blockIdx.x >= looking) return p.zeros(blockIdx.x - looking, gridDim.x - looking);
  if (blockIdx.x < first) {
    find_amax(p.first, blockIdx.x);
  } else {
    find_amax(p.second, blockIdx.x - first);
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();  // the statistics, merged by this thread, before the count
    is_last = atomicAdd(p.finished, 1u) + 1 == looking;
  }
  __syncthreads();
  if (!is_last) return;
  bool any = false;
  for (int64_t i = threadIdx.x; i < p.segments; i += kThreads) any |= __ldcg(p.nonfinite + i) != 0;
  if (__syncthreads_or(any)) {
    zero_bytes(p.flags.output, p.cells * p.flags.element, threadIdx.x, kThreads);
  }
}

template <class T>
void plan_amax(AmaxParams<T>* p) {
  if (p->segments == 0 || p->per_segment == 0) {
    p->segments = 0;
    return;
  }
  constexpr int kPack = kPackBytes / sizeof(T);
  p->packed =
      (p->segments == 1 || p->per_segment % kPack == 0) && is_aligned(p->values, kPackBytes);
  p->grid = segment_grid(p->segments, p->per_segment, kAmaxUnroll * (p->packed ? kPack : 1));
}

// `sums`: the statistics of `segments` segments, and the flags of `cells` cells. What `zeros` names
// becomes zero, too.
template <class T, class W, class C>
void launch_prepare(const Accumulator<C>& sums, int64_t cells, int64_t segments, const Zeros& zeros,
                    AmaxParams<T> first, AmaxParams<W> second, cudaStream_t stream) {
  plan_amax(&first);
  plan_amax(&second);
  TRUNCDET_CUDA_CHECK(
      cudaMemsetAsync(sums.amax, 0, Accumulator<C>::statistics_bytes(segments), stream));
  const unsigned blocks = first.blocks() + second.blocks() + (zeros.bytes > 0 ? zeros.blocks() : 0);
  if (blocks == 0) return;
  prepare_kernel<T, W><<<blocks, kThreads, 0, stream>>>(
      {first, second, zeros, sums.nonfinite, segments, sums.finished, sums.flags, cells});
  TRUNCDET_LAUNCH_CHECK();
}

// Sums that lie before their statistics become zero, in both limbs.
template <class T, class W, class C>
void launch_prepare(const Accumulator<C>& sums, int64_t cells, int64_t segments,
                    const AmaxParams<T>& first, const AmaxParams<W>& second, cudaStream_t stream) {
  const Zeros zeros{reinterpret_cast<char*>(sums.high),
                    Accumulator<C>::sum_bytes(cells, sums.low != nullptr)};
  launch_prepare(sums, cells, segments, zeros, first, second, stream);
}

}  // namespace truncdet
