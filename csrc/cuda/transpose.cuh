// The final rounding for sums that lie channels last while the output lies channels first.
//
// With the channels side by side the atomics of a warp go to one run of memory; the transposition
// costs a tile of shared memory here, where every cell is read and written once anyway.
#pragma once

#include "accumulate.cuh"

namespace truncdet {

constexpr int kTransposeTile = 32;  // cells, and channels, of a tile

template <class T>
struct TransposedFinishParams {
  using C = typename Format<T>::Compute;
  Accumulator<C> sums;  // [segments, cells, channels]
  ScaleSource<C> scale;
  T* out;  // [segments, channels, cells]
  int64_t segments, channels, cells;
};

template <class T>
__global__ void transposed_finish_kernel(TransposedFinishParams<T> p) {
  using C = typename Format<T>::Compute;
  __shared__ T tile[kTransposeTile][kTransposeTile + 1];  // [channel][cell]
  const bool two_limbs = p.sums.low != nullptr;
  const int64_t across = (p.channels + kTransposeTile - 1) / kTransposeTile;
  const int64_t tiles = across * ((p.cells + kTransposeTile - 1) / kTransposeTile);
  for (int64_t segment = blockIdx.y; segment < p.segments; segment += gridDim.y) {
    const Scale<C> scale = p.scale(segment);
    const bool flagged = p.sums.nonfinite[segment] != 0;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      // t = cell tile * across + channel tile
      const int64_t first_cell = t / across * kTransposeTile;
      const int64_t first_channel = t % across * kTransposeTile;
      const int cells = static_cast<int>(min(p.cells - first_cell, int64_t(kTransposeTile)));
      const int channels =
          static_cast<int>(min(p.channels - first_channel, int64_t(kTransposeTile)));
      for (int i = threadIdx.x; i < cells * channels; i += blockDim.x) {
        const int cell = i / channels, channel = i % channels;
        const int64_t at =
            (segment * p.cells + first_cell + cell) * p.channels + first_channel + channel;
        // Flags lie where the results will.
        const int64_t to =
            (segment * p.channels + first_channel + channel) * p.cells + first_cell + cell;
        tile[channel][cell] =
            finish_cell<T>(T{}, p.sums.high[at], two_limbs ? p.sums.low[at] : 0, two_limbs,
                           flagged ? p.sums.flags.read(to) : 0u, scale);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kTransposeTile * channels; i += blockDim.x) {
        const int cell = i % kTransposeTile, channel = i / kTransposeTile;
        if (cell < cells) {
          p.out[(segment * p.channels + first_channel + channel) * p.cells + first_cell + cell] =
              tile[channel][cell];
        }
      }
      __syncthreads();
    }
  }
}

// Rounds every cell's sum to its final value, channels last to channels first.
template <class T>
void launch_transposed_finish(const TransposedFinishParams<T>& p, cudaStream_t stream) {
  if (p.segments == 0 || p.channels == 0 || p.cells == 0) return;
  const dim3 grid = segment_grid(p.segments, p.channels * p.cells, 4);
  transposed_finish_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
