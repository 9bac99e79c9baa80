// What reaches a tile in position-sensitive pooling: a channel belongs to one bin, to which every
// RoI sends one value.
#pragma once

#include "../roi_pool.h"
#include "roi_tile.cuh"

namespace truncdet {

// Channels of a block: one has most cells together. Channels last, a few make whole sectors of
// memory.
inline int64_t own_channels_of_block(bool channels_last) { return channels_last ? 8 : 1; }

// Throws unless the kernels have the schedule: see OwnChannels; 0 stands for the usual numbers.
inline void check_own_schedule(const char* op, int64_t block_channels, int64_t tile_bytes,
                               int64_t lanes) {
  const int64_t least = 512 * (block_channels > 8 ? block_channels : 8);
  TRUNCDET_CHECK(block_channels >= 0 && block_channels <= 32 && tile_bytes <= kTileBytes &&
                     (tile_bytes == 0 || tile_bytes >= least) && lanes >= 1 && lanes <= 32 &&
                     (lanes & (lanes - 1)) == 0,
                 op, ": no such schedule");
}

// `lanes` threads, a power of two that divides a warp, take one RoI and share the rows of its bin;
// Bins knows the cells of its bin and their weights.
template <class T, class Bins>
struct OwnChannels {
  using C = typename Format<T>::Compute;
  static constexpr int kScratchBytes = Bins::kScratchBytes;
  const T* grad;  // [rois, channels]
  Bins bins;
  int lanes;

  template <class Add>
  __device__ __forceinline__ void visit(const TileParams<T>& p, const Tile& tile, void* scratch,
                                        const Add& adder) const {
    const RoiSpan rois = image_rois(p.statistics, tile.image, p.shape.rois);
    const int part = static_cast<int>(threadIdx.x) & (lanes - 1);
    for (int c = 0; c < tile.channels; ++c) {
      // channel = (output channel * pooled_height + bin_y) * pooled_width + bin_x
      const int64_t channel = tile.channel + c, line = channel / p.shape.pooled_width;
      const int bin_x = static_cast<int>(channel - line * p.shape.pooled_width);
      const int bin_y = static_cast<int>(line % p.shape.pooled_height);
      for (int64_t i = threadIdx.x / lanes; i < rois.count; i += kThreads / lanes) {
        const RoiBounds roi = rois.list[i];
        if (roi.image != tile.image || roi.first_y >= tile.y + tile.height || roi.last_y < tile.y ||
            roi.first_x >= tile.x + tile.width || roi.last_x < tile.x) {
          continue;
        }
        const C raw = widen(grad[roi.roi * p.shape.channels + channel]);
        bins.visit(
            p.shape, roi.roi, bin_y, bin_x, tile, scratch, adder.normalise(raw),
            [&](int y) { return (y & (lanes - 1)) == part; },
            [&](int y, int x, C contribution) {
              const int at = (y - tile.y) * p.plan.width + x - tile.x;
              adder.add(c * p.plan.plane + at, contribution, raw);
            });
      }
    }
  }
};

// ps_roi_pool: all cells of a bin have an equal share.
template <class C>
struct EqualShares {
  static constexpr int kScratchBytes = 0;
  const C* boxes;

  template <class Mine, class Add>
  __device__ __forceinline__ void visit(const RoiAlignShape& shape, int64_t k, int bin_y, int bin_x,
                                        const Tile& tile, void*, C value, const Mine& mine,
                                        const Add& add) const {
    const PoolRoi<C> roi = make_pool_roi(boxes + 5 * k, shape, PoolRule::kHalfOpen);
    const CellRange rows = roi.y.cells(bin_y), columns = roi.x.cells(bin_x);
    if (rows.empty() || columns.empty()) return;
    const C share = value / cell_count<C>(rows, columns);
    const int end_y = min(rows.last, tile.y + tile.height);
    const int end_x = min(columns.last, tile.x + tile.width);
    for (int y = max(rows.first, tile.y); y < end_y; ++y) {
      if (!mine(y)) continue;
      for (int x = max(columns.first, tile.x); x < end_x; ++x) add(y, x, share);
    }
  }
};

// ps_roi_align: bilinear weights. Those of some columns at a time lie in the scratch, so that they
// are not computed again for every row.
template <class C>
struct BilinearShares {
  static constexpr int kColumns = 32 / static_cast<int>(sizeof(C));
  static constexpr int kScratchBytes = kThreads * kColumns * static_cast<int>(sizeof(C));
  const Roi<C>* rois;

  template <class Mine, class Add>
  __device__ __forceinline__ void visit(const RoiAlignShape&, int64_t k, int bin_y, int bin_x,
                                        const Tile& tile, void* scratch, C value, const Mine& mine,
                                        const Add& add) const {
    const Roi<C> roi = rois[k];
    C* const weights = static_cast<C*>(scratch) + threadIdx.x;  // [kColumns][kThreads], own slots
    int first, last;
    roi.x.range(bin_x, &first, &last);
    first = max(first, tile.x);
    last = min(last, tile.x + tile.width - 1);
    for (int base = first; base <= last; base += kColumns) {
      const int columns = min(kColumns, last - base + 1);
      for (int i = 0; i < columns; ++i) weights[i * kThreads] = C(0);
      for_each_cell(roi.x, bin_x, [&](int x, C weight) {
        if (x >= base && x < base + columns) weights[(x - base) * kThreads] = weight / roi.count;
      });
      for_each_cell(roi.y, bin_y, [&](int y, C weight) {
        if (y < tile.y || y >= tile.y + tile.height || !mine(y)) return;
        for (int i = 0; i < columns; ++i) {
          const C other = weights[i * kThreads];
          if (other != C(0)) add(y, base + i, (weight * other) * value);
        }
      });
    }
  }
};

}  // namespace truncdet
