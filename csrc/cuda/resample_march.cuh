// The gather for many cells of a map or a volume: a thread owns a column of cells along the slowest
// axis and walks over the outputs along it, in ascending order. What an output sends, a nested sum
// over the other axes, is computed once for all the cells that use it. Their sums, two or four,
// move along in registers, so every cell still adds in the order of the definition: same bits.
#pragma once

#include "resample_gather.cuh"
#include "vector.cuh"

namespace truncdet {

template <class T>
struct MarchParams {
  using C = typename Format<T>::Compute;
  // The axis walked along, the one between (of one copied cell for a map), and the innermost.
  DeviceAxis<C> walk, middle, columns;
  const T* grad;
  T* out;
  int64_t inner, items;
  int64_t line, out_line;  // elements of a run along the innermost axis: of the result, of `grad`
  int32_t strip, strips;   // cells along `walk` that a thread owns, and how many such strips
  Divider by_line, by_middle, by_strips, by_inner;
};

template <int kKind, int kHeld, int kHeldMiddle, bool kUnit, class T>
__global__ void __launch_bounds__(kThreads) resample_march_kernel(MarchParams<T> p) {
  using C = typename Format<T>::Compute;
  constexpr int kTaps = kKind == kLinear ? 2 : 4;
  constexpr int kLoads = kHeld * kHeldMiddle;
  constexpr int kAhead = kLoads >= 16 ? 1 : 16 / kLoads < 4 ? 16 / kLoads : 4;
  const int64_t inner = kUnit ? 1 : p.inner;
  for (int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x; item < p.items;
       item += int64_t(gridDim.x) * kThreads) {
    // item = ((plane * strips + strip) * middle + m) * line + x * inner + c
    const int64_t above = p.by_line.quotient(item), column = item - above * p.line;
    const int64_t group = p.by_middle.quotient(above), plane = p.by_strips.quotient(group);
    const int32_t m = static_cast<int32_t>(above - group * p.middle.axis.in);
    const int32_t begin = static_cast<int32_t>(group - plane * p.strips) * p.strip;
    const int32_t end = min(begin + p.strip, p.walk.axis.in);
    const int64_t x = kUnit ? column : p.by_inner.quotient(column), c = column - x * inner;
    const Held<kKind, kHeld, C> columns(p.columns, static_cast<int32_t>(x));
    const Held<kKind, kHeldMiddle, C> rows(p.middle, m);
    const int64_t slice = p.middle.axis.out * p.out_line, layer = p.middle.axis.in * p.line;
    const T* const grad = p.grad + plane * p.walk.axis.out * slice + c;
    T* const out = p.out + plane * p.walk.axis.in * layer + m * p.line + column;
    const int32_t first = p.walk.outputs[begin].first, last = p.walk.outputs[end - 1].last;

    // sums[t] is the one of cell at + t. Cells before `begin` are other threads'.
    int32_t at = first < last ? min(p.walk.first[first], begin) : begin;
    C sums[kTaps] = {};
    const auto pass = [&] {
      if (at >= begin) out[at * layer] = narrow<T>(sums[0]);
#pragma unroll
      for (int t = 0; t + 1 < kTaps; ++t) sums[t] = sums[t + 1];
      sums[kTaps - 1] = C(0);
      ++at;
    };
    const auto add = [&](int32_t o, C value) {
      const int32_t to = p.walk.first[o];
      while (at < to) pass();
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        const C weight = p.walk.weights[int64_t(o) * kTaps + t];
        if (weight != C(0)) sums[t] = sums[t] + contribution<C>(kKind, weight, value);
      }
    };
    if (columns.complete() && rows.complete()) {
      const T* const corner =
          grad + rows.outputs.first * p.out_line + columns.outputs.first * inner;
      for (int32_t o = first; o < last; o += kAhead) {
        // All loads before the first sum, so that they are under way together.
        C values[kAhead][kHeldMiddle][kHeld];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const T* const from = corner + min(o + k, last - 1) * slice;
#pragma unroll
          for (int j = 0; j < kHeldMiddle; ++j) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
              const bool used =
                  columns.weights[i] != C(0) && (kHeldMiddle == 1 || rows.weights[j] != C(0));
              values[k][j][i] = used ? C(widen(from[j * p.out_line + i * inner])) : C(0);
            }
          }
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (o + k >= last) break;
          const auto line = [&](int j) {
            return columns.sum([&](int i) { return values[k][j][i]; });
          };
          // The one row of a map has weight one, which changes nothing but the sign of zero.
          add(o + k, kHeldMiddle == 1 ? line(0) : rows.sum(line));
        }
      }
    } else {
      for (int32_t o = first; o < last; ++o) {
        add(o, table_sum<kKind>(p.middle, rows.outputs, m, [&](int32_t y) {
              return line_sum<kKind>(p.columns, columns.outputs, static_cast<int32_t>(x),
                                     grad + o * slice + y * p.out_line, inner);
            }));
      }
    }
    while (at < end) pass();
  }
}

}  // namespace truncdet
