// A batch of RoIs into shared memory: weights of the tile's cells and gradient bins of its
// channels.
#pragma once

#include <cuda_pipeline.h>

#include "roi_gather_plan.cuh"

namespace truncdet {

// The weights of one cell, padded with zeros to `stride`. Rare, and kept out of the hot code.
static __device__ __noinline__ BinRun compute_weights(const Roi<float>& roi, bool row, int cell,
                                                      int bins, float* out, int stride) {
  const Axis<float>& axis = row ? roi.y : roi.x;
  const BinRun run = find_run(axis, cell, bins);
  for (int i = 0; i < stride; ++i) {
    const float weight = i < run.number() ? axis.weight(run.first() + i, cell) : 0.f;
    out[i] = row ? weight : weight / roi.count;
  }
  return run;
}

// Weights and runs of one axis of a hit into its slot, by one warp. From the table they arrive
// asynchronously.
__device__ __forceinline__ void load_weights(const Hit& hit, bool row, int tile, int bins,
                                             const RoiStatistics<float>& statistics, float* weights,
                                             BinRun* runs, int stride) {
  const int lane = threadIdx.x % 32;
  const int begin = row ? hit.begin_y : hit.begin_x, end = row ? hit.end_y : hit.end_x;
  if (hit.stride_x != 0) {
    const RoiTable& table = statistics.tables[hit.roi];
    const int first = row ? hit.first_y : hit.first_x;
    const float* source = table.weights[row ? 0 : 1] + (begin - first) * stride;
    float* target = weights + begin * stride;
#pragma unroll 1
    for (int i = lane; i < (end - begin) * stride / 4; i += 32) {
      __pipeline_memcpy_async(target + 4 * i, source + 4 * i, 16);
    }
    if (lane < end - begin) {
      const int cell = begin + lane;
      __pipeline_memcpy_async(runs + cell, table.runs[row ? 0 : 1] + cell - first, 4);
    }
    return;
  }
  if (lane >= end - begin) return;
  const int cell = begin + lane;
  runs[cell] = compute_weights(statistics.rois[hit.roi], row, tile + cell, bins,
                               weights + cell * stride, stride);
}

// Gradient bins of one RoI and channel group into a slot, as they are; where channels are padded,
// only those that the tile needs. Channels that do not exist become zeros.
template <int kGroup>
__device__ __forceinline__ void load_raw(const float* __restrict__ source, int channels,
                                         int first_bin, int last_bin, const GatherPlan& plan,
                                         float* values) {
  const int bins = plan.bins;
  if (plan.pad_channels == kGroup && channels == kGroup &&
      reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    for (int i = threadIdx.x; i < kGroup / 4 * bins; i += kThreads) {
      __pipeline_memcpy_async(values + 4 * i, source + 4 * i, 16);
    }
    return;
  }
  for (int c = threadIdx.x / 32; c < kGroup; c += kThreads / 32) {
    float* target = values + c * bins + (c >> plan.pad_shift);
    const float* from = source + c * bins;
    for (int bin = first_bin + threadIdx.x % 32; bin < last_bin; bin += 32) {
      if (c < channels) {
        __pipeline_memcpy_async(target + bin, from + bin, 4);
      } else {
        target[bin] = 0.f;
      }
    }
  }
}

// The same through `convert`, for other types, for images with NaN or infinities, and for scales
// that cannot go into the weights.
template <int kGroup, class T, class Convert>
__device__ __forceinline__ void load_converted(const T* __restrict__ source, int channels,
                                               const GatherPlan& plan, float* values,
                                               const Convert& convert) {
  const int bins = plan.bins;
  for (int c = threadIdx.x / 32; c < kGroup; c += kThreads / 32) {
    float* target = values + c * bins + (c >> plan.pad_shift);
#pragma unroll 4
    for (int bin = threadIdx.x % 32; bin < bins; bin += 32) {
      target[bin] = c < channels ? convert(widen(source[c * bins + bin])) : 0.f;
    }
  }
}

struct Normalise {
  Scale<float> scale;
  __device__ __forceinline__ float operator()(float value) const { return scale.normalise(value); }
};
struct FlagWord {
  __device__ __forceinline__ float operator()(float value) const {
    return bit_copy<float>(nonfinite_flag(value));
  }
};

template <class T, int kPerLane, int kWidth, bool kFlags>
__device__ __forceinline__ void load_batch(const GatherParams<T>& params, const GatherTile& tile,
                                           const Hit* hits, int size, float* slots) {
  constexpr int kGroup = 32 * kPerLane;
  const GatherPlan& plan = params.plan;
  const int pooled_height = static_cast<int>(params.shape.pooled_height);
  const int pooled_width = static_cast<int>(params.shape.pooled_width);
  for (int b = 0; b < size; ++b) {
    const Hit& hit = hits[b];
    float* slot = slots + b * plan.slot_floats;
    float* weights = slot + plan.value_floats;
    BinRun* runs = reinterpret_cast<BinRun*>(weights + plan.runs_at);
    const bool table = hit.stride_x != 0;
    if (threadIdx.x < 32) {
      load_weights(hit, false, tile.x, pooled_width, params.statistics, weights, runs,
                   table ? hit.stride_x : padded_bins(pooled_width));
    } else if (threadIdx.x < 64) {
      load_weights(hit, true, tile.y, pooled_height, params.statistics, weights + plan.row_at,
                   runs + kWidth, table ? hit.stride_y : padded_bins(pooled_height));
    }
    const T* source =
        params.grad + (int64_t(hit.roi) * params.shape.channels + tile.channel) * plan.bins;
    if constexpr (kFlags) {
      load_converted<kGroup>(source, tile.channels, plan, slot, FlagWord());
    } else {
      if constexpr (std::is_same_v<T, float>) {
        if (tile.folded) {
          load_raw<kGroup>(source, tile.channels, hit.first_bin, hit.last_bin, plan, slot);
          continue;
        }
      }
      load_converted<kGroup>(source, tile.channels, plan, slot, Normalise{tile.scale});
    }
  }
}

}  // namespace truncdet
