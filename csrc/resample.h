// The weights of interpolation and adaptive average pooling along one axis, and their inverse:
// which output positions use a given input cell. Shared by CPU and CUDA.
//
// Both operators are separable, so the gradient of a cell is a nested sum over the outputs (z, y,
// x) that used it, each loop in ascending order and every operation rounded on its own:
//   grad[k, j, i] = sum_z wz * (sum_y wy * (sum_x wx * g[z, y, x])),
// where a weight that is zero takes part in nothing. Pooling divides by the window's size instead
// of multiplying with a weight. One thread owns a cell: nothing is added by two of them.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

enum ResampleKind : int { kLinear = 0, kCubic = 1, kAverage = 2 };
constexpr int kMaxTaps = 4;

// Outputs [first, last) of an axis.
struct OutputRange {
  int32_t first, last;
};

template <class C>
struct ResampleAxis {
  int32_t in, out;  // cells of the input, positions of the output
  int kind;
  bool align_corners;
  bool copied;  // every output is the cell of its number
  C scale;      // cells a step of the output, as torch computes it

  // Cells that one output uses, counted from the first of them.
  TRUNCDET_HD int taps() const { return kind == kLinear ? 2 : (kind == kCubic ? 4 : 1); }
};

// The weights an output gives to the cells first, first + 1 and so on. Of a pooling window only
// weight[0] counts: its size.
template <class C>
struct OutputWeights {
  int32_t first;
  C weight[kMaxTaps];
};

// Where the centre of output o falls, in cells, between -0.5 and one cell beyond the end.
template <class C>
TRUNCDET_HD C source_position(const ResampleAxis<C>& axis, int32_t o) {
  const C step = static_cast<C>(o);
  C at = axis.align_corners ? axis.scale * step : axis.scale * (step + C(0.5)) - C(0.5);
  if (axis.kind == kLinear && at < C(0)) at = C(0);
  // Sizes and scales that contradict each other, infinite ones included, end at the border.
  const C beyond = static_cast<C>(axis.in) + C(1);
  return at < beyond ? at : beyond;
}

// Keys' cubic convolution with A = -0.75: the two pieces, |x| <= 1 and 1 < |x| < 2.
template <class C>
TRUNCDET_HD C cubic_near(C x) {
  return ((C(1.25) * x - C(2.25)) * x) * x + C(1);
}
template <class C>
TRUNCDET_HD C cubic_far(C x) {
  return ((C(-0.75) * x - C(-3.75)) * x + C(-6)) * x - C(-3);
}

TRUNCDET_HD int32_t clamp_cell(int32_t cell, int32_t cells) {
  return cell < 0 ? 0 : (cell < cells ? cell : cells - 1);
}

// start and end of a pooling window over cells; with the sizes exchanged, the outputs of a cell.
TRUNCDET_HD int32_t window_start(int32_t o, int32_t out, int32_t in) {
  return static_cast<int32_t>(static_cast<int64_t>(o) * in / out);
}
TRUNCDET_HD int32_t window_end(int32_t o, int32_t out, int32_t in) {
  return static_cast<int32_t>(((static_cast<int64_t>(o) + 1) * in + out - 1) / out);
}

template <class C>
TRUNCDET_HD OutputWeights<C> output_weights(const ResampleAxis<C>& axis, int32_t o) {
  OutputWeights<C> result{o, {C(1), C(0), C(0), C(0)}};
  if (axis.copied) return result;
  if (axis.kind == kAverage) {
    result.first = window_start(o, axis.out, axis.in);
    result.weight[0] = static_cast<C>(window_end(o, axis.out, axis.in) - result.first);
    return result;
  }
  const C at = source_position(axis, o), below = floor(at), t = at - below;
  const int32_t cell = static_cast<int32_t>(below);
  if (axis.kind == kLinear) {
    result.first = clamp_cell(cell, axis.in);
    // Past the last centre both neighbours are the last cell, as in torch.
    const bool last = result.first == axis.in - 1;
    result.weight[0] = last ? (C(1) - t) + t : C(1) - t;
    result.weight[1] = last ? C(0) : t;
    return result;
  }
  const C u = C(1) - t;
  const C weights[4] = {cubic_far(t + C(1)), cubic_near(t), cubic_near(u), cubic_far(u + C(1))};
  result.first = clamp_cell(cell - 1, axis.in);
  result.weight[0] = C(0);
  // Neighbours outside are the border cell, whose weight is the sum of theirs.
  for (int k = 0; k < 4; ++k) {
    result.weight[clamp_cell(cell - 1 + k, axis.in) - result.first] += weights[k];
  }
  return result;
}

// The weight output o gives to a cell; zero where it does not use it.
template <class C>
TRUNCDET_HD C weight_at(const ResampleAxis<C>& axis, const OutputWeights<C>& o, int32_t cell) {
  const int32_t tap = cell - o.first;
  return axis.kind == kAverage ? o.weight[0]
                               : (tap >= 0 && tap < axis.taps() ? o.weight[tap] : C(0));
}

// The first output whose first cell is not below `cell`.
template <class C>
TRUNCDET_HD int32_t first_output_from(const ResampleAxis<C>& axis, int32_t cell) {
  int32_t low = 0, high = axis.out;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (output_weights(axis, middle).first >= cell) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// All outputs that use a cell. None is missed, whatever the rounding: the first cell of an output
// never decreases with the output, since every step of source_position (conversion, addition and
// multiplication by a number that is not negative, floor, clamp) is monotone and so is rounding to
// nearest. Hence the outputs whose first cell is in (cell - taps, cell] are one range, and
// bisection over the very function that the forward evaluates finds its ends; no inverse formula is
// involved. Pooling windows are integers: o is in the range if start(o) <= cell < end(o), that is
// floor(cell * out / in) <= o < ceil((cell + 1) * out / in).
template <class C>
TRUNCDET_HD OutputRange outputs_of(const ResampleAxis<C>& axis, int32_t cell) {
  if (axis.copied) return {cell, cell + 1};
  if (axis.kind == kAverage) {
    return {window_start(cell, axis.in, axis.out), window_end(cell, axis.in, axis.out)};
  }
  return {first_output_from(axis, cell - axis.taps() + 1), first_output_from(axis, cell + 1)};
}

// One contribution along an axis. `kind` is known to the compiler in kernels.
template <class C>
TRUNCDET_HD C contribution(int kind, C weight, C value) {
  return kind == kAverage ? value / weight : weight * value;
}

}  // namespace truncdet
