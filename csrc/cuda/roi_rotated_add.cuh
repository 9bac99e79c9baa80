// Adding one RoI to a row of a tile: the inner loop of rotated RoIAlign's backward.
#pragma once

#include "roi_rotated_hits.cuh"

namespace truncdet {

// What a warp holds of a hit: lane x the run of cell x of its row, lane i the row's pair i.
struct RowWeights {
  unsigned run;
  WeightPair pair;
};

__device__ __forceinline__ unsigned load_run(const WeightPool& pool, const RotatedHit& hit) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const bool mine = hit.pairs_at >= 0 & row >= hit.begin_y() & row < hit.end_y() &
                    lane >= hit.begin_x() & lane < hit.end_x();
  const unsigned* runs = reinterpret_cast<const unsigned*>(pool.blocks);
  return mine ? runs[hit.runs_at + row * hit.width + lane] : 0u;
}
__device__ __forceinline__ WeightPair load_pair(const WeightPool& pool, const RotatedHit& hit,
                                                unsigned run) {
  const int lane = threadIdx.x % 32;
  const unsigned begin = __shfl_sync(0xffffffffu, run, hit.begin_x()) >> kRunBits;
  const unsigned last = __shfl_sync(0xffffffffu, run, hit.end_x() - 1);
  const int number = static_cast<int>((last >> kRunBits) + (last & kRunMask) - begin);
  return lane < number ? pool.blocks[hit.pairs_at + static_cast<int>(begin) + lane] : WeightPair{};
}

// Sums over bins of one cell: contributions, or flags as float words.
template <int kPerLane, bool kFlags>
struct CellSum {
  float at[kPerLane];

  // `values`: the lane's gradient bins, `next` bytes further those of its second channel; `offset`:
  // of the bin, in bytes.
  __device__ __forceinline__ void add(float weight, const char* values, int offset, int next) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float value = *reinterpret_cast<const float*>(values + offset + i * next);
      if constexpr (kFlags) {
        if (weight != 0.f) {
          at[i] = bit_copy<float>(bit_copy<unsigned>(at[i]) | bit_copy<unsigned>(value));
        }
      } else {
        // A weight of zero meets a finite value: nothing is added.
        at[i] += weight * value;
      }
    }
  }
};

// A cell of a RoI without a matrix. Rare, and kept out of the hot code.
template <int kPerLane, bool kFlags>
static __device__ __noinline__ CellSum<kPerLane, kFlags> compute_cell(const RotatedRoi<float>& roi,
                                                                      int y, int x,
                                                                      const char* values,
                                                                      int next) {
  CellSum<kPerLane, kFlags> sum{};
  for_each_weight(roi, y, x,
                  [&](int bin, float weight) { sum.add(weight, values, 4 * bin, next); });
  return sum;
}

// Adds one hit to the warp's row. `slot` holds its gradient bins, `waiting` the row's pairs.
template <class T, int kPerLane, int kWidth, Pass kPass>
__device__ __forceinline__ void add_hit(const RotatedParams<T>& params, const GatherTile& tile,
                                        const RotatedHit& hit, const float* slot,
                                        const RowWeights& row, WeightPair* waiting,
                                        int64_t (&sums)[kPerLane][kWidth],
                                        unsigned (&flags)[kPerLane][kWidth]) {
  constexpr bool kFlags = kPass == Pass::kFlags;
  const GatherPlan& plan = params.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < hit.begin_y() || warp >= hit.end_y()) return;
  const int pad_shift = __ffs(plan.pad_channels) - 1;  // a power of two
  // To the lane's second channel.
  const int next = 4 * (32 * plan.bins + (32 >> pad_shift));
  const char* values = reinterpret_cast<const char*>(slot + lane * plan.bins + (lane >> pad_shift));
  const auto finish = [&](const CellSum<kPerLane, kFlags>& sum, auto x) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if constexpr (kFlags) {
        flags[i][decltype(x)::value] |= bit_copy<unsigned>(sum.at[i]);
      } else {
        sums[i][decltype(x)::value] += round_to_int64(sum.at[i] * tile.unit);
      }
    }
  };
  if (kPass != Pass::kMatrices && hit.pairs_at < 0) {
    unrolled<kWidth>([&](auto x) {
      if (x < hit.begin_x() || x >= hit.end_x()) return;
      finish(compute_cell<kPerLane, kFlags>(params.boxes[hit.roi], tile.y + warp, tile.x + x,
                                            values, next),
             x);
    });
    return;
  }
  waiting[lane] = row.pair;
  __syncwarp();
  const unsigned begin = __shfl_sync(0xffffffffu, row.run, hit.begin_x()) >> kRunBits;
  const WeightPair* const beyond = params.pool.blocks + (hit.pairs_at + static_cast<int>(begin));
  unrolled<kWidth>([&](auto x) {
    const unsigned run = __shfl_sync(0xffffffffu, row.run, decltype(x)::value);
    const int number = static_cast<int>(run & kRunMask);
    if (number == 0) return;
    const int first = static_cast<int>((run >> kRunBits) - begin);
    CellSum<kPerLane, kFlags> sum{};
    // The loop stays a loop: the unrolled copies of this must fit the instruction cache.
#pragma unroll 1
    for (int i = first; i < first + number; ++i) {
      const WeightPair pair = i < kRowPairs ? waiting[i] : beyond[i];
      sum.add(pair.first, values, pair.first_at, next);
      sum.add(pair.second, values, pair.second_at, next);
    }
    finish(sum, x);
  });
  __syncwarp();  // `waiting` may be written again
}

template <class T, int kPerLane, bool kFlags>
__device__ __forceinline__ void load_values(const RotatedParams<T>& params, const GatherTile& tile,
                                            const RotatedHit* hits, int size, float* slots) {
  constexpr int kGroup = 32 * kPerLane;
  const GatherPlan& plan = params.plan;
  for (int b = 0; b < size; ++b) {
    float* slot = slots + b * plan.slot_floats;
    const T* source =
        params.grad + (int64_t(hits[b].roi) * params.shape.channels + tile.channel) * plan.bins;
    if constexpr (kFlags) {
      load_converted<kGroup>(source, tile.channels, plan, slot, FlagWord());
    } else {
      if constexpr (std::is_same_v<T, float>) {
        if (tile.folded) {
          load_raw<kGroup>(source, tile.channels, 0, plan.bins, plan, slot);
          continue;
        }
      }
      load_converted<kGroup>(source, tile.channels, plan, slot, Normalise{tile.scale});
    }
  }
}

}  // namespace truncdet
