// What reaches a tile in roi_pool: the gradient of every bin goes to the one cell it chose.
#pragma once

#include "roi_tile.cuh"

namespace truncdet {

// A RoI that touches the tile, seen from the tile's corner.
struct TileHit {
  int roi;
  short begin_y, begin_x, rows, columns;  // the cells of both
};

constexpr int kTileHits = 2 * kThreads;  // RoIs of the tile remembered at a time

// The block's channels of one RoI are one run of elements, fewer than 2^31, of which a thread takes
// kPack at a time.
template <class T, int kPack>
struct ChosenCells {
  static constexpr int kScratchBytes = 16 + kTileHits * static_cast<int>(sizeof(TileHit));
  static constexpr int kUnroll = kPack == 1 ? 4 : 2;
  const T* grad;          // [rois, channels, bins]
  const int32_t* argmax;  // [rois, channels, bins]
  int64_t channels, bins;
  int group;                            // channels of a block
  Divider by_bins, by_packs, by_width;  // `by_packs`: of a whole group

  ChosenCells(const T* g, const int32_t* chosen, const RoiAlignShape& shape, int channels_of_block)
      : grad(g),
        argmax(chosen),
        channels(shape.channels),
        bins(shape.bins()),
        group(channels_of_block),
        by_bins(bins, group * bins),
        by_packs(group * bins / kPack, kTileHits * (group * bins / kPack)),
        by_width(shape.width, shape.cells()) {}

  template <class Add>
  __device__ __forceinline__ void visit(const TileParams<T>& p, const Tile& tile, void* scratch,
                                        const Add& adder) const {
    int* const count = static_cast<int*>(scratch);
    TileHit* const hits = reinterpret_cast<TileHit*>(static_cast<char*>(scratch) + 16);
    const RoiSpan rois = image_rois(p.statistics, tile.image, p.shape.rois);
    if (threadIdx.x == 0) *count = 0;
    __syncthreads();
    for (int64_t base = 0; base < rois.count; base += kThreads) {
      if (base + threadIdx.x < rois.count) {
        const RoiBounds roi = rois.list[base + threadIdx.x];
        const int first_y = max(roi.first_y - tile.y, 0), first_x = max(roi.first_x - tile.x, 0);
        const int end_y = min(roi.last_y - tile.y + 1, tile.height);
        const int end_x = min(roi.last_x - tile.x + 1, tile.width);
        if (roi.image == tile.image && first_y < end_y && first_x < end_x) {
          hits[atomicAdd(count, 1)] = {
              roi.roi, static_cast<short>(first_y), static_cast<short>(first_x),
              static_cast<short>(end_y - first_y), static_cast<short>(end_x - first_x)};
        }
      }
      __syncthreads();
      const int found = *count;
      __syncthreads();  // nobody adds to it before all have read it
      if (base + kThreads < rois.count && found + kThreads <= kTileHits) continue;
      add_hits(p, tile, hits, found, adder);
      __syncthreads();
      if (threadIdx.x == 0) *count = 0;
      __syncthreads();
    }
  }

 private:
  template <class Add>
  __device__ __forceinline__ void add_hits(const TileParams<T>& p, const Tile& tile,
                                           const TileHit* hits, int found, const Add& adder) const {
    const bool whole = tile.channels == group;
    const int packs = tile.channels * static_cast<int>(bins) / kPack;
    const int64_t total = int64_t(found) * packs;
    const T* const values = grad + tile.channel * bins;
    const int32_t* const cells = argmax + tile.channel * bins;
    const int64_t of_roi = channels * bins;
    for (int64_t i = threadIdx.x; i < total; i += kUnroll * kThreads) {
      // Loads of several turns are under way together.
      Pack<int32_t, kPack> chosen[kUnroll];
      int hit[kUnroll], at[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        // i = RoI * packs + pack; beyond the end the last one is loaded again, and not added.
        const int64_t own = min(i + u * kThreads, total - 1);
        hit[u] = static_cast<int>(whole ? by_packs.quotient(own) : own / packs);
        at[u] = static_cast<int>(own - int64_t(hit[u]) * packs) * kPack;
        chosen[u] = load_pack<int32_t, kPack>(cells + hits[hit[u]].roi * of_roi + at[u]);
      }
      Pack<T, kPack> raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const TileHit roi = hits[hit[u]];
        bool any = false;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          int cell = -1;
          if (i + u * kThreads < total) {
            cell = cell_of_tile(p, tile, roi, chosen[u].at[j], at[u] + j);
          }
          chosen[u].at[j] = cell;
          any |= cell >= 0;
        }
        if (any) raw[u] = load_pack<T, kPack>(values + roi.roi * of_roi + at[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          if (chosen[u].at[j] < 0) continue;
          const auto value = widen(raw[u].at[j]);
          adder.add(chosen[u].at[j], adder.normalise(value), value);
        }
      }
    }
  }

  // Where the sum of the cell that element `at` of the group chose is, -1 outside of the tile or of
  // the RoI.
  __device__ __forceinline__ int cell_of_tile(const TileParams<T>& p, const Tile& tile,
                                              const TileHit& roi, int32_t chosen, int at) const {
    const uint32_t number = static_cast<uint32_t>(chosen);
    const uint32_t row = by_width.small_quotient(number);
    const int y = static_cast<int>(row) - tile.y;
    const int x = static_cast<int>(number - row * static_cast<uint32_t>(p.shape.width)) - tile.x;
    // One comparison an axis: what is below the first is far above the last.
    const bool inside = static_cast<uint32_t>(y - roi.begin_y) < static_cast<uint32_t>(roi.rows) &&
                        static_cast<uint32_t>(x - roi.begin_x) < static_cast<uint32_t>(roi.columns);
    const int c = static_cast<int>(by_bins.small_quotient(at));
    return inside && chosen >= 0 ? c * p.plan.plane + y * p.plan.width + x : -1;
  }
};

}  // namespace truncdet
