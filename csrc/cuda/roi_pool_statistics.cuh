// What the backward of pooling over whole cells needs to know of its RoIs: the cells they touch.
#pragma once

#include "../roi_pool.h"
#include "roi_align_statistics.cuh"

namespace truncdet {

template <class C>
struct PooledRois {
  static constexpr bool kKept = false, kTables = false;
  PoolRule rule;

  __device__ void describe(int k, const C* box, const RoiAlignShape& shape,
                           const RoiStatistics<C>& statistics) const {
    if (threadIdx.x != 0) return;
    const PoolRoi<C> roi = make_pool_roi(box, shape, rule);
    const CellRange rows = roi.y.all_cells(static_cast<int>(shape.pooled_height));
    const CellRange columns = roi.x.all_cells(static_cast<int>(shape.pooled_width));
    const int image = static_cast<int>(roi.image);
    statistics.bounds[k] =
        rows.empty() || columns.empty()
            ? RoiBounds{1, 0, 1, 0, k, 0, 0, image}
            : RoiBounds{rows.first, rows.last - 1, columns.first, columns.last - 1, k, 0, 0, image};
  }
};

}  // namespace truncdet
