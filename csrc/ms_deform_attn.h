// ms_deform_attn: multi-scale deformable attention, per sample. Shared by host and device.
//
// A sample is one (image, query, head, level, point): bilinear interpolation of its head's values
// in its level's map, times its attention weight. Locations are in [0, 1] over the map's extent.
// Formula: Zhu et al., "Deformable DETR", ICLR 2021, equation 3.
#pragma once

#include "channel_sum.h"
#include "taps.h"

namespace truncdet {

struct MsDeformShape {
  int64_t images, values, heads, channels;  // value: [images, values, heads, channels]
  int64_t queries, levels, points;  // locations: [images, queries, heads, levels, points, 2]

  TRUNCDET_HD int64_t rows() const { return images * queries * heads; }
  TRUNCDET_HD int64_t samples() const { return levels * points; }  // of a row
  int64_t total_cells() const { return images * values * heads * channels; }
  // A sample gives a cell at most weight 1: its four taps are different cells.
  int headroom_bits() const { return headroom(queries * samples()); }
};

// Where a level's map lies among the values. One that reaches beyond them is not there at all.
struct Level {
  int64_t size[2];  // x, y
  int64_t start;
  bool valid;
};

TRUNCDET_HD Level read_level(const int64_t* spatial_shapes, const int64_t* level_start_index,
                             int64_t level, int64_t values) {
  const int64_t height = spatial_shapes[2 * level], width = spatial_shapes[2 * level + 1];
  const int64_t start = level_start_index[level];
  // Each factor is compared first, so that the product cannot overflow.
  const bool valid = start >= 0 && start <= values && height >= 0 && width >= 0 &&
                     height <= values && width <= values && values < (int64_t(1) << 31) &&
                     height * width <= values - start;
  return {{width, height}, start, valid};
}

// One sample's taps in its level's map, if it has any.
template <class C>
struct LevelSample {
  Axis<C, 2> axis[2];
  bool inside;
};

template <class C>
TRUNCDET_HD LevelSample<C> sample_level(C x, C y, const Level& level) {
  LevelSample<C> sample;
  sample.axis[0] = linear_taps(x * static_cast<C>(level.size[0]) - C(0.5), level.size[0]);
  sample.axis[1] = linear_taps(y * static_cast<C>(level.size[1]) - C(0.5), level.size[1]);
  // A coordinate inside has at least one of its two taps inside, and weights of which one is not 0.
  const auto has_taps = [](const Axis<C, 2>& axis) {
    return axis.index[0] >= 0 || axis.index[1] >= 0;
  };
  sample.inside = level.valid && has_taps(sample.axis[0]) && has_taps(sample.axis[1]);
  return sample;
}

}  // namespace truncdet
