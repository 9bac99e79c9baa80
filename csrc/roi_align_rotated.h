// RoIAlign of rotated boxes as one sparse matrix a RoI, cells by bins; shared by CPU and CUDA.
//
// Semantics are those of mmcv's operator: the samples of an upright box around its centre, turned
// by the angle, y = yy cos - xx sin + cy and x = yy sin + xx cos + cx; bilinear interpolation,
// samples outside [-1, size] contribute nothing. The association of the sums is this library's own,
// and is chosen so that all channels share one matrix and a RoI adds to a cell only once:
//   weight(cell, bin) = (sum over the bin's samples, rows of samples first, of wy * wx) / samples,
//   output(bin)       = (sum over samples of ((wy wx f + wy wx' f') + wy' wx f'') + ...) / samples,
//   gradient(cell)    = sum over bins, ascending, of weight(cell, bin) * g(bin),
// where terms of weight zero are left out. One such gradient is quantised once a RoI and cell.
#pragma once

#include "roi_align.h"
#include "sine_cosine.h"

namespace truncdet {

// Boxes whose centre and sides add up to more cells than this count as not finite. Up to here
// float32 places a sample to within a cell, and searches for samples near a cell are short.
constexpr int kFarthest = 1 << 22;

// Samples a bin and axis that may be asked for, and bins. A weight then has at most 2^18 roundings
// (adaptive samples lie at least half a cell apart, so few reach one cell), a contribution 2^19
// more: below the 2^20 that the accumulator allows.
constexpr int kMaxRatio = 1 << 9;
constexpr int kMaxBins = 1 << 19;

// Sides below this are zero, so that they are zero or not whatever the denormal mode is.
template <class C>
TRUNCDET_HD C smallest_side() {
  return C(7.888609052210118e-31);  // 2^-100
}

struct RotatedShape : RoiAlignShape {
  bool clockwise;
};

// The two cells beside a coordinate along one axis, low < 0 where it contributes nothing.
template <class C>
TRUNCDET_HD Sample<C> cells_beside(C at, int size) {
  if (!(at >= C(-1) && at <= static_cast<C>(size))) return {-1, -1, C(0), C(0)};
  if (at < smallest_coordinate<C>()) at = C(0);
  const int low = static_cast<int>(at);
  if (low >= size - 1) return {size - 1, size - 1, C(1), C(0)};
  const C high_weight = at - static_cast<C>(low);
  return {low, low + 1, C(1) - high_weight, high_weight};
}

struct IndexRange {
  int first, last;  // empty if first > last
};

// One axis of the box in its own frame, where it is upright around the origin.
template <class C>
struct BoxAxis {
  C start, bin;
  int bins, grid;  // grid: samples a bin

  TRUNCDET_HD C coordinate(int p, int i) const {
    return start + static_cast<C>(p) * bin +
           (static_cast<C>(i) + C(0.5)) * bin / static_cast<C>(grid);
  }
  TRUNCDET_HD C step() const { return bin / static_cast<C>(grid); }
  TRUNCDET_HD int samples() const { return bins * grid; }
  // Half the distance between the first and the last sample.
  TRUNCDET_HD C extent() const {
    return C(0.5) * std::fabs(step() * static_cast<C>(samples() - 1));
  }

  // Samples, counted through all bins, that may lie in [low, high]: never too few if the interval
  // has room for rounding errors.
  TRUNCDET_HD IndexRange samples_in(C low, C high) const {
    const int number = samples();
    const C size = step();
    if (size == C(0)) return {0, number - 1};
    C from = (low - start) / size - C(0.5), to = (high - start) / size - C(0.5);
    if (size < C(0)) {
      const C swapped = from;
      from = to;
      to = swapped;
    }
    IndexRange range{0, number - 1};
    if (from > C(0)) range.first = from < static_cast<C>(number) ? static_cast<int>(from) : number;
    if (to < static_cast<C>(number - 1)) range.last = to < C(0) ? -1 : static_cast<int>(to) + 1;
    return range;
  }
  // Those of bin p.
  TRUNCDET_HD IndexRange of_bin(const IndexRange& range, int p) const {
    const int first = range.first - p * grid, last = range.last - p * grid;
    return {first > 0 ? first : 0, last < grid - 1 ? last : grid - 1};
  }
};

template <class C>
struct RotatedRoi {
  int64_t image;  // -1: the batch index is outside the batch
  BoxAxis<C> y, x;
  C center_y, center_x, cosine, sine;
  C slack;  // more than the rounding errors of a sample's place and of what inverts it
  C count;  // samples a bin, at least 1
  int height, width;

  TRUNCDET_HD bool empty() const { return y.grid == 0; }

  // The cells of the sample at (along_y, along_x) in the box's frame.
  TRUNCDET_HD Sample<C> rows_of(C along_y, C along_x) const {
    return cells_beside(along_y * cosine - along_x * sine + center_y, height);
  }
  TRUNCDET_HD Sample<C> columns_of(C along_y, C along_x) const {
    return cells_beside(along_y * sine + along_x * cosine + center_x, width);
  }

  // Samples that may lie within `distance` of a point of the map along both axes of the map.
  TRUNCDET_HD void samples_near(C at_y, C at_x, C distance_y, C distance_x, IndexRange* rows,
                                IndexRange* columns) const {
    const C from_y = at_y - center_y, from_x = at_x - center_x;
    const C along_y = from_y * cosine + from_x * sine;
    const C along_x = from_x * cosine - from_y * sine;
    const C c = std::fabs(cosine), s = std::fabs(sine);
    const C reach_y = c * distance_y + s * distance_x + slack;
    const C reach_x = c * distance_x + s * distance_y + slack;
    *rows = y.samples_in(along_y - reach_y, along_y + reach_y);
    *columns = x.samples_in(along_x - reach_x, along_x + reach_x);
  }

  // Samples that may lie on the map: few of a huge box's many.
  TRUNCDET_HD void samples_on_map(IndexRange* rows, IndexRange* columns) const {
    const C half_height = C(0.5) * static_cast<C>(height);
    const C half_width = C(0.5) * static_cast<C>(width);
    samples_near(half_height, half_width, half_height + C(1), half_width + C(1), rows, columns);
  }

  // Rows and columns of cells that the box may touch.
  TRUNCDET_HD void cells(IndexRange* rows, IndexRange* columns) const {
    *rows = *columns = {0, -1};
    if (empty()) return;
    const C c = std::fabs(cosine), s = std::fabs(sine);
    *rows = near(center_y, c * y.extent() + s * x.extent(), height);
    *columns = near(center_x, s * y.extent() + c * x.extent(), width);
  }

 private:
  // Cells less than one and `extent` away.
  TRUNCDET_HD IndexRange near(C center, C extent, int size) const {
    const C low = center - extent - C(1) - slack, high = center + extent + C(1) + slack;
    if (low > static_cast<C>(size) || high < C(0)) return {0, -1};
    return {low > C(0) ? static_cast<int>(low) : 0,
            high < static_cast<C>(size - 1) ? static_cast<int>(high) : size - 1};
  }
};

// Box row: batch index, centre x, centre y, width, height, angle in radians.
template <class C>
TRUNCDET_HD RotatedRoi<C> make_rotated_roi(const C box[6], const RotatedShape& shape) {
  RotatedRoi<C> roi;
  const C index = box[0];
  const bool known = index > C(-1) && index < static_cast<C>(shape.images);
  roi.image = known ? static_cast<int64_t>(index) : -1;
  roi.height = static_cast<int>(shape.height);
  roi.width = static_cast<int>(shape.width);
  const C scale = static_cast<C>(shape.spatial_scale);
  const C offset = shape.aligned ? C(0.5) : C(0);
  roi.center_x = box[1] * scale - offset;
  roi.center_y = box[2] * scale - offset;
  C width = box[3] * scale, height = box[4] * scale;
  if (!shape.aligned) {
    width = width < C(1) ? C(1) : width;
    height = height < C(1) ? C(1) : height;
  }
  if (std::fabs(width) < smallest_side<C>()) width = C(0);
  if (std::fabs(height) < smallest_side<C>()) height = C(0);
  const double angle = static_cast<double>(box[5]);
  const C reach =
      std::fabs(roi.center_y) + std::fabs(roi.center_x) + std::fabs(height) + std::fabs(width);
  // Both false for NaN.
  const bool usable = known && reach <= static_cast<C>(kFarthest) &&
                      std::fabs(angle) <= kLargestAngle && shape.height > 0 && shape.width > 0;
  const SineCosine turned = sine_cosine(usable ? (shape.clockwise ? -angle : angle) : 0.0);
  roi.sine = static_cast<C>(turned.sine);
  roi.cosine = static_cast<C>(turned.cosine);
  const C bin_y = height / static_cast<C>(shape.pooled_height);
  const C bin_x = width / static_cast<C>(shape.pooled_width);
  int grid_y = usable ? axis_grid(bin_y, shape.sampling_ratio) : 0;
  int grid_x = usable ? axis_grid(bin_x, shape.sampling_ratio) : 0;
  if (grid_y == 0 || grid_x == 0) grid_y = grid_x = 0;
  const C samples = static_cast<C>(grid_y) * static_cast<C>(grid_x);
  roi.count = samples < C(1) ? C(1) : samples;
  roi.y = {C(-0.5) * height, bin_y, static_cast<int>(shape.pooled_height), grid_y};
  roi.x = {C(-0.5) * width, bin_x, static_cast<int>(shape.pooled_width), grid_x};
  // Some thirty roundings of numbers up to `reach`; 64 are allowed for.
  roi.slack = C(9.765625e-4) + reach * (std::is_same_v<C, double> ? C(7.2e-15) : C(3.9e-6));
  return roi;
}

// Calls f(bin, weight) for the bins with a weight on a cell that is not zero, ascending.
template <class C, class F>
TRUNCDET_HD void for_each_weight(const RotatedRoi<C>& roi, int cell_y, int cell_x, F f) {
  if (roi.empty()) return;
  IndexRange rows, columns;
  roi.samples_near(static_cast<C>(cell_y), static_cast<C>(cell_x), C(1), C(1), &rows, &columns);
  if (rows.first > rows.last || columns.first > columns.last) return;
  for (int p = rows.first / roi.y.grid; p <= rows.last / roi.y.grid; ++p) {
    const IndexRange of_y = roi.y.of_bin(rows, p);
    for (int q = columns.first / roi.x.grid; q <= columns.last / roi.x.grid; ++q) {
      const IndexRange of_x = roi.x.of_bin(columns, q);
      C sum = C(0);
      for (int i = of_y.first; i <= of_y.last; ++i) {
        const C along_y = roi.y.coordinate(p, i);
        for (int j = of_x.first; j <= of_x.last; ++j) {
          const C along_x = roi.x.coordinate(q, j);
          const Sample<C> y = roi.rows_of(along_y, along_x);
          if (y.low != cell_y && y.high != cell_y) continue;
          const Sample<C> x = roi.columns_of(along_y, along_x);
          if (x.low != cell_x && x.high != cell_x) continue;
          // Of two equal cells at the border the low one has all the weight.
          sum += (y.low == cell_y ? y.low_weight : y.high_weight) *
                 (x.low == cell_x ? x.low_weight : x.high_weight);
        }
      }
      if (sum != C(0)) f(p * roi.x.bins + q, sum / roi.count);
    }
  }
}

// The value of one sample; `load(cell)` is asked for cells of the map with a weight.
template <class C, class Load>
TRUNCDET_HD C sample_value(const Sample<C>& y, const Sample<C>& x, int width, Load load) {
  const bool above = y.high_weight != C(0), right = x.high_weight != C(0);
  const int64_t low = int64_t(y.low) * width, high = int64_t(y.high) * width;
  C value = y.low_weight * x.low_weight * load(low + x.low);
  if (right) value += y.low_weight * x.high_weight * load(low + x.high);
  if (above) value += y.high_weight * x.low_weight * load(high + x.low);
  if (above && right) value += y.high_weight * x.high_weight * load(high + x.high);
  return value;
}

}  // namespace truncdet
