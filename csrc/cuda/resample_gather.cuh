// The gathers: a thread, or a warp, owns a cell and adds what belongs to it in the order of the
// definition. All of them give the same bits.
#pragma once

#include "resample_tables.cuh"

namespace truncdet {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

template <class T>
struct ResampleParams {
  using C = typename Format<T>::Compute;
  ResampleShape shape;
  DeviceTables<C> tables;
  const T* grad;
  T* out;
  int64_t planes;  // of a thread
  bool flat;       // depth is one copied cell, whose sum is its only term
};

// The weight output o gives to a cell, from the tables.
template <int kKind, class C>
__device__ C table_weight(const DeviceAxis<C>& table, int32_t o, int32_t cell) {
  if (kKind == kAverage) return table.weights[o];
  constexpr int kTaps = kKind == kLinear ? 2 : 4;
  const int32_t tap = cell - table.first[o];
  return tap >= 0 && tap < kTaps ? table.weights[int64_t(o) * kTaps + tap] : C(0);
}

// The outputs of a cell along an axis, the first kHeld weights in registers.
template <int kKind, int kHeld, class C>
struct Held {
  OutputRange outputs;
  C weights[kHeld];

  __device__ Held(const DeviceAxis<C>& table, int32_t cell) : outputs(table.outputs[cell]) {
    // Beside a border several outputs lie on one centre and give their second cell nothing.
    while (!complete() && table_weight<kKind>(table, outputs.first, cell) == C(0)) ++outputs.first;
    while (!complete() && table_weight<kKind>(table, outputs.last - 1, cell) == C(0))
      --outputs.last;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int32_t o = outputs.first + k;
      weights[k] = o < outputs.last ? table_weight<kKind>(table, o, cell) : C(0);
    }
  }

  __device__ bool complete() const { return outputs.last - outputs.first <= kHeld; }

  // The sum over k of weight k times value(k).
  template <class Value>
  __device__ C sum(const Value& value) const {
    C total = C(0);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (weights[k] != C(0)) total = total + contribution<C>(kKind, weights[k], value(k));
    }
    return total;
  }
};

// The same sum over any number of outputs, from the tables.
template <int kKind, class C, class Value>
__device__ C table_sum(const DeviceAxis<C>& table, const OutputRange& outputs, int32_t cell,
                       const Value& value) {
  C total = C(0);
  for (int32_t o = outputs.first; o < outputs.last; ++o) {
    const C weight = table_weight<kKind>(table, o, cell);
    if (weight != C(0)) total = total + contribution<C>(kKind, weight, value(o));
  }
  return total;
}

// table_sum for values in memory: a few are loaded before the first of them is added.
template <int kKind, class C, class T>
__device__ C line_sum(const DeviceAxis<C>& table, const OutputRange& outputs, int32_t cell,
                      const T* line, int64_t stride) {
  constexpr int kAhead = 4;
  C total = C(0);
  line += outputs.first * stride;
  for (int32_t o = outputs.first; o < outputs.last; o += kAhead, line += kAhead * stride) {
    C weights[kAhead], values[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      weights[k] = o + k < outputs.last ? table_weight<kKind>(table, o + k, cell) : C(0);
      values[k] = weights[k] != C(0) ? widen(line[k * stride]) : C(0);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (weights[k] != C(0)) total = total + contribution<C>(kKind, weights[k], values[k]);
    }
  }
  return total;
}

template <int kKind, int kHeld, class T>
__global__ void __launch_bounds__(kThreads) resample_kernel(ResampleParams<T> p) {
  using C = typename Format<T>::Compute;
  // Unrolling both loops over more weights than that would only bloat the code.
  constexpr int kHeldRows = kHeld <= 8 ? kHeld : 1;
  const ResampleShape& s = p.shape;
  const int64_t cells = s.cells(), outputs = s.outputs(), line_size = int64_t(s.out[2]) * s.inner;
  const int64_t total = (s.outer + p.planes - 1) / p.planes * cells;
  for (int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; item < total;
       item += int64_t(gridDim.x) * blockDim.x) {
    // item = group of planes * cells + cell,  cell = ((k * height + j) * width + i) * inner + c
    int64_t cell, c, i, j;
    const int64_t group = divide(item, cells, &cell);
    const int64_t k = divide(divide(divide(cell, s.inner, &c), s.in[2], &i), s.in[1], &j);
    const int32_t z = static_cast<int32_t>(k), y = static_cast<int32_t>(j);
    const int32_t x = static_cast<int32_t>(i);
    const Held<kKind, kHeld, C> columns(p.tables.axis[2], x);
    const Held<kKind, kHeldRows, C> rows(p.tables.axis[1], y);
    const OutputRange slices = p.tables.axis[0].outputs[z];
    const int64_t last = (group + 1) * p.planes;
    const int64_t end = last < s.outer ? last : s.outer;
    const T* grad = p.grad + group * p.planes * outputs + c;
    T* out = p.out + group * p.planes * cells + cell;
    const auto held_line = [&](const T* line) {
      return columns.sum([&](int n) { return widen(line[n * s.inner]); });
    };
    if (p.flat && columns.complete() && rows.complete()) {
      grad += rows.outputs.first * line_size + columns.outputs.first * s.inner;
      for (int64_t plane = group * p.planes; plane < end; ++plane) {
        *out = narrow<T>(rows.sum([&](int m) { return held_line(grad + m * line_size); }));
        grad += outputs;
        out += cells;
      }
      continue;
    }
    for (int64_t plane = group * p.planes; plane < end; ++plane) {
      const auto line = [&](const T* at) {
        if (columns.complete()) return held_line(at + columns.outputs.first * s.inner);
        return line_sum<kKind>(p.tables.axis[2], columns.outputs, x, at, s.inner);
      };
      const auto slice = [&](const T* at) {
        return table_sum<kKind>(p.tables.axis[1], rows.outputs, y,
                                [&](int32_t o) { return line(at + o * line_size); });
      };
      *out = narrow<T>(table_sum<kKind>(p.tables.axis[0], slices, z, [&](int32_t o) {
        return slice(grad + int64_t(o) * s.out[1] * line_size);
      }));
      grad += outputs;
      out += cells;
    }
  }
}

// Few cells with long sums: a warp owns a cell of one plane, its lanes sum different lines, and the
// lines are then added in their order.
template <int kKind, class T>
__global__ void __launch_bounds__(kThreads) resample_wide_kernel(ResampleParams<T> p) {
  using C = typename Format<T>::Compute;
  const ResampleShape& s = p.shape;
  const int64_t cells = s.cells(), outputs = s.outputs(), line_size = int64_t(s.out[2]) * s.inner;
  const int lane = threadIdx.x % kWarp;
  for (int64_t item = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       item < s.outer * cells; item += int64_t(gridDim.x) * kThreads / kWarp) {
    // item = plane * cells + ((k * height + j) * width + i) * inner + c, the same for the warp
    int64_t cell, c, i, j;
    const int64_t plane = divide(item, cells, &cell);
    const int64_t k = divide(divide(divide(cell, s.inner, &c), s.in[2], &i), s.in[1], &j);
    const OutputRange columns = p.tables.axis[2].outputs[i], rows = p.tables.axis[1].outputs[j];
    const T* grad = p.grad + plane * outputs + c;
    const auto slice = [&](int32_t z) {
      C area = C(0);
      for (int32_t first = rows.first; first < rows.last; first += kWarp) {
        const int32_t y = first + lane;
        C weight = C(0), line = C(0);
        if (y < rows.last) {
          weight = table_weight<kKind>(p.tables.axis[1], y, static_cast<int32_t>(j));
          const T* at = grad + (int64_t(z) * s.out[1] + y) * line_size;
          line = line_sum<kKind>(p.tables.axis[2], columns, static_cast<int32_t>(i), at, s.inner);
        }
        for (int n = 0; n < kWarp && first + n < rows.last; ++n) {
          const C w = __shfl_sync(kWholeWarp, weight, n), l = __shfl_sync(kWholeWarp, line, n);
          if (w != C(0)) area = area + contribution<C>(kKind, w, l);
        }
      }
      return area;
    };
    const C volume = table_sum<kKind>(p.tables.axis[0], p.tables.axis[0].outputs[k],
                                      static_cast<int32_t>(k), slice);
    if (lane == 0) p.out[item] = narrow<T>(volume);
  }
}

}  // namespace truncdet
