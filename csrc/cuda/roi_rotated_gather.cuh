// The backward of rotated RoIAlign as a gather, on the tiles of RoIAlign's own: a block owns a tile
// of cells and a group of channels, a warp is a row of the tile, a lane one or two channels. For
// every RoI that touches the tile it multiplies the row's part of the RoI's matrix with gradient
// bins in shared memory, and adds in int64 registers.
#pragma once

#include "roi_rotated_add.cuh"

namespace truncdet {

// Adds all hits to the sums (or flags). Gradient bins arrive a batch ahead, a row's pairs one hit
// ahead and its runs two.
template <class T, int kPerLane, int kWidth, Pass kPass>
__device__ __forceinline__ void add_rotated_hits(const RotatedParams<T>& params,
                                                 const GatherTile& tile, const RotatedHit* hits,
                                                 int number, float* shared, WeightPair* waiting,
                                                 int64_t (&sums)[kPerLane][kWidth],
                                                 unsigned (&flags)[kPerLane][kWidth]) {
  if (number == 0) return;
  const GatherPlan& plan = params.plan;
  const int stage_floats = plan.batch * plan.slot_floats;
  const int batches = (number + plan.batch - 1) / plan.batch;
  RowWeights row;
  row.run = load_run(params.pool, hits[0]);
  row.pair = load_pair(params.pool, hits[0], row.run);
  unsigned next_run = load_run(params.pool, hits[min(1, number - 1)]);
  for (int batch = 1 - plan.stages; batch < batches; ++batch) {
    const int next = batch + plan.stages - 1;
    if (next < batches) {
      load_values<T, kPerLane, kPass == Pass::kFlags>(
          params, tile, hits + next * plan.batch, min(plan.batch, number - next * plan.batch),
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
    const float* slots = shared + (batch & (plan.stages - 1)) * stage_floats;
    const int end = min(plan.batch, number - batch * plan.batch);
    for (int b = 0; b < end; ++b) {
      const int at = batch * plan.batch + b;
      RowWeights following;
      following.run = next_run;
      following.pair = load_pair(params.pool, hits[min(at + 1, number - 1)], next_run);
      next_run = load_run(params.pool, hits[min(at + 2, number - 1)]);
      add_hit<T, kPerLane, kWidth, kPass>(params, tile, hits[at], slots + b * plan.slot_floats, row,
                                          waiting, sums, flags);
      row = following;
    }
    __syncthreads();
  }
}

// In shared memory: the tile's RoIs, and each row's pairs of one of them.
struct TileLists {
  RotatedHit hits[kHits];
  WeightPair waiting[kTileHeight][kRowPairs];
};

// One tile and channel group, start to end.
template <class T, int kPerLane, int kWidth, Pass kPass>
__device__ __forceinline__ void gather_rotated_tile(const RotatedParams<T>& params, int tile_number,
                                                    int group, int64_t image, TileLists* lists) {
  constexpr int kGroup = 32 * kPerLane;
  constexpr bool kFlags = kPass == Pass::kFlags;
  extern __shared__ float4 shared_memory[];
  float* const shared = reinterpret_cast<float*>(shared_memory);
  const RoiAlignShape& shape = params.shape;
  const RoiStatistics<float>& statistics = params.statistics;
  const ImageStatistics<float> own = statistics.images[image];
  const Scale<float> scale = own.scale(shape.bins());
  const bool folded = std::is_same_v<T, float> && !kFlags && statistics.nonfinite[image] == 0 &&
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
  int64_t sums[kPerLane][kWidth] = {};
  unsigned flags[kPerLane][kWidth] = {};
  bool any_hit = false;
  clear_padding<kGroup>(params.plan, shared);
  const bool grouped = statistics.list != nullptr;
  const RoiBounds* list = grouped ? statistics.list + own.offset : statistics.bounds;
  const int listed = grouped ? own.count : static_cast<int>(shape.rois);
  for (int base = 0; base < listed; base += kHits) {
    const int number = find_rotated_hits<kWidth>(
        params, list, base, listed, static_cast<int>(image), tile.y, tile.x, lists->hits);
    any_hit |= number > 0;
    add_rotated_hits<T, kPerLane, kWidth, kPass>(params, tile, lists->hits, number, shared,
                                                 lists->waiting[threadIdx.x / 32], sums, flags);
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
    rotated_gather_kernel(RotatedParams<T> params) {
  __shared__ TileLists lists;
  if (params.incomplete[blockIdx.z] != 0) return;
  gather_rotated_tile<T, kPerLane, kWidth, Pass::kMatrices>(params, blockIdx.x, blockIdx.y,
                                                            blockIdx.z, &lists);
}

constexpr int kRestBlocks = 512;

// The other two passes; returns at once where neither is needed.
template <class T>
__global__ void __launch_bounds__(kThreads) rotated_rest_kernel(RotatedParams<T> params) {
  __shared__ TileLists lists;
  const int64_t images = params.shape.images;
  if (params.statistics.nonfinite[images] == 0 && params.incomplete[images] == 0) return;
  const int64_t tiles = int64_t(params.plan.tiles_x) * params.plan.tiles_y;
  for (int64_t i = blockIdx.x; i < tiles * params.plan.groups * images; i += gridDim.x) {
    // i = (image * groups + group) * tiles + tile
    const int64_t image = i / tiles / params.plan.groups;
    const int tile = static_cast<int>(i % tiles);
    const int group = static_cast<int>(i / tiles % params.plan.groups);
    if (params.incomplete[image] != 0) {
      gather_rotated_tile<T, 1, kFlagWidth, Pass::kAll>(params, tile, group, image, &lists);
      __syncthreads();
    }
    if (params.statistics.nonfinite[image] != 0) {
      gather_rotated_tile<T, 1, kFlagWidth, Pass::kFlags>(params, tile, group, image, &lists);
      __syncthreads();
    }
  }
}

// Whether a launch with this tile is possible: shared memory, runs, and the limits on a grid.
template <int kPerLane, int kWidth>
bool rotated_fits(const RoiAlignShape& shape) {
  const GatherPlan plan = rotated_plan<kPerLane, kWidth>(shape);
  return plan.shared_bytes <= kRotatedSharedBytes && shape.images <= 65535 &&
         plan.groups <= 65535 && shape.bins() <= kMaxRowBins &&
         rotated_plan<1, kFlagWidth>(shape).shared_bytes <= kRotatedSharedBytes;
}

template <int kPerLane, int kWidth, class T>
void launch_rotated_gather(const Tensor& grad, const Tensor& out, const RoiAlignShape& shape,
                           const RotatedStatistics<float>& statistics, bool channels_last,
                           cudaStream_t stream) {
  RotatedParams<T> params{{const_data<T>(grad), mutable_data<T>(out), shape,
                           rotated_plan<kPerLane, kWidth>(shape), statistics, channels_last},
                          statistics.boxes,
                          statistics.tiled,
                          statistics.incomplete,
                          statistics.pool};
  const GatherPlan& plan = params.plan;
  launch_tiles(rotated_gather_kernel<T, kPerLane, kWidth>,
               dim3(static_cast<unsigned>(plan.tiles_x) * plan.tiles_y, plan.groups,
                    static_cast<unsigned>(shape.images)),
               params, stream);
  if (shape.rois == 0) return;
  params.plan = rotated_plan<1, kFlagWidth>(shape);
  launch_tiles(rotated_rest_kernel<T>, dim3(kRestBlocks), params, stream);
}

}  // namespace truncdet
