// RoIAlign with max pooling: a bin's output is its largest sample. Shared by CPU and CUDA.
//
// Samples are visited row by row in ascending coordinate order and the first of equals wins; one
// outside the map counts as zero and passes no gradient (mmcv's semantics). NaN propagates: the
// first NaN wins. The gradient of a bin goes to the four corners of its sample, each corner one
// contribution (wy * wx) * g.
#pragma once

#include "roi_align.h"

namespace truncdet {

template <class C>
struct MaxSample {
  C value;
  int32_t number;  // row * grid_x + column in ascending order, -1: no gradient
};

// Samples of bin p inside the map: [first, last).
template <class C>
TRUNCDET_HD void samples_inside(const Axis<C>& axis, int p, int* first, int* last) {
  *first = axis.first_at(p, C(-1));
  *last = axis.first_at(p, static_cast<C>(axis.size));
  while (*last < axis.grid && axis.coordinate(p, *last) <= static_cast<C>(axis.size)) ++*last;
  if (*last < *first) *last = *first;
}

// Calls corner(y, x, weight) for the cells a sample lies between, weights not zero, in a fixed
// order.
template <class C, class Corner>
TRUNCDET_HD void visit_corners(const Sample<C>& y, const Sample<C>& x, const Corner& corner) {
  const C a = y.low_weight * x.low_weight, b = y.low_weight * x.high_weight;
  const C c = y.high_weight * x.low_weight, d = y.high_weight * x.high_weight;
  if (a != C(0)) corner(y.low, x.low, a);
  if (b != C(0)) corner(y.low, x.high, b);
  if (c != C(0)) corner(y.high, x.low, c);
  if (d != C(0)) corner(y.high, x.high, d);
}

// `load(y, x)` gives a feature.
template <class C, class Load>
TRUNCDET_HD MaxSample<C> max_sample(const Roi<C>& roi, int p, int q, const Load& load) {
  MaxSample<C> best{C(0), -1};
  if (roi.y.grid == 0) return best;
  bool any = false;
  const auto offer = [&](C value, int32_t number) {
    if (any && (is_nan(best.value) || !(value > best.value || is_nan(value)))) return;
    best = {value, number};
    any = true;
  };
  int first_y, last_y, first_x, last_x;
  samples_inside(roi.y, p, &first_y, &last_y);
  samples_inside(roi.x, q, &first_x, &last_x);
  const auto outside = [&] { offer(C(0), -1); };
  if (first_y > 0 || first_x > 0) outside();
  for (int i = first_y; i < last_y; ++i) {
    const Sample<C> y = roi.y.sample(p, i);
    for (int j = first_x; j < last_x; ++j) {
      const Sample<C> x = roi.x.sample(q, j);
      C value = C(0);
      visit_corners(y, x, [&](int cy, int cx, C weight) { value += weight * load(cy, cx); });
      offer(value, static_cast<int32_t>(i * roi.x.grid + j));
    }
    if (last_x < roi.x.grid || first_x > 0) outside();
  }
  if (last_y < roi.y.grid) outside();
  return best;
}

// Calls corner(y, x, weight) for the sample a bin chose.
template <class C, class Corner>
TRUNCDET_HD void visit_chosen(const Roi<C>& roi, int p, int q, int32_t number,
                              const Corner& corner) {
  // Written as a test of the whole range: `number` may come from anywhere.
  if (roi.y.grid == 0 || number < 0 || number / roi.x.grid >= roi.y.grid) return;
  const Sample<C> y = roi.y.sample(p, number / roi.x.grid);
  const Sample<C> x = roi.x.sample(q, number % roi.x.grid);
  if (y.low < 0 || x.low < 0) return;
  visit_corners(y, x, corner);
}

}  // namespace truncdet
