// RoIAlign as the product of two sparse bilinear weight tables, one an axis; shared by CPU and
// CUDA.
//
// Semantics are those of torchvision's operator: bins of size roi / output_size, a grid of
// `sampling_ratio` (or ceil(bin)) samples a bin and axis, bilinear interpolation, samples outside
// [-1, size] contribute nothing. Only the association of the sums is this library's own:
//   weight(p, cell) = sum over the samples of bin p in ascending coordinate order,
//   output(p, q)    = sum over cells y of wy(p, y) * (sum over cells x of wx(q, x) * f(y, x)),
//   gradient(y, x)  = sum over bins p, then q, of (wy(p, y) * wx(q, x)) * g(p, q),
// with wx divided by the number of samples.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

// Samples a bin may have along one axis. Only boxes whose bins are wider than this many cells
// notice; without a limit a box of 1e30 pixels would never come back.
constexpr int kMaxGrid = 1 << 15;

// Coordinates below this are the border itself: weights then stay far from the subnormal range, so
// that a weight is zero or not whatever the denormal mode is.
template <class C>
TRUNCDET_HD C smallest_coordinate() {
  return C(9.094947017729282e-13);  // 2^-40
}

struct RoiAlignShape {
  int64_t rois, images, channels, height, width;
  int64_t pooled_height, pooled_width;
  double spatial_scale;
  int64_t sampling_ratio;
  bool aligned;

  TRUNCDET_HD int64_t bins() const { return pooled_height * pooled_width; }
  TRUNCDET_HD int64_t cells() const { return height * width; }
};

// One sample: the two cells it lies between and their weights; low < 0 where it contributes
// nothing.
template <class C>
struct Sample {
  int low, high;
  C low_weight, high_weight;
};

template <class C>
struct Axis {
  C start, bin;
  int grid;  // samples a bin, 0 for a RoI that contributes nothing
  int size;  // cells of the feature map

  // Sample number j of bin p in ascending coordinate order (a reversed box has bins below zero).
  TRUNCDET_HD C coordinate(int p, int j) const {
    const int i = bin < C(0) ? grid - 1 - j : j;
    return start + static_cast<C>(p) * bin +
           (static_cast<C>(i) + C(0.5)) * bin / static_cast<C>(grid);
  }

  TRUNCDET_HD bool inside(C coordinate_value) const {
    return coordinate_value >= C(-1) && coordinate_value <= static_cast<C>(size);
  }

  TRUNCDET_HD Sample<C> sample(int p, int j) const {
    C at = coordinate(p, j);
    if (!inside(at)) return {-1, -1, C(0), C(0)};
    if (at < smallest_coordinate<C>()) at = C(0);
    int low = static_cast<int>(at);
    if (low >= size - 1) return {size - 1, size - 1, C(1), C(0)};
    const C high_weight = at - static_cast<C>(low);
    return {low, low + 1, C(1) - high_weight, high_weight};
  }

  // First j whose coordinate is >= `from`. The estimate may be off where floats are coarse; walking
  // from it is exact because coordinates never decrease with j.
  TRUNCDET_HD int first_at(int p, C from) const {
    const C step = (bin < C(0) ? -bin : bin) / static_cast<C>(grid);
    const C base = coordinate(p, 0);
    int j = 0;
    // Written as a positive test, so that a zero step or a NaN keeps the plain walk from 0.
    if (step > C(0) && from > base) {
      const C estimate = (from - base) / step;
      j = estimate < static_cast<C>(grid) ? static_cast<int>(estimate) : grid;
    }
    while (j > 0 && coordinate(p, j - 1) >= from) --j;
    while (j < grid && coordinate(p, j) < from) ++j;
    return j;
  }

  // Weight of bin p on one cell.
  TRUNCDET_HD C weight(int p, int cell) const {
    C sum = C(0);
    // A sample touches `cell` only from within one cell of it, and the border cells also from the
    // strip outside.
    for (int j = first_at(p, static_cast<C>(cell - 1)); j < grid; ++j) {
      const C at = coordinate(p, j);
      if (at > static_cast<C>(cell + 1)) break;
      const Sample<C> s = sample(p, j);
      if (s.low == cell) {
        sum += s.low_weight;
      } else if (s.high == cell) {
        sum += s.high_weight;
      }
    }
    return sum;
  }

  // Cells bin p may touch: [first, last]; an empty bin gives first > last.
  TRUNCDET_HD void range(int p, int* first, int* last) const {
    *first = 1;
    *last = 0;
    if (grid == 0) return;
    int j = first_at(p, C(-1));
    if (j == grid || !inside(coordinate(p, j))) return;
    *first = sample(p, j).low;
    // The last sample inside: the one before the first beyond `size`.
    int k = first_at(p, static_cast<C>(size));
    while (k < grid && coordinate(p, k) <= static_cast<C>(size)) ++k;
    *last = sample(p, k - 1).high;
  }

  // Bins that may touch `cell`, [first, last], clipped to the bins there are; never too few.
  TRUNCDET_HD void bins_near(int cell, int bins, int* first, int* last) const {
    *first = 0;
    *last = bins - 1;
    if (!(bin > C(0))) return;
    // Two bins of slack on either side cover the rounding of coordinates.
    const C low = (static_cast<C>(cell - 1) - start) / bin - C(2);
    const C high = (static_cast<C>(cell + 1) - start) / bin + C(2);
    if (low > C(0)) *first = low < static_cast<C>(bins) ? static_cast<int>(low) : bins;
    if (high < static_cast<C>(bins - 1)) *last = high < C(0) ? -1 : static_cast<int>(high);
  }
};

template <class C>
struct Roi {
  int64_t image;  // -1: the batch index is outside the batch
  Axis<C> y, x;
  C count;  // samples a bin, at least 1
};

template <class C>
TRUNCDET_HD int axis_grid(C bin, int64_t sampling_ratio) {
  if (sampling_ratio > 0) return static_cast<int>(sampling_ratio);
  const C grid = ceil(bin);
  // Written as !(in range) so that a NaN would give an empty grid.
  if (!(grid >= C(1))) return 0;
  return grid > C(kMaxGrid) ? kMaxGrid : static_cast<int>(grid);
}

// The image that a batch index means, -1 if there is none. A NaN is none.
template <class C>
TRUNCDET_HD int64_t roi_image(C index, int64_t images) {
  return index > C(-1) && index < static_cast<C>(images) ? static_cast<int64_t>(index) : -1;
}

// Box row: batch index, x1, y1, x2, y2.
template <class C>
TRUNCDET_HD Roi<C> make_roi(const C box[5], const RoiAlignShape& shape) {
  Roi<C> roi;
  roi.image = roi_image(box[0], shape.images);
  const C scale = static_cast<C>(shape.spatial_scale);
  const C offset = shape.aligned ? C(0.5) : C(0);
  const C x1 = box[1] * scale - offset, y1 = box[2] * scale - offset;
  const C x2 = box[3] * scale - offset, y2 = box[4] * scale - offset;
  C width = x2 - x1, height = y2 - y1;
  // NaN or infinite anywhere, also after scaling: a RoI of zeros without a gradient.
  const bool usable = roi.image >= 0 && is_finite(x1) && is_finite(y1) && is_finite(width) &&
                      is_finite(height) && shape.height > 0 && shape.width > 0;
  if (!shape.aligned) {
    width = width < C(1) ? C(1) : width;
    height = height < C(1) ? C(1) : height;
  }
  const C bin_y = height / static_cast<C>(shape.pooled_height);
  const C bin_x = width / static_cast<C>(shape.pooled_width);
  int grid_y = usable ? axis_grid(bin_y, shape.sampling_ratio) : 0;
  int grid_x = usable ? axis_grid(bin_x, shape.sampling_ratio) : 0;
  if (grid_y == 0 || grid_x == 0) grid_y = grid_x = 0;
  const C samples = static_cast<C>(grid_y) * static_cast<C>(grid_x);
  roi.count = samples < C(1) ? C(1) : samples;
  roi.y = {y1, bin_y, grid_y, static_cast<int>(shape.height)};
  roi.x = {x1, bin_x, grid_x, static_cast<int>(shape.width)};
  return roi;
}

template <class C>
TRUNCDET_HD C x_weight(const Roi<C>& roi, int q, int cell) {
  return roi.x.weight(q, cell) / roi.count;
}

// Calls f(cell, weight) for the cells of bin p in ascending order, weights not zero and those of
// Axis::weight: a cell's samples are met in the same order, as the cell above the sample first.
template <class C, class F>
TRUNCDET_HD void for_each_cell(const Axis<C>& axis, int p, const F& f) {
  int cell = -1;
  C here = C(0), above = C(0);  // the weights of `cell` and of the next one so far
  const auto emit = [&](int at, C weight) {
    if (weight != C(0)) f(at, weight);
  };
  for (int j = axis.first_at(p, C(-1)); j < axis.grid; ++j) {
    const Sample<C> s = axis.sample(p, j);
    if (s.low < 0) break;
    if (s.low != cell) {
      emit(cell, here);
      here = C(0);
      if (s.low == cell + 1) {
        here = above;
      } else {
        emit(cell + 1, above);
      }
      above = C(0);
      cell = s.low;
    }
    here += s.low_weight;
    if (s.high != s.low) above += s.high_weight;
  }
  emit(cell, here);
  emit(cell + 1, above);
}

// Head-room of one image's gradient: every bin hands out weight at most one.
TRUNCDET_HD int roi_headroom(int64_t rois_of_image, int64_t bins) {
  return headroom(rois_of_image * bins);
}

}  // namespace truncdet
