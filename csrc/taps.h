// Interpolation as products of one-dimensional taps: which cells a coordinate reads along an axis,
// with which weights, and how the weights change with the coordinate. Axis 0 is x, the innermost.
//
// Only single IEEE operations in a written order, so host and device agree in every bit.
#pragma once

#include <cmath>

#include "fixedpoint.h"

// Loops over taps, so that indexed taps stay in registers.
#if defined(__CUDA_ARCH__)
#define TRUNCDET_UNROLL _Pragma("unroll")
#else
#define TRUNCDET_UNROLL
#endif

namespace truncdet {

// One axis of one sample. A tap outside has index -1 and is left out of every sum; a coordinate
// outside has no taps at all, and zeros for weights and slopes, so that none is ever NaN.
template <class C, int K>
struct Axis {
  int32_t index[K];
  C weight[K];
  C slope[K];  // d weight / d coordinate
};

template <class C, int K>
TRUNCDET_HD Axis<C, K> no_taps() {
  Axis<C, K> axis;
  for (int k = 0; k < K; ++k) {
    axis.index[k] = -1;
    axis.weight[k] = C(0);
    axis.slope[k] = C(0);
  }
  return axis;
}

// The two cells beside `x`, in units of cells; `size` is below 2^31. At -1 the weights are zero but
// a slope is not, as in PyTorch. Written as !(inside) so that NaN is outside.
template <class C>
TRUNCDET_HD Axis<C, 2> linear_taps(C x, int64_t size) {
  if (!(x >= C(-1) && x < static_cast<C>(size))) return no_taps<C, 2>();
  const C base = std::floor(x);
  Axis<C, 2> axis;
  axis.index[0] = static_cast<int32_t>(base);
  axis.index[1] = axis.index[0] + int64_t(1) < size ? axis.index[0] + 1 : -1;
  // Both at most 1, also where the difference rounds.
  axis.weight[1] = x - base;
  axis.weight[0] = C(1) - axis.weight[1];
  axis.slope[0] = C(-1);
  axis.slope[1] = C(1);
  return axis;
}

// Calls f(cell, weight) for every tap inside, planes first, then rows; `size` is per axis.
template <int kDims, int K, class C, class F>
TRUNCDET_HD void for_each_tap(const Axis<C, K>* axis, const int64_t* size, F f) {
  constexpr int kPlanes = kDims == 3 ? K : 1;
  TRUNCDET_UNROLL
  for (int k = 0; k < kPlanes; ++k) {
    if (kDims == 3 && axis[kDims - 1].index[k] < 0) continue;
    TRUNCDET_UNROLL
    for (int j = 0; j < K; ++j) {
      if (axis[1].index[j] < 0) continue;
      int64_t row = axis[1].index[j];
      C weight = axis[1].weight[j];
      if (kDims == 3) {
        row += axis[kDims - 1].index[k] * size[1];
        weight = axis[kDims - 1].weight[k] * weight;
      }
      TRUNCDET_UNROLL
      for (int i = 0; i < K; ++i) {
        if (axis[0].index[i] < 0) continue;
        f(row * size[0] + axis[0].index[i], weight * axis[0].weight[i]);
      }
    }
  }
}

// The interpolated value and its derivatives along every axis. `load(cell)` is asked for taps
// inside only; those outside count as zero.
template <class C, int kDims>
struct Interpolated {
  C value, slope[kDims];
};

template <int kDims, int K, class C, class Load>
TRUNCDET_HD Interpolated<C, kDims> interpolate(const Axis<C, K>* axis, const int64_t* size,
                                               Load load) {
  constexpr int kPlanes = kDims == 3 ? K : 1;
  Interpolated<C, kDims> all{};
  TRUNCDET_UNROLL
  for (int k = 0; k < kPlanes; ++k) {
    const int32_t z = kDims == 3 ? axis[kDims - 1].index[k] : 0;
    C value(0), along_x(0), along_y(0);
    TRUNCDET_UNROLL
    for (int j = 0; j < K; ++j) {
      const int32_t y = axis[1].index[j];
      C line(0), line_slope(0);
      TRUNCDET_UNROLL
      for (int i = 0; i < K; ++i) {
        const int32_t x = axis[0].index[i];
        const bool inside = x >= 0 && y >= 0 && z >= 0;
        const int64_t row = kDims == 3 ? z * size[1] + y : y;
        const C read = inside ? load(row * size[0] + x) : C(0);
        line += read * axis[0].weight[i];
        line_slope += read * axis[0].slope[i];
      }
      value += line * axis[1].weight[j];
      along_x += line_slope * axis[1].weight[j];
      along_y += line * axis[1].slope[j];
    }
    if (kDims == 3) {
      const C weight = axis[kDims - 1].weight[k];
      all.value += value * weight;
      all.slope[0] += along_x * weight;
      all.slope[1] += along_y * weight;
      all.slope[kDims - 1] += value * axis[kDims - 1].slope[k];
    } else {
      all.value = value;
      all.slope[0] = along_x;
      all.slope[1] = along_y;
    }
  }
  return all;
}

}  // namespace truncdet
