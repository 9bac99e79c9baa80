// Pooling over whole cells: a bin is a rectangle of cells, of which roi_pool takes the largest and
// ps_roi_pool the mean. Shared by CPU and CUDA.
//
// Semantics are those of torchvision's and mmcv's operators, down to how a bin's edges round. Only
// boxes that no integer can hold are this library's own: corners beyond 2^30 count as 2^30.
#pragma once

#include <cfloat>

#include "roi_align.h"

namespace truncdet {

// How a box becomes cells.
enum class PoolRule : int {
  kInclusive,  // torchvision's roi_pool: corners are rounded, and both are inside
  kExact,      // mmcv's roi_pool: nothing is rounded but the edges of bins, outwards
  kHalfOpen,   // torchvision's ps_roi_pool: corners are rounded, and the last one is outside
};

struct CellRange {
  int first, last;  // last is outside

  TRUNCDET_HD bool empty() const { return last <= first; }
  TRUNCDET_HD int count() const { return last - first; }
};

template <class C>
struct PoolAxis {
  C start, bin;  // where the RoI starts, and the size of a bin, both in cells
  int size;      // cells of the map; 0 for a RoI that is none
  bool rounded;  // `start` is a whole number

  // Cells of bin p, clipped to [0, limit]; never decreasing with p.
  TRUNCDET_HD CellRange cells(int p, int limit) const {
    const C low = static_cast<C>(p) * bin, high = static_cast<C>(p + 1) * bin;
    if (rounded) {
      // Both parts are whole numbers below 2^32, so their sum is exact as an integer.
      const int64_t from = static_cast<int64_t>(start);
      return {clip(static_cast<int64_t>(floor(low)) + from, limit),
              clip(static_cast<int64_t>(ceil(high)) + from, limit)};
    }
    return {clip(floor(low + start), limit), clip(ceil(high + start), limit)};
  }
  TRUNCDET_HD CellRange cells(int p) const { return cells(p, size); }

  // All bins together.
  TRUNCDET_HD CellRange all_cells(int bins) const { return {cells(0).first, cells(bins - 1).last}; }

 private:
  template <class N>
  static TRUNCDET_HD int clip(N at, int limit) {
    return at > N(0) ? (at < static_cast<N>(limit) ? static_cast<int>(at) : limit) : 0;
  }
};

template <class C>
struct PoolRoi {
  int64_t image;  // -1: the batch index is outside the batch
  PoolAxis<C> y, x;
};

constexpr double kFarthestCorner = 1073741824.0;  // 2^30

template <class C>
TRUNCDET_HD C round_corner(C at) {
  const C farthest = static_cast<C>(kFarthestCorner);
  const C whole = round(at);  // halves away from zero
  return whole > farthest ? farthest : (whole < -farthest ? -farthest : whole);
}

template <class C>
TRUNCDET_HD PoolAxis<C> make_pool_axis(C low, C high, C scale, int64_t bins, int64_t size,
                                       PoolRule rule) {
  PoolAxis<C> axis{C(0), C(0), static_cast<int>(size), rule != PoolRule::kExact};
  const C count = static_cast<C>(bins);
  if (axis.rounded) {
    axis.start = round_corner(low * scale);
    const int64_t length = static_cast<int64_t>(round_corner(high * scale)) -
                           static_cast<int64_t>(axis.start) +
                           (rule == PoolRule::kInclusive ? 1 : 0);
    axis.bin = static_cast<C>(length < 1 ? 1 : length) / count;
  } else {
    axis.start = low * scale;
    const C length = (high + C(1)) * scale - axis.start;
    if (!(length > C(0)) || !is_finite(length)) axis.size = 0;
    axis.bin = length / count;
  }
  return axis;
}

// Box row: batch index, x1, y1, x2, y2.
template <class C>
TRUNCDET_HD PoolRoi<C> make_pool_roi(const C box[5], const RoiAlignShape& shape, PoolRule rule) {
  const C scale = static_cast<C>(shape.spatial_scale);
  bool usable = shape.height > 0 && shape.width > 0;
  for (int i = 1; i < 5; ++i) usable = usable && is_finite(box[i] * scale);
  PoolRoi<C> roi{roi_image(box[0], shape.images), {}, {}};
  if (!usable || roi.image < 0) return roi;
  roi.y = make_pool_axis(box[2], box[4], scale, shape.pooled_height, shape.height, rule);
  roi.x = make_pool_axis(box[1], box[3], scale, shape.pooled_width, shape.width, rule);
  if (roi.y.size == 0 || roi.x.size == 0) roi.y.size = roi.x.size = 0;
  return roi;
}

template <class C>
struct MaxCell {
  C value;
  int32_t cell;  // y * width + x, -1: none, and no gradient
};

// The largest cell of a bin, the first of equals row by row. NaN is never larger, and no cell is
// below the most negative float32 number, as in the originals; a bin without cells is 0.
template <class C, class Load>
TRUNCDET_HD MaxCell<C> max_cell(const CellRange& rows, const CellRange& columns, int width,
                                const Load& load) {
  MaxCell<C> best{rows.empty() || columns.empty() ? C(0) : -static_cast<C>(FLT_MAX), -1};
  for (int y = rows.first; y < rows.last; ++y) {
    for (int x = columns.first; x < columns.last; ++x) {
      const C value = load(y, x);
      if (value > best.value) best = {value, y * width + x};
    }
  }
  return best;
}

template <class C>
TRUNCDET_HD C cell_count(const CellRange& rows, const CellRange& columns) {
  return static_cast<C>(int64_t(rows.count()) * columns.count());
}

// The mean of a bin's cells, added row by row; a bin without cells is 0.
template <class C, class Load>
TRUNCDET_HD C mean_cell(const CellRange& rows, const CellRange& columns, const Load& load) {
  if (rows.empty() || columns.empty()) return C(0);
  C sum = C(0);
  for (int y = rows.first; y < rows.last; ++y) {
    for (int x = columns.first; x < columns.last; ++x) sum += load(y, x);
  }
  return sum / cell_count<C>(rows, columns);
}

// torchvision's ps_roi_pool leaves the last row and column of the map out of the means, yet gives
// them a share of the gradient.
template <class C>
TRUNCDET_HD CellRange mean_cells(const PoolAxis<C>& axis, int p) {
  return axis.cells(p, axis.size > 0 ? axis.size - 1 : 0);
}

// Whether a bin of this RoI can have chosen `cell`: others receive nothing, whatever argmax says.
TRUNCDET_HD bool may_choose(const CellRange& rows, const CellRange& columns, int32_t cell,
                            int64_t width) {
  if (cell < 0) return false;
  const int64_t y = cell / width, x = cell % width;
  return y >= rows.first && y < rows.last && x >= columns.first && x < columns.last;
}

}  // namespace truncdet
