// grid_sample: from a grid's coordinates to taps. The formulas are those of PyTorch's kernels:
// -1 and 1 are the outer edges of the first and last cell, or their centres with align_corners.
#pragma once

#include "taps.h"

namespace truncdet {

// PyTorch's numbers.
enum class Interpolation : int64_t { kLinear = 0, kNearest = 1, kCubic = 2 };
enum class Padding : int64_t { kZeros = 0, kBorder = 1, kReflection = 2 };

template <Interpolation kMode>
constexpr int taps_per_axis() {
  return kMode == Interpolation::kLinear ? 2 : kMode == Interpolation::kNearest ? 1 : 4;
}

// A coordinate in units of cells and its derivative by what it was computed from.
template <class C>
struct Coordinate {
  C at, derivative;
};

template <class C>
TRUNCDET_HD Coordinate<C> unnormalise(C coordinate, int64_t size, bool align_corners) {
  const C half = static_cast<C>(align_corners ? size - 1 : size) / C(2);
  const C at = (coordinate + C(1)) * half;
  return {align_corners ? at : at - C(0.5), half};
}

// Into [0, size - 1]. On the border and beyond the gradient is zero; NaN becomes 0, as it does in
// PyTorch's forward.
template <class C>
TRUNCDET_HD Coordinate<C> clip(Coordinate<C> x, int64_t size) {
  const C last = static_cast<C>(size - 1);
  if (!(x.at > C(0))) return {C(0), C(0)};
  if (x.at >= last) return {last, C(0)};
  return x;
}

// Mirrors at the borders (cell edges, or the outer cells' centres with align_corners) as often as
// is needed. Infinities give NaN, which `clip` takes to 0.
template <class C>
TRUNCDET_HD Coordinate<C> reflect(Coordinate<C> x, int64_t size, bool align_corners) {
  const C low = align_corners ? C(0) : C(-0.5);
  const C period = static_cast<C>(align_corners ? size - 1 : size) * C(2);
  if (period == C(0)) return {C(0), C(0)};
  const C from_low = x.at - low;
  const bool negative = from_low < C(0);
  const C distance = std::fabs(from_low);
  const C turns = std::trunc(distance / period);
  const C forth = distance - turns * period;
  const C back = period - forth;
  const bool flipped = forth > back;
  return {(flipped ? back : forth) + low, flipped != negative ? -x.derivative : x.derivative};
}

template <class C>
TRUNCDET_HD Coordinate<C> pad(Coordinate<C> x, int64_t size, Padding padding, bool align_corners) {
  if (padding == Padding::kZeros) return x;
  if (padding == Padding::kReflection) x = reflect(x, size, align_corners);
  return clip(x, size);
}

// Cubic convolution (Keys 1981) with PyTorch's a = -3/4; the magnitudes of the four weights add up
// to at most 1 + 2 * 3/4 * 1/4 = 11/8, at t = 1/2. kCubicHeadroom bits hold its square.
constexpr int kCubicHeadroom = 1;

template <class C>
TRUNCDET_HD void cubic_weights(C t, C* weight) {
  const C a = C(-0.75);
  const C outer[2] = {t + C(1), C(2) - t}, inner[2] = {t, C(1) - t};
  for (int side = 0; side < 2; ++side) {
    const C x = outer[side], y = inner[side];
    weight[3 * side] = ((a * x - C(5) * a) * x + C(8) * a) * x - C(4) * a;
    weight[1 + side] = ((a + C(2)) * y - (a + C(3))) * y * y + C(1);
  }
}

template <class C>
TRUNCDET_HD void cubic_slopes(C t, C* slope) {
  const C a = C(-0.75);
  const C outer[2] = {t + C(1), C(2) - t}, inner[2] = {t, C(1) - t};
  for (int side = 0; side < 2; ++side) {
    const C x = outer[side], y = inner[side];
    const C far = (C(3) * a * x - C(10) * a) * x + C(8) * a;
    const C near = (C(3) * (a + C(2)) * y - C(2) * (a + C(3))) * y;
    // The distance to the taps of the left side grows with t, that of the right side shrinks.
    slope[3 * side] = side == 0 ? far : -far;
    slope[1 + side] = side == 0 ? near : -near;
  }
}

// One axis of a sample, and the derivative of its coordinate.
template <class C, int K>
struct SampledAxis {
  Axis<C, K> taps;
  C derivative;
};

template <class C, Interpolation kMode, int K = taps_per_axis<kMode>()>
TRUNCDET_HD SampledAxis<C, K> sample_axis(C coordinate, int64_t size, Padding padding,
                                          bool align_corners) {
  Coordinate<C> x = unnormalise(coordinate, size, align_corners);
  if constexpr (kMode == Interpolation::kCubic) {
    const C base = std::floor(x.at);
    const C t = x.at - base;
    // NaN for a coordinate that is not finite.
    if (!(t >= C(0))) return {no_taps<C, K>(), x.derivative};
    Axis<C, K> axis;
    cubic_weights(t, axis.weight);
    cubic_slopes(t, axis.slope);
    for (int k = 0; k < K; ++k) {
      // The padding applies to every tap, so two of them may meet in one cell.
      const C at = pad(Coordinate<C>{base + C(k - 1), C(0)}, size, padding, align_corners).at;
      const bool inside = at >= C(0) && at < static_cast<C>(size);
      axis.index[k] = inside ? static_cast<int32_t>(at) : -1;
    }
    return {axis, x.derivative};
  } else {
    x = pad(x, size, padding, align_corners);
    if constexpr (kMode == Interpolation::kLinear) {
      return {linear_taps(x.at, size), x.derivative};
    } else {
      const C nearest = std::rint(x.at);
      if (!(nearest >= C(0) && nearest < static_cast<C>(size))) return {no_taps<C, 1>(), C(0)};
      return {{{static_cast<int32_t>(nearest)}, {C(1)}, {C(0)}}, C(0)};
    }
  }
}

}  // namespace truncdet
