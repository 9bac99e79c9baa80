// The backward of rotated RoIAlign as a gather, on the tiles of RoIAlign's own: a block owns a tile
// of cells and a group of channels, a warp is a row of the tile, a lane one or two channels. For
// every RoI that touches the tile it multiplies the row's part of the RoI's matrix with gradient
// bins in shared memory, and adds in int64 registers.
#pragma once

#include "roi_align_gather.cuh"
#include "roi_rotated_statistics.cuh"

namespace truncdet {

constexpr int kRowPairs = 32;  // pairs of a row that wait in shared memory, one a lane
// Dynamic shared memory: with hits and pairs 63 KB a block, as much as RoIAlign's.
constexpr int64_t kRotatedSharedBytes = 50 << 10;

// A RoI that touches the tile.
struct alignas(16) RotatedHit {
  int runs_at;  // of the tile's corner, where the box around the RoI has none: of where it would be
  int width;    // runs of a row
  int pairs_at;  // -1: no matrix
  // Rows and columns of the tile, begins and ends, a byte each: one load brings them all.
  unsigned rectangle;
  int roi;

  __device__ __forceinline__ int begin_y() const { return rectangle & 255; }
  __device__ __forceinline__ int end_y() const { return rectangle >> 8 & 255; }
  __device__ __forceinline__ int begin_x() const { return rectangle >> 16 & 255; }
  __device__ __forceinline__ int end_x() const { return rectangle >> 24; }
};

template <class T>
struct RotatedParams : GatherParams<T> {
  const RotatedRoi<float>* boxes;
  const RotatedBox* tiled;
  const unsigned* incomplete;
  WeightPool pool;
};

// What a pass over the tiles does. RoIs without a matrix, and non-finite values, have passes of
// their own: in the common one they would cost registers that it needs.
enum class Pass {
  kMatrices,  // images whose RoIs all have a matrix
  kAll,       // other images
  kFlags,     // cells that a NaN or an infinity reaches, of any image
};

// Slots hold gradient bins alone.
template <int kPerLane, int kWidth>
GatherPlan rotated_plan(const RoiAlignShape& shape) {
  GatherPlan plan = gather_plan<kPerLane, kWidth>(shape);
  plan.slot_floats = plan.value_floats;
  const int64_t output = int64_t(kTileHeight) * 32 * (kWidth + 1) * 4;
  const int64_t each = int64_t(plan.slot_floats) * 4;
  if (each == 0 || each > kRotatedSharedBytes) {
    plan.shared_bytes = kRotatedSharedBytes + 1;
    return plan;
  }
  plan.stages = 2 * each <= kRotatedSharedBytes ? 2 : 1;
  plan.batch = static_cast<int>(
      std::min(kRotatedSharedBytes / (plan.stages * each), static_cast<int64_t>(kMaxBatch)));
  plan.shared_bytes = std::max(plan.batch * plan.stages * each, output);
  return plan;
}

// As find_hits; tiles beside a turned box, though inside the upright one around it, are no hits.
template <int kWidth, class T>
__device__ __forceinline__ int find_rotated_hits(const RotatedParams<T>& params,
                                                 const RoiBounds* list, int base, int count,
                                                 int image, int tile_y, int tile_x,
                                                 RotatedHit* hits) {
  static_assert(kHits == kThreads, "one RoI a thread");
  __shared__ int hit_count;
  if (threadIdx.x == 0) hit_count = 0;
  __syncthreads();
  if (base + static_cast<int>(threadIdx.x) < count) {
    const int4* bounds = reinterpret_cast<const int4*>(list + base + threadIdx.x);
    const int4 around = bounds[0], more = bounds[1];
    const int first_y = around.x - tile_y, last_y = around.y - tile_y;
    const int first_x = around.z - tile_x, last_x = around.w - tile_x;
    if (first_y < kTileHeight && last_y >= 0 && first_x < kWidth && last_x >= 0 &&
        first_y <= last_y && first_x <= last_x && more.w == image) {
      const RotatedBox box = params.tiled[more.x];
      // From the tile's middle to a sample that reaches one of its cells.
      constexpr float kHalfHeight = 0.5f * (kTileHeight - 1), kHalfWidth = 0.5f * (kWidth - 1);
      const float y = static_cast<float>(tile_y) + kHalfHeight - box.center_y;
      const float x = static_cast<float>(tile_x) + kHalfWidth - box.center_x;
      const float c = fabsf(box.cosine), s = fabsf(box.sine);
      const bool near_y = fabsf(y * box.cosine + x * box.sine) <=
                          box.half_y + c * (kHalfHeight + 1.f) + s * (kHalfWidth + 1.f);
      const bool near_x = fabsf(x * box.cosine - y * box.sine) <=
                          box.half_x + c * (kHalfWidth + 1.f) + s * (kHalfHeight + 1.f);
      if (near_y && near_x) {
        const int width = last_x - first_x + 1;
        const unsigned rows = max(first_y, 0) | min(last_y + 1, kTileHeight) << 8;
        const unsigned columns = max(first_x, 0) | min(last_x + 1, kWidth) << 8;
        hits[atomicAdd(&hit_count, 1)] = {
            box.pairs_at < 0 ? 0 : box.runs_at - first_y * width - first_x, width, box.pairs_at,
            rows | columns << 16, more.x};
      }
    }
  }
  __syncthreads();
  const int number = hit_count;
  __syncthreads();  // hit_count may be written again
  return number;
}

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
