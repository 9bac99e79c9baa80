// What every operator that adds through atomics shares: integer adds, non-finite flags, the largest
// magnitude of a segment, and the final rounding. Nothing waits for the device: exponents stay in
// device memory, and buffers are zeroed by cudaMemsetAsync, which a CUDA graph can capture.
//
// A segment is a run of consecutive elements with one scale (an image, or a whole tensor); all
// segments of a launch have the same length.
#pragma once

#include "../accumulate.h"
#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {

// Cells per word of flags: 4 bits each, of which kSawNaN, kSawPlusInf and kSawMinusInf are used.
constexpr int kFlagsPerWord = 8;
constexpr int kFlagBits = 32 / kFlagsPerWord;
// Blocks along one segment, and segments in flight; loops cover the rest.
constexpr int64_t kMaxBlocksPerSegment = 1024;
constexpr int64_t kMaxSegmentBlocks = 65535;  // the hardware's limit on gridDim.y
// Independent loads a thread has under way while it looks for the maximum.
constexpr int kAmaxUnroll = 4;

// Signed addition by the unsigned instruction: the words are the same in two's complement.
// Wrap-around on the way is intended arithmetic: the head-room proves that every total fits.
__device__ __forceinline__ void add_int64(int64_t* address, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void max_word(uint32_t* address, uint32_t value) {
  atomicMax(address, value);
}
__device__ __forceinline__ void max_word(uint64_t* address, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void or_flags(uint32_t* flags, int64_t cell, uint32_t seen) {
  atomicOr(flags + cell / kFlagsPerWord, seen << (kFlagBits * (cell % kFlagsPerWord)));
}
__device__ __forceinline__ uint32_t read_flags(const uint32_t* flags, int64_t cell) {
  return (flags[cell / kFlagsPerWord] >> (kFlagBits * (cell % kFlagsPerWord))) & 7u;
}

// The buffers of one call, carved from one zeroed allocation. A member an operator keeps elsewhere
// may be replaced by its own pointer.
template <class C>
struct Accumulator {
  using Word = typename Format<C>::Word;
  int64_t* high = nullptr;        // [cells]
  int64_t* low = nullptr;         // [cells], or null with one limb
  Word* amax = nullptr;           // [segments] largest finite magnitude word
  uint32_t* nonfinite = nullptr;  // [segments] not 0 if the segment has a NaN or an infinity
  uint32_t* flags = nullptr;      // [cells] packed

  static int64_t bytes(int64_t cells, int64_t segments, bool two_limbs) {
    const int64_t flag_words = (cells + kFlagsPerWord - 1) / kFlagsPerWord;
    return (two_limbs ? 16 : 8) * cells + (static_cast<int64_t>(sizeof(Word)) + 4) * segments +
           4 * flag_words;
  }

  // `memory`: `bytes` zeroed bytes, aligned to 8.
  Accumulator(void* memory, int64_t cells, int64_t segments, bool two_limbs) {
    high = static_cast<int64_t*>(memory);
    low = two_limbs ? high + cells : nullptr;
    amax = reinterpret_cast<Word*>(high + (two_limbs ? 2 : 1) * cells);
    nonfinite = reinterpret_cast<uint32_t*>(amax + segments);
    flags = nonfinite + segments;
  }
  Accumulator() = default;

  // `contribution` is of values that `scale` has normalised.
  __device__ __forceinline__ void add(int64_t cell, const Scale<C>& scale, C contribution) const {
    const int64_t rounded = scale.quantise(contribution);
    add_int64(high + cell, rounded);
    if (low != nullptr) add_int64(low + cell, scale.quantise_rest(contribution, rounded));
  }
};

// Where the scale of a segment comes from: statistics on the device, and a head-room that is either
// the host's (`headroom`) or counted on the device as well (`headrooms`, one a segment). Where
// contributions are products, `second_amax` is that of the second factors.
template <class C>
struct ScaleSource {
  const typename Format<C>::Word* amax;
  int headroom;
  const int32_t* headrooms = nullptr;
  // Of a second factor, where contributions are of products: exponents of factors add up.
  const typename Format<C>::Word* second_amax = nullptr;

  __device__ __forceinline__ Scale<C> operator()(int64_t segment) const {
    const int second = second_amax != nullptr ? exponent_above<C>(second_amax[segment]) : 0;
    return Scale<C>(exponent_above<C>(amax[segment]) + second,
                    headrooms != nullptr ? headrooms[segment] : headroom);
  }
};

// Scale::normalise and quantise as three multiplications by powers of two. What normalise turns
// into +0, being below the smallest normal number, may stay a subnormal number here; either is far
// below half a unit of both limbs, so the integers are the same.
template <class C>
struct Quantiser {
  C first, second;  // 2^-e, in two factors because one may not be a normal number
  C unit;           // 2^(62-G)

  __device__ __forceinline__ explicit Quantiser(const Scale<C>& scale) : unit(scale.unit) {
    constexpr int kLow = Format<C>::kMinExponent, kHigh = Format<C>::kMaxExponent;
    const int wanted = -scale.exponent;
    const int fits = wanted < kLow ? kLow : (wanted > kHigh ? kHigh : wanted);
    first = power_of_two(C(0), fits);
    second = power_of_two(C(0), wanted - fits);
  }
  __device__ __forceinline__ C normalise(C value) const { return value * first * second; }
  __device__ __forceinline__ int64_t quantise(C contribution) const {
    return round_to_int64(contribution * unit);
  }
  __device__ __forceinline__ int64_t quantise_rest(C contribution, int64_t high) const {
    return round_to_int64((contribution * unit - static_cast<C>(high)) * unit);
  }
};

// Merges the statistics of one block into a segment's words. All threads of the block must call it.
template <class Word>
__device__ void merge_statistics(Word largest, bool nonfinite, Word* amax,
                                 uint32_t* any_nonfinite) {
  __shared__ Word of_warp[32];
  for (int lane = 16; lane > 0; lane /= 2) {
    const Word other = __shfl_xor_sync(0xffffffffu, largest, lane);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  const int seen = __syncthreads_or(nonfinite);
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < (blockDim.x + 31) / 32; ++warp) {
      largest = of_warp[warp] > largest ? of_warp[warp] : largest;
    }
    if (largest != 0) max_word(amax, largest);
    if (seen != 0) atomicOr(any_nonfinite, 1u);
  }
  __syncthreads();  // of_warp may be written again
}

template <class T>
struct AmaxParams {
  using Word = typename Format<typename Format<T>::Compute>::Word;
  const T* values;  // [segments, per_segment]
  int64_t segments, per_segment;
  Word* amax;           // [segments], zeroed
  uint32_t* nonfinite;  // [segments], zeroed
};

// kPack elements a load; the values are aligned and, but for the last segment, full packs.
template <class T, int kPack>
__global__ void amax_kernel(AmaxParams<T> p) {
  using C = typename Format<T>::Compute;
  using StoredWord = typename Format<T>::Word;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t packs = p.per_segment / kPack;
  for (int64_t segment = blockIdx.y; segment < p.segments; segment += gridDim.y) {
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

template <class T>
struct FinishParams {
  using C = typename Format<T>::Compute;
  Accumulator<C> sums;
  ScaleSource<C> scale;
  const T* existing;  // [segments, cells_per_segment], or null for +0; may be `out`
  T* out;             // [segments, cells_per_segment]
  int64_t segments, cells_per_segment;
};

template <class T>
__global__ void finish_kernel(FinishParams<T> p) {
  using C = typename Format<T>::Compute;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool two_limbs = p.sums.low != nullptr;
  for (int64_t segment = blockIdx.y; segment < p.segments; segment += gridDim.y) {
    const Scale<C> scale = p.scale(segment);
    const bool flagged = p.sums.nonfinite[segment] != 0;
    for (int64_t i = start; i < p.cells_per_segment; i += stride) {
      const int64_t cell = segment * p.cells_per_segment + i;
      const T existing =
          p.existing != nullptr ? p.existing[cell] : bit_copy<T>(typename Format<T>::Word(0));
      p.out[cell] = finish_cell<T>(existing, p.sums.high[cell], two_limbs ? p.sums.low[cell] : 0,
                                   two_limbs, flagged ? read_flags(p.sums.flags, cell) : 0u, scale);
    }
  }
}

// Grid of a kernel that walks segments along y and their elements along x.
inline dim3 segment_grid(int64_t segments, int64_t per_segment, int64_t per_thread = 1) {
  const int64_t wanted = (per_segment + kThreads * per_thread - 1) / (kThreads * per_thread);
  const int64_t x = wanted < kMaxBlocksPerSegment ? wanted : kMaxBlocksPerSegment;
  const int64_t y = segments < kMaxSegmentBlocks ? segments : kMaxSegmentBlocks;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// Finds the largest finite magnitude of every segment and whether it has non-finite values.
template <class T>
void launch_amax(const AmaxParams<T>& p, cudaStream_t stream) {
  if (p.segments == 0 || p.per_segment == 0) return;
  constexpr int kPack = kPackBytes / sizeof(T);
  const bool full = p.segments == 1 || p.per_segment % kPack == 0;
  if (full && is_aligned(p.values, kPackBytes)) {
    const dim3 grid = segment_grid(p.segments, p.per_segment, kAmaxUnroll * kPack);
    amax_kernel<T, kPack><<<grid, kThreads, 0, stream>>>(p);
  } else {
    const dim3 grid = segment_grid(p.segments, p.per_segment, kAmaxUnroll);
    amax_kernel<T, 1><<<grid, kThreads, 0, stream>>>(p);
  }
  TRUNCDET_LAUNCH_CHECK();
}

// Rounds every cell's sum to its final value.
template <class T>
void launch_finish(const FinishParams<T>& p, cudaStream_t stream) {
  if (p.segments == 0 || p.cells_per_segment == 0) return;
  const dim3 grid = segment_grid(p.segments, p.cells_per_segment);
  finish_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
