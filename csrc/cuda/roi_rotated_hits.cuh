// How the gather of rotated RoIAlign's backward divides its work, and which RoIs a tile meets.
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

}  // namespace truncdet
