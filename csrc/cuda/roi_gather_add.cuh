// Adding a batch of RoIs from shared memory to the tile's int64 sums: the inner loop.
#pragma once

#include "roi_gather_plan.cuh"

namespace truncdet {

// Reads shared memory by its 32-bit address plus a constant: one register an address and no more,
// where pointers would be recomputed. Volatile keeps the reads between the barriers they belong to.
template <int kOffset>
__device__ __forceinline__ float shared_float(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1+%2];" : "=f"(value) : "r"(address), "n"(kOffset));
  return value;
}
__device__ __forceinline__ float4 shared_float4(unsigned address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}
template <int kOffset>
__device__ __forceinline__ BinRun shared_run(unsigned address) {
  BinRun run;
  asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(run.word) : "r"(address), "n"(kOffset));
  return run;
}
// f(integral_constant) for 0, 1, ... N - 1: a loop whose index is a constant.
template <int N, class F, int kIndex = 0>
__device__ __forceinline__ void unrolled(const F& f) {
  if constexpr (kIndex < N) {
    f(std::integral_constant<int, kIndex>());
    unrolled<N, F, kIndex + 1>(f);
  }
}

// Adds one batch: sums[i][x] for channel lane + 32 i of the group and cell x of the warp's row.
// `slots` is the shared address of the batch's first slot.
template <int kPerLane, int kWidth, bool kFlags>
__device__ __forceinline__ void add_batch(const GatherPlan& plan, const Hit* hits, int size,
                                          unsigned slots, int pooled_height, int pooled_width,
                                          float unit, int64_t (&sums)[kPerLane][kWidth],
                                          unsigned (&flags)[kPerLane][kWidth]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // To the lane's second channel.
  const unsigned next = 4 * (32 * plan.bins + (32 >> plan.pad_shift));
  const unsigned row_bytes = 4 * pooled_width;
  const unsigned lane_at = 4 * (lane * plan.bins + (lane >> plan.pad_shift));
  for (int b = 0; b < size; ++b) {
    const Hit hit = hits[b];
    if (warp < hit.begin_y || warp >= hit.end_y) continue;
    const unsigned slot = slots + 4 * b * plan.slot_floats;
    const unsigned weights = slot + 4 * plan.value_floats;
    const unsigned runs = weights + 4 * plan.runs_at;
    const bool table = hit.stride_x != 0;
    const unsigned column_bytes = 4 * (table ? hit.stride_x : padded_bins(pooled_width));
    const unsigned row_stride = 4 * (table ? hit.stride_y : padded_bins(pooled_height));
    const BinRun row = shared_run<4 * kWidth>(runs + 4 * warp);
    const int row_number = row.number();
    if (row_number == 0) continue;
    unsigned row_weights = weights + 4 * plan.row_at + warp * row_stride;
    unsigned first_line = slot + lane_at + row.first() * row_bytes;
    unsigned column_weights = weights, column_runs = runs;
    // Opaque to the compiler, which would otherwise compute them again for every cell.
    asm volatile("" : "+r"(row_weights), "+r"(first_line), "+r"(column_weights), "+r"(column_runs));
    const unsigned columns = (1u << hit.end_x) - (1u << hit.begin_x);
    unrolled<kWidth>([&](auto index) {
      constexpr int x = decltype(index)::value;
      const unsigned own_weights = column_weights;
      column_weights += column_bytes;
      if ((columns >> x & 1u) == 0) return;
      const BinRun column = shared_run<4 * x>(column_runs);
      const int column_number = column.number();
      const float4 w = shared_float4(own_weights);
      unsigned line = first_line + 4 * column.first();
      float contribution[kPerLane] = {};
      const auto term = [&](float weight, unsigned at, auto offset) {
        constexpr int kOffset = decltype(offset)::value;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const float value = shared_float<kOffset>(at + i * next);
          if constexpr (kFlags) {
            if (weight != 0.f) flags[i][x] |= bit_copy<unsigned>(value);
          } else {
            contribution[i] += weight * value;
          }
        }
      };
      const auto pair = [&](float v, float a, float b, unsigned at, auto offset) {
        constexpr int kOffset = decltype(offset)::value;
        term(v * a, at, offset);
        term(v * b, at, std::integral_constant<int, kOffset + 4>());
      };
      constexpr std::integral_constant<int, 0> kLeft;
      constexpr std::integral_constant<int, 8> kRight;
      // The loops stay loops: the unrolled copies of this must fit the instruction cache.
      unsigned row_weight = row_weights;
#pragma unroll 1
      for (int p = row_number; p > 0; --p, line += row_bytes, row_weight += 4) {
        const float v = shared_float<0>(row_weight);
        // A weight of zero meets a finite value: nothing is added, so two or four terms are as good
        // as the exact number.
        pair(v, w.x, w.y, line, kLeft);
        if (column_number > 2) {
          pair(v, w.z, w.w, line, kRight);
#pragma unroll 1
          for (int q = 4; q < column_number; q += 4) {
            const float4 more = shared_float4(own_weights + 4 * q);
            pair(v, more.x, more.y, line + 4 * q, kLeft);
            pair(v, more.z, more.w, line + 4 * q, kRight);
          }
        }
      }
      if constexpr (!kFlags) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sums[i][x] += round_to_int64(contribution[i] * unit);
      }
    });
  }
}

}  // namespace truncdet
