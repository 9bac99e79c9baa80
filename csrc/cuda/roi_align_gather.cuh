// RoIAlign's backward as a gather: a block owns a tile of cells and a group of channels, walks over
// the RoIs that touch the tile and adds their contributions in int64 registers. No atomics, no
// buffer.
//
// A lane is a channel (or two), a warp is a row of the tile: weights are the same for all lanes
// (one broadcast load), and no lane idles where a RoI covers only part of the tile.
#pragma once

#include "roi_gather_add.cuh"
#include "roi_gather_load.cuh"
#include "roi_gather_write.cuh"

namespace truncdet {

// The bins that rows [begin, end) of a RoI's table need, and three more, which add_batch reads
// times zero: four weights at a time.
__device__ __forceinline__ void needed_bins(const RoiTable& table, int begin, int end, int bins,
                                            int pooled_width, Hit* hit) {
  int first = bins, last = 0;
#pragma unroll
  for (int i = 0; i < kTileHeight; ++i) {
    const BinRun run = begin + i < end ? table.runs[0][begin + i] : BinRun();
    if (run.number() == 0) continue;
    first = min(first, run.first() * pooled_width);
    last = max(last, (run.first() + run.number()) * pooled_width + 3);
  }
  hit->first_bin = static_cast<short>(first);
  hit->last_bin = static_cast<short>(min(last, bins));
}

// The RoIs of `image` in list[base, base + kHits) that touch the tile, in no particular order. All
// threads of the block take part; returns their number.
template <int kWidth>
__device__ __forceinline__ int find_hits(const RoiBounds* list, int base, int count, int image,
                                         int tile_y, int tile_x, const RoiTable* tables,
                                         const RoiAlignShape& shape, Hit* hits) {
  static_assert(kHits == kThreads, "one RoI a thread");
  __shared__ int hit_count;
  if (threadIdx.x == 0) hit_count = 0;
  __syncthreads();
  if (base + static_cast<int>(threadIdx.x) < count) {
    const int4* bounds = reinterpret_cast<const int4*>(list + base + threadIdx.x);
    const int4 box = bounds[0], more = bounds[1];
    const int first_y = box.x - tile_y, last_y = box.y - tile_y;
    const int first_x = box.z - tile_x, last_x = box.w - tile_x;
    if (first_y < kTileHeight && last_y >= 0 && first_x < kWidth && last_x >= 0 &&
        first_y <= last_y && first_x <= last_x && more.w == image) {
      const int bins = static_cast<int>(shape.bins());
      Hit hit{more.x,
              static_cast<short>(max(first_y, -kTableCells)),
              static_cast<short>(max(first_x, -kTableCells)),
              static_cast<unsigned char>(max(first_y, 0)),
              static_cast<unsigned char>(min(last_y + 1, kTileHeight)),
              static_cast<unsigned char>(max(first_x, 0)),
              static_cast<unsigned char>(min(last_x + 1, kWidth)),
              static_cast<short>(more.y),
              static_cast<short>(more.z),
              0,
              static_cast<short>(bins)};
      if (tables != nullptr && hit.stride_x != 0) {
        needed_bins(tables[hit.roi], hit.begin_y - hit.first_y, hit.end_y - hit.first_y, bins,
                    static_cast<int>(shape.pooled_width), &hit);
      }
      hits[atomicAdd(&hit_count, 1)] = hit;
    }
  }
  __syncthreads();
  const int number = hit_count;
  __syncthreads();  // hit_count may be written again
  return number;
}

// Adds all hits to the sums (or flags), a batch at a time.
template <class T, int kPerLane, int kWidth, bool kFlags>
__device__ __forceinline__ void add_hits(const GatherParams<T>& params, const GatherTile& tile,
                                         const Hit* hits, int number, float* shared,
                                         int64_t (&sums)[kPerLane][kWidth],
                                         unsigned (&flags)[kPerLane][kWidth]) {
  const GatherPlan& plan = params.plan;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int stage_floats = plan.batch * plan.slot_floats;
  const int batches = (number + plan.batch - 1) / plan.batch;
  for (int batch = 1 - plan.stages; batch < batches; ++batch) {
    const int next = batch + plan.stages - 1;
    if (next < batches) {
      load_batch<T, kPerLane, kWidth, kFlags>(params, tile, hits + next * plan.batch,
                                              min(plan.batch, number - next * plan.batch),
                                              shared + (next & (plan.stages - 1)) * stage_floats);
    }
    __pipeline_commit();
    if (batch < 0) continue;
    if (plan.stages == 2) {
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncthreads();
    add_batch<kPerLane, kWidth, kFlags>(
        plan, hits + batch * plan.batch, min(plan.batch, number - batch * plan.batch),
        address + 4 * (batch & (plan.stages - 1)) * stage_floats,
        static_cast<int>(params.shape.pooled_height), static_cast<int>(params.shape.pooled_width),
        tile.unit, sums, flags);
    __syncthreads();
  }
}

// Words between and behind the channels of a slot are read (times a zero weight) but never loaded,
// and the first three of a channel, behind the last of the one before, not always.
template <int kGroup>
__device__ __forceinline__ void clear_padding(const GatherPlan& plan, float* shared) {
  const int pads = kGroup >> plan.pad_shift;
  for (int slot = 0; slot < plan.stages * plan.batch; ++slot) {
    float* const values = shared + slot * plan.slot_floats;
    for (int i = threadIdx.x; i < pads + 4 + 3 * kGroup; i += kThreads) {
      const int channel = (i - pads - 4) / 3;
      const int at = i < pads ? (i + 1) * (plan.pad_channels * plan.bins + 1) - 1
                     : i < pads + 4
                         ? kGroup * plan.bins + i
                         : channel * plan.bins + (channel >> plan.pad_shift) + (i - pads - 4) % 3;
      if (at < plan.value_floats) values[at] = 0.f;
    }
  }
}

// One tile and channel group, start to end.
template <class T, int kPerLane, int kWidth, bool kFlags>
__device__ __forceinline__ void gather_tile(const GatherParams<T>& params, int tile_number,
                                            int group, int64_t image) {
  constexpr int kGroup = 32 * kPerLane;
  extern __shared__ float4 shared_memory[];
  float* const shared = reinterpret_cast<float*>(shared_memory);
  __shared__ Hit hits[kHits];
  const RoiAlignShape& shape = params.shape;
  const RoiStatistics<float>& statistics = params.statistics;
  const bool nonfinite = statistics.nonfinite[image] != 0;
  const ImageStatistics<float> own = statistics.images[image];
  const Scale<float> scale = own.scale(shape.bins());
  const bool folded = std::is_same_v<T, float> && !kFlags && !nonfinite &&
                      scale.exponent >= kFoldedMin && scale.exponent <= kFoldedMax;
  // tile_number = row * tiles_x + column
  const int tile_row = tile_number / params.plan.tiles_x;
  const int tile_column = tile_number - tile_row * params.plan.tiles_x;
  const int64_t channel = int64_t(group) * kGroup;
  const GatherTile tile{tile_row * kTileHeight,
                        tile_column * kWidth,
                        static_cast<int>(min(int64_t(kGroup), shape.channels - channel)),
                        channel,
                        scale,
                        folded,
                        folded ? power_of_two(0.f, -scale.quantum()) : scale.unit};
  int64_t sums[kPerLane][kWidth];
  unsigned flags[kPerLane][kWidth];
#pragma unroll
  for (int x = 0; x < kWidth; ++x) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sums[i][x] = 0;
      flags[i][x] = 0;
    }
  }
  bool any_hit = false;
  clear_padding<kGroup>(params.plan, shared);
  const bool grouped = statistics.list != nullptr;
  const RoiBounds* list = grouped ? statistics.list + own.offset : statistics.bounds;
  const int listed = grouped ? own.count : static_cast<int>(shape.rois);
  // Channels in one piece are copied as such.
  const RoiTable* tables = params.plan.pad_channels < kGroup ? statistics.tables : nullptr;
  for (int base = 0; base < listed; base += kHits) {
    const int number = find_hits<kWidth>(list, base, listed, static_cast<int>(image), tile.y,
                                         tile.x, tables, shape, hits);
    any_hit |= number > 0;
    add_hits<T, kPerLane, kWidth, kFlags>(params, tile, hits, number, shared, sums, flags);
  }
  if constexpr (kFlags) {
    write_flags(params, tile, image, flags);
  } else {
    __syncthreads();  // slots become the output stage
    write_sums(params, tile, image, any_hit, shared, sums);
  }
}

// Grid: tiles, channel groups, images.
template <class T, int kPerLane, int kWidth>
__global__ void __launch_bounds__(kThreads, kGatherBlocks)
    roi_gather_kernel(GatherParams<T> params) {
  gather_tile<T, kPerLane, kWidth, false>(params, blockIdx.x, blockIdx.y, blockIdx.z);
}

constexpr int kFlagWidth = 16;  // tiles of the pass over non-finite values, 32 channels each
constexpr int kNonfiniteBlocks = 256;

// Cells that a NaN or an infinity reaches; returns at once where there is none. A kernel of its
// own: inside the gather it would cost registers that the common case needs.
template <class T>
__global__ void __launch_bounds__(kThreads) roi_nonfinite_kernel(GatherParams<T> params) {
  if (params.statistics.nonfinite[params.shape.images] == 0) return;
  const int64_t tiles = int64_t(params.plan.tiles_x) * params.plan.tiles_y;
  for (int64_t i = blockIdx.x; i < tiles * params.plan.groups * params.shape.images;
       i += gridDim.x) {
    // i = (image * groups + group) * tiles + tile
    const int64_t image = i / tiles / params.plan.groups;
    if (params.statistics.nonfinite[image] == 0) continue;
    gather_tile<T, 1, kFlagWidth, true>(params, static_cast<int>(i % tiles),
                                        static_cast<int>(i / tiles % params.plan.groups), image);
    __syncthreads();
  }
}

template <class Kernel, class Params>
void launch_tiles(const Kernel& kernel, const dim3& grid, const Params& params,
                  cudaStream_t stream) {
  const int bytes = static_cast<int>(params.plan.shared_bytes);
  // Static and dynamic memory beyond 48 KB together need permission.
  TRUNCDET_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, kThreads, bytes, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

// Whether a launch with this tile is possible: shared memory, and the hardware's limits on a grid.
template <int kPerLane, int kWidth>
bool gather_fits(const RoiAlignShape& shape) {
  const GatherPlan plan = gather_plan<kPerLane, kWidth>(shape);
  return plan.shared_bytes <= kGatherSharedBytes && shape.images <= 65535 && plan.groups <= 65535 &&
         gather_plan<1, kFlagWidth>(shape).shared_bytes <= kGatherSharedBytes;
}

template <int kPerLane, int kWidth, class T>
void launch_gather(const Tensor& grad, const Tensor& out, const RoiAlignShape& shape,
                   const RoiStatistics<float>& statistics, bool channels_last,
                   cudaStream_t stream) {
  GatherParams<T> params{
      const_data<T>(grad), mutable_data<T>(out), shape, gather_plan<kPerLane, kWidth>(shape),
      statistics,          channels_last};
  const GatherPlan& plan = params.plan;
  launch_tiles(roi_gather_kernel<T, kPerLane, kWidth>,
               dim3(static_cast<unsigned>(plan.tiles_x) * plan.tiles_y, plan.groups,
                    static_cast<unsigned>(shape.images)),
               params, stream);
  if (shape.rois == 0) return;
  params.plan = gather_plan<1, kFlagWidth>(shape);
  launch_tiles(roi_nonfinite_kernel<T>, dim3(kNonfiniteBlocks), params, stream);
}

}  // namespace truncdet
