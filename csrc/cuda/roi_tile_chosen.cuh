// What reaches a tile in roi_pool: the gradient of every bin goes to the one cell it chose.
#pragma once

#include "roi_tile.cuh"

namespace truncdet {

// A RoI that touches the tile, and the cells of both.
struct TileHit {
  int roi;
  int first_y, first_x;
  unsigned short rows, columns;
};

constexpr int kTileHits = 2 * kThreads;  // RoIs of the tile remembered at a time

// The block's channels of one RoI are one run of elements, fewer than 2^31, of which a thread takes
// kPack at a time; these belong to at most two channels.
template <class T, int kPack>
struct ChosenCells {
  static constexpr int kScratchBytes = 16 + kTileHits * static_cast<int>(sizeof(TileHit));
  static constexpr int kUnroll = kPack == 1 ? 4 : 2;
  const T* grad;          // [rois, channels, bins]
  const int32_t* argmax;  // [rois, channels, bins]
  int64_t channels;
  int bins, group;                      // channels of a block
  Divider by_bins, by_packs, by_width;  // `by_packs`: of a whole group

  ChosenCells(const T* g, const int32_t* chosen, const RoiAlignShape& shape, int channels_of_block)
      : grad(g),
        argmax(chosen),
        channels(shape.channels),
        bins(static_cast<int>(shape.bins())),
        group(channels_of_block),
        by_bins(bins, int64_t(1) << 31),
        by_packs(int64_t(group) * bins / kPack, kTileHits * (int64_t(group) * bins / kPack)),
        by_width(shape.width, int64_t(1) << 31) {}

  static bool fits(const T* g, const int32_t* chosen, const RoiAlignShape& shape, int group) {
    return shape.bins() >= kPack && group * shape.bins() % kPack == 0 &&
           shape.channels % group == 0 && is_aligned(g, alignof(Pack<T, kPack>)) &&
           is_aligned(chosen, alignof(Pack<int32_t, kPack>));
  }

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
        const int first_y = max(roi.first_y, tile.y), first_x = max(roi.first_x, tile.x);
        const int rows = min(roi.last_y + 1, tile.y + tile.height) - first_y;
        const int columns = min(roi.last_x + 1, tile.x + tile.width) - first_x;
        if (roi.image == tile.image && rows > 0 && columns > 0) {
          hits[atomicAdd(count, 1)] = {roi.roi, first_y, first_x, static_cast<unsigned short>(rows),
                                       static_cast<unsigned short>(columns)};
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
    const int packs = tile.channels * bins / kPack;
    const int64_t total = int64_t(found) * packs;
    const T* const values = grad + tile.channel * bins;
    const int32_t* const cells = argmax + tile.channel * bins;
    const int64_t of_roi = channels * bins;
    const int corner = tile.y * p.plan.width + tile.x;
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
        const unsigned rows = i + u * kThreads < total ? roi.rows : 0u, columns = roi.columns;
        const int channel = static_cast<int>(by_bins.small_quotient(at[u]));
        const int rest = at[u] - channel * bins;
        const int sum = channel * p.plan.plane - corner, next_sum = sum + p.plan.plane;
        bool any = false;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          // One comparison an axis: what is below the first is, as unsigned, far above the last. A
          // number that is no cell cannot pass both, since row * width + column is the number.
          const uint32_t number = static_cast<uint32_t>(chosen[u].at[j]);
          const uint32_t y = by_width.small_quotient(number);
          const uint32_t x = number - y * static_cast<uint32_t>(p.shape.width);
          const bool inside = (y - roi.first_y < rows) & (x - roi.first_x < columns);
          const uint32_t cell = y * static_cast<uint32_t>(p.plan.width) + x +
                                static_cast<uint32_t>(rest + j < bins ? sum : next_sum);
          chosen[u].at[j] = inside ? static_cast<int>(cell) : -1;
          any |= inside;
        }
        if (any) raw[u] = load_pack<T, kPack>(values + roi.roi * of_roi + at[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          if (chosen[u].at[j] >= 0) adder.add_whole(chosen[u].at[j], widen(raw[u].at[j]));
        }
      }
    }
  }
};

}  // namespace truncdet
