// The matrices of weights of rotated RoIs, cells by bins, in one pool of memory: each is computed
// once, so that a tile does not compute it again for every group of channels.
#pragma once

#include "../roi_align_rotated_host.h"
#include "roi_align_statistics.cuh"

namespace truncdet {

// Two weights of one cell, and where their bins are in a row of floats, in bytes. An odd number is
// padded with a zero.
struct alignas(16) WeightPair {
  float first;
  int first_at;
  float second;
  int second_at;
};

// The pairs of one cell: first << kRunBits | number.
constexpr int kRunBits = 10;
constexpr unsigned kRunMask = (1u << kRunBits) - 1;
constexpr int kMaxRowBins = 2 * kRunMask;  // bins whose pairs such a number can count

// Matrices lie in one pool of this many bytes a RoI, whose blocks of 16 bytes go to whoever asks
// first. If a RoI gets none, the tiles of its image compute its weights: slower, the same bits.
constexpr int64_t kPoolBytesPerRoi = 24 << 10;
// Where the gradient is small, the pool takes no more than this of a cell.
constexpr int64_t kPoolBytesPerCell = 8;
constexpr int64_t kMaxPoolBlocks = int64_t(1) << 27;
// A box around more cells gets no matrix: its block would work long after all others.
constexpr int64_t kMaxMatrixCells = 1 << 14;

struct WeightPool {
  WeightPair* blocks;  // also four runs of cells each
  int64_t capacity;
  unsigned long long* used;
};

// The box seen by a tile, and where its matrix is: runs of all cells around the box, then pairs.
struct alignas(16) RotatedBox {
  float center_y, center_x, cosine, sine;
  float half_y, half_x;  // reach of the samples in the box's frame, rounding errors included
  int runs_at;           // in runs, i.e. words
  int pairs_at;          // in blocks, -1 without a matrix
};

// Blocks of the pool for all threads of a block, or -1.
__device__ inline int64_t reserve(const WeightPool& pool, int64_t blocks) {
  __shared__ long long place;
  if (threadIdx.x == 0) {
    unsigned long long seen = atomicAdd(pool.used, 0ull), assumed;
    do {
      assumed = seen;
      place = static_cast<long long>(assumed) + blocks <= pool.capacity
                  ? static_cast<long long>(assumed)
                  : -1;
      if (place >= 0) seen = atomicCAS(pool.used, assumed, assumed + blocks);
    } while (place >= 0 && seen != assumed);
  }
  __syncthreads();
  const int64_t result = place;
  __syncthreads();  // place may be written again
  return result;
}

// Puts a RoI's matrix into the pool. All threads of the block take part. Weights are computed
// twice, to count and to store them.
__device__ inline void build_matrix(const RotatedRoi<float>& roi, const IndexRange& rows,
                                    const IndexRange& columns, const WeightPool& pool, int* runs_at,
                                    int* pairs_at) {
  __shared__ int last_end;
  *runs_at = 0;
  *pairs_at = -1;
  const int width = columns.last - columns.first + 1;
  const int64_t cells = int64_t(rows.last - rows.first + 1) * width;
  if (rows.first > rows.last || width <= 0 || cells > kMaxMatrixCells ||
      roi.y.bins * roi.x.bins > kMaxRowBins) {
    return;
  }
  const int64_t place = reserve(pool, (cells + 3) / 4);
  if (place < 0) return;
  unsigned* const runs = reinterpret_cast<unsigned*>(pool.blocks + place);
  int total = 0;
  for (int base = 0; base < cells; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    int weights = 0;
    if (i < cells) {
      for_each_weight(roi, rows.first + i / width, columns.first + i % width,
                      [&](int, float) { ++weights; });
    }
    const int pairs = (weights + 1) / 2;
    const int end = total + block_sum_up_to(pairs);
    if (i < cells) runs[i] = static_cast<unsigned>(end - pairs) << kRunBits | pairs;
    if (threadIdx.x == kThreads - 1) last_end = end;
    __syncthreads();
    total = last_end;
    __syncthreads();
  }
  if (total >= 1 << (32 - kRunBits)) return;
  const int64_t first = reserve(pool, total);
  if (first < 0) return;
  for (int i = threadIdx.x; i < cells; i += kThreads) {
    const unsigned run = runs[i];
    WeightPair* target = pool.blocks + first + (run >> kRunBits);
    WeightPair pair{};
    bool half = false;
    for_each_weight(roi, rows.first + i / width, columns.first + i % width,
                    [&](int bin, float weight) {
                      if (half) {
                        pair.second = weight;
                        pair.second_at = 4 * bin;
                        *target++ = pair;
                      } else {
                        pair = {weight, 4 * bin, 0.f, 4 * bin};
                      }
                      half = !half;
                    });
    if (half) *target = pair;
  }
  *runs_at = static_cast<int>(4 * place);
  *pairs_at = static_cast<int>(first);
}

}  // namespace truncdet
