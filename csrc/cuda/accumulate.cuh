// What every operator that adds through atomics shares: integer adds, non-finite flags, the largest
// magnitude of a segment, and the final rounding. Nothing waits for the device: exponents stay in
// device memory, and a CUDA graph can capture all of it.
//
// A segment is a run of consecutive elements with one scale (an image, or a whole tensor); all
// segments of a launch have the same length.
#pragma once

#include "../accumulate.h"
#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {

// Blocks along one segment, and segments in flight; loops cover the rest.
constexpr int64_t kMaxBlocksPerSegment = 1024;
constexpr int64_t kMaxSegmentBlocks = 65535;  // the hardware's limit on gridDim.y

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

// Non-finite contributions (kSawNaN, kSawPlusInf, kSawMinusInf) are noted in the very element of
// the output that they reach: its memory is there anyway, and the final rounding, which reads the
// note, is the first to need it. It is cleared beforehand only if there is anything to note.
struct Flags {
  char* output = nullptr;
  int element = 0;  // bytes: 2, 4 or 8

  // T: the output's type, or any of its size.
  template <class T>
  __device__ __forceinline__ void add(int64_t cell, uint32_t seen) const {
    if constexpr (sizeof(T) == 2) {
      // The neighbour in the word may lie beyond the output.
      auto* const at = reinterpret_cast<unsigned short*>(output) + cell;
      unsigned short old = *at, assumed;
      do {
        assumed = old;
        old = atomicCAS(at, assumed, static_cast<unsigned short>(assumed | seen));
      } while (old != assumed);
    } else {
      atomicOr(reinterpret_cast<uint32_t*>(output + cell * sizeof(T)), seen);
    }
  }
  __device__ __forceinline__ uint32_t read(int64_t cell) const {
    return static_cast<uint32_t>(output[cell * element]) & 7u;  // the lowest byte comes first
  }
};

// The buffers of one call, carved from one allocation. A member an operator keeps elsewhere may be
// replaced by its own pointer.
template <class C>
struct Accumulator {
  using Word = typename Format<C>::Word;
  int64_t* high = nullptr;        // [cells]
  int64_t* low = nullptr;         // [cells], or null with one limb
  Word* amax = nullptr;           // [segments] largest finite magnitude word
  uint32_t* nonfinite = nullptr;  // [segments] not 0 if the segment has a NaN or an infinity
  uint32_t* finished = nullptr;   // blocks that have looked at their part of the values
  Flags flags;

  static int64_t sum_bytes(int64_t cells, bool two_limbs) { return (two_limbs ? 16 : 8) * cells; }
  // Of what is behind the sums.
  static int64_t statistics_bytes(int64_t segments) {
    return (static_cast<int64_t>(sizeof(Word)) + 4) * segments + 4;
  }
  static int64_t bytes(int64_t cells, int64_t segments, bool two_limbs) {
    return sum_bytes(cells, two_limbs) + statistics_bytes(segments);
  }

  // `memory`: `bytes` bytes, aligned to 8. `out`: where the results will be, an element a cell.
  Accumulator(void* memory, int64_t cells, int64_t segments, bool two_limbs, const Tensor& out) {
    high = static_cast<int64_t*>(memory);
    low = two_limbs ? high + cells : nullptr;
    amax = reinterpret_cast<Word*>(high + (two_limbs ? 2 : 1) * cells);
    nonfinite = reinterpret_cast<uint32_t*>(amax + segments);
    finished = nonfinite + segments;
    flags = {static_cast<char*>(out.mutable_data_ptr()), static_cast<int>(out.element_size())};
  }
  Accumulator() = default;

  // `contribution` is of values that `scale` has normalised. For float64 two limbs, else one: the
  // operators that offer more, the scatter family, add by their own Adder.
  __device__ __forceinline__ void add(int64_t cell, const Scale<C>& scale, C contribution) const {
    const int64_t rounded = scale.quantise(contribution);
    add_int64(high + cell, rounded);
    if constexpr (std::is_same_v<C, double>) {
      add_int64(low + cell, scale.quantise_rest(contribution, rounded));
    }
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

// Grid of a kernel that walks segments along y and their elements along x.
inline dim3 segment_grid(int64_t segments, int64_t per_segment, int64_t per_thread = 1) {
  const int64_t wanted = (per_segment + kThreads * per_thread - 1) / (kThreads * per_thread);
  const int64_t x = wanted < kMaxBlocksPerSegment ? wanted : kMaxBlocksPerSegment;
  const int64_t y = segments < kMaxSegmentBlocks ? segments : kMaxSegmentBlocks;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <class T>
struct FinishParams {
  using C = typename Format<T>::Compute;
  Accumulator<C> sums;
  ScaleSource<C> scale;
  const T* existing;  // [segments, cells_per_segment], or null for +0; not `out`
  T* out;             // [segments, cells_per_segment]
  int64_t segments, cells_per_segment;
};

// Rounds kCells neighbours, whose addresses are aligned to so many. kFresh: nothing exists, and
// there is one limb; the integers of the long way would cost registers.
template <class T, int kCells, bool kFresh>
__device__ __forceinline__ void finish_cells(const FinishParams<T>& p, int64_t cell,
                                             const Scale<typename Format<T>::Compute>& scale,
                                             bool flagged) {
  const T zero = bit_copy<T>(typename Format<T>::Word(0));
  const Pack<int64_t, kCells> high = load_pack<int64_t, kCells>(p.sums.high + cell);
  Pack<T, kCells> result;
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    const uint32_t flags = flagged ? p.sums.flags.read(cell + j) : 0u;
    if constexpr (kFresh) {
      result.at[j] = finish_cell<T>(zero, high.at[j], 0, false, flags, scale);
    } else {
      const bool two_limbs = p.sums.low != nullptr;
      result.at[j] = finish_cell<T>(p.existing != nullptr ? p.existing[cell + j] : zero, high.at[j],
                                    two_limbs ? p.sums.low[cell + j] : 0, two_limbs, flags, scale);
    }
  }
  *reinterpret_cast<Pack<T, kCells>*>(p.out + cell) = result;
}

template <class T, int kCells, bool kFresh>
__global__ void __launch_bounds__(kThreads) finish_kernel(FinishParams<T> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * kCells;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCells;
  for (int64_t segment = blockIdx.y; segment < p.segments; segment += gridDim.y) {
    const Scale<typename Format<T>::Compute> scale = p.scale(segment);
    const bool flagged = p.sums.nonfinite[segment] != 0;
    for (int64_t i = start; i < p.cells_per_segment; i += stride) {
      finish_cells<T, kCells, kFresh>(p, segment * p.cells_per_segment + i, scale, flagged);
    }
  }
}

// Cells whose results one store takes.
template <class T>
constexpr int kFinishCells = kPackBytes / static_cast<int>(sizeof(T));

// Rounds every cell's sum to its final value.
template <class T>
void launch_finish(const FinishParams<T>& p, cudaStream_t stream) {
  if (p.segments == 0 || p.cells_per_segment == 0) return;
  const auto launch = [&](auto kernel, int cells) {
    kernel<<<segment_grid(p.segments, p.cells_per_segment, cells), kThreads, 0, stream>>>(p);
  };
  constexpr int kCells = kFinishCells<T>;
  const bool fresh = p.existing == nullptr && p.sums.low == nullptr;
  if (fresh && p.cells_per_segment % kCells == 0 && is_aligned(p.out, kPackBytes)) {
    launch(finish_kernel<T, kCells, true>, kCells);
  } else if (fresh) {
    launch(finish_kernel<T, 1, true>, 1);
  } else {
    launch(finish_kernel<T, 1, false>, 1);
  }
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
