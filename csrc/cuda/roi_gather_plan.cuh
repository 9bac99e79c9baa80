// How the gather of RoIAlign's backward divides its work, and what its blocks know.
#pragma once

#include "roi_align_statistics.cuh"

namespace truncdet {

constexpr int kTileHeight = kThreads / 32;
constexpr int kHits = kThreads;   // RoIs of the tile remembered at a time
constexpr int kMaxBatch = 4;      // RoIs a stage
constexpr int kGatherBlocks = 3;  // blocks a multiprocessor shall hold
// Every architecture since 7.5 grants a block 64 KB, static memory included; three blocks with this
// much fit a multiprocessor of compute capability 9.0, as many as the registers allow.
constexpr int64_t kGatherSharedBytes = 58 << 10;

struct GatherPlan {
  int tiles_x, tiles_y, groups;
  int bins;
  int pad_channels;     // channels after which one word is skipped: lanes then hit different banks
  int pad_shift;        // their binary logarithm
  int value_floats;     // gradient bins of one RoI, padding and four words of slack included
  int row_at, runs_at;  // where row weights and runs start behind the column weights
  int slot_floats;      // all of one RoI
  int batch;            // RoIs of a stage
  int stages;           // 2: one batch is added while the next arrives
  int64_t shared_bytes;
};

// A block owns kWidth x kTileHeight cells of 32 * kPerLane channels.
template <int kPerLane, int kWidth>
GatherPlan gather_plan(const RoiAlignShape& shape) {
  constexpr int kGroup = 32 * kPerLane;
  GatherPlan plan{};
  plan.tiles_x = static_cast<int>((shape.width + kWidth - 1) / kWidth);
  plan.tiles_y = static_cast<int>((shape.height + kTileHeight - 1) / kTileHeight);
  plan.groups = static_cast<int>((shape.channels + kGroup - 1) / kGroup);
  plan.shared_bytes = kGatherSharedBytes + 1;
  if (shape.bins() >= 1024) return plan;  // far beyond what fits
  const int bins = plan.bins = static_cast<int>(shape.bins());
  // Lanes lie `bins` words apart: they meet in a bank after 32 / gcd(bins, 32) of them.
  int common = 1;
  while (common < 32 && bins % (2 * common) == 0) common *= 2;
  plan.pad_channels = common == 1 ? kGroup : 32 / common;
  while ((1 << plan.pad_shift) < plan.pad_channels) ++plan.pad_shift;
  plan.value_floats = (kGroup * bins + kGroup / plan.pad_channels + 4 + 3) / 4 * 4;
  plan.row_at = kWidth * padded_bins(static_cast<int>(shape.pooled_width));
  plan.runs_at = plan.row_at + kTileHeight * padded_bins(static_cast<int>(shape.pooled_height));
  plan.slot_floats = plan.value_floats + plan.runs_at + (kWidth + kTileHeight + 3) / 4 * 4;
  const int64_t output = int64_t(kTileHeight) * 32 * (kWidth + 1) * 4;
  const int64_t each = int64_t(plan.slot_floats) * 4;
  plan.stages = 2 * each <= kGatherSharedBytes ? 2 : 1;
  plan.batch = static_cast<int>(kGatherSharedBytes / (plan.stages * each));
  plan.batch = plan.batch < 1 ? 1 : (plan.batch > kMaxBatch ? kMaxBatch : plan.batch);
  const int64_t slots = plan.batch * plan.stages * each;
  plan.shared_bytes = slots > output ? slots : output;
  return plan;
}

// A RoI that touches the tile, seen from the tile's corner.
struct Hit {
  int roi;
  short first_y, first_x;        // may lie far outside; exact wherever there is a table
  unsigned char begin_y, end_y;  // rows and columns of the tile it touches
  unsigned char begin_x, end_x;
  short stride_y, stride_x;   // of its table, 0 without one
  short first_bin, last_bin;  // [first, last): all the tile needs of a channel's bins
};

// What the blocks of a launch share.
template <class T>
struct GatherParams {
  const T* grad;  // [rois, channels, bins]
  T* out;         // [images, channels, height, width] or channels_last
  RoiAlignShape shape;
  GatherPlan plan;
  RoiStatistics<float> statistics;
  bool channels_last;
};

// Where a block works, and its image's scale.
struct GatherTile {
  int y, x, channels;
  int64_t channel;
  Scale<float> scale;
  // The gradient stays as it is and 2^-e is part of the unit: one multiplication a contribution.
  bool folded;
  float unit;
};

// Exponents e for which that gives the same bits as normalising first. Scaling by 2^e commutes with
// every float operation as long as products stay normal. From e = -36 on, a product that does not
// is below 2^-90 of the largest value: less than a quarter ulp of any sum that reaches half a unit,
// 2^-63 of it, so it is absorbed in either order of events. Up to 60 no sum can overflow.
constexpr int kFoldedMin = -36, kFoldedMax = 60;

}  // namespace truncdet
