// The gradient of interpolation and adaptive average pooling on the CPU, one axis after the other:
// the nested sums of the definition, inner ones first.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../resample_host.h"

namespace truncdet {
namespace {

// Channels that one task takes where they are last in memory.
constexpr int64_t kChannels = 64;

// The outputs that use each cell and their weights, zeros left out.
template <class C>
struct AxisTable {
  struct Entry {
    int32_t output;
    C weight;
  };
  int32_t in, out;
  std::vector<Entry> entries;
  std::vector<int64_t> begin;  // of the entries of a cell; one more at the end

  explicit AxisTable(const ResampleAxis<C>& axis) : in(axis.in), out(axis.out) {
    std::vector<OutputWeights<C>> weights(axis.out);
    for (int32_t o = 0; o < axis.out; ++o) weights[o] = output_weights(axis, o);
    for (int32_t cell = 0; cell < axis.in; ++cell) {
      begin.push_back(entries.size());
      const OutputRange range = outputs_of(axis, cell);
      for (int32_t o = range.first; o < range.last; ++o) {
        const C weight = weight_at(axis, weights[o], cell);
        if (weight != C(0)) entries.push_back({o, weight});
      }
    }
    begin.push_back(entries.size());
  }
};

// `before` blocks of [outputs, after] become blocks of [cells, after]; neighbours along the axis
// are `stride` elements apart in the source and `after` in the target.
template <int kKind, class From, class C>
void gather_axis(const AxisTable<C>& table, const From* from, int64_t before, int64_t after,
                 int64_t stride, C* to) {
  for (int64_t b = 0; b < before; ++b) {
    const From* source = from + b * table.out * stride;
    for (int32_t cell = 0; cell < table.in; ++cell, to += after) {
      const auto* entry = table.entries.data() + table.begin[cell];
      const auto* end = table.entries.data() + table.begin[cell + 1];
      if (after == 1) {
        C sum = C(0);
        for (; entry < end; ++entry) {
          sum = sum + contribution<C>(kKind, entry->weight, widen(source[entry->output * stride]));
        }
        *to = sum;
        continue;
      }
      std::fill(to, to + after, C(0));
      for (; entry < end; ++entry) {
        const From* line = source + entry->output * stride;
        for (int64_t i = 0; i < after; ++i) {
          to[i] = to[i] + contribution<C>(kKind, entry->weight, widen(line[i]));
        }
      }
    }
  }
}

template <int kKind, class T>
void resample(const T* grad, const ResampleShape& s, const ResampleArguments& a, T* out) {
  using C = typename Format<T>::Compute;
  const AxisTable<C> z(resample_axis<C>(s, a, 0)), y(resample_axis<C>(s, a, 1)),
      x(resample_axis<C>(s, a, 2));
  const int64_t parts = (s.inner + kChannels - 1) / kChannels;
  torch::stable::parallel_for(0, s.outer * parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> lines, slices, cells;
    for (int64_t task = begin; task < end; ++task) {
      // task = outer * parts + part
      const int64_t o = task / parts, first = task % parts * kChannels;
      const int64_t count = std::min(kChannels, s.inner - first);
      lines.resize(int64_t(s.out[0]) * s.out[1] * s.in[2] * count);
      slices.resize(int64_t(s.out[0]) * s.in[1] * s.in[2] * count);
      cells.resize(s.cells() / s.inner * count);
      gather_axis<kKind>(x, grad + o * s.outputs() + first, int64_t(s.out[0]) * s.out[1], count,
                         s.inner, lines.data());
      const int64_t row = s.in[2] * count, plane = s.in[1] * row;
      gather_axis<kKind>(y, lines.data(), s.out[0], row, row, slices.data());
      gather_axis<kKind>(z, slices.data(), 1, plane, plane, cells.data());
      T* target = out + o * s.cells() + first;
      for (int64_t cell = 0; cell < s.cells() / s.inner; ++cell) {
        for (int64_t i = 0; i < count; ++i) {
          target[cell * s.inner + i] = narrow<T>(cells[cell * count + i]);
        }
      }
    }
  });
}

Tensor resample_backward_cpu(Tensor grad, int64_t depth, int64_t height, int64_t width,
                             int64_t kind, bool align_corners, double scale_depth,
                             double scale_height, double scale_width, int64_t copied) {
  const ResampleArguments arguments{{depth, height, width},
                                    kind,
                                    align_corners,
                                    {scale_depth, scale_height, scale_width},
                                    copied};
  const ResampleShape shape = resample_shape(grad, arguments);
  Tensor out = empty_cells(grad, shape);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "_resample_backward", [&] {
    const auto run =
        kind == kLinear
            ? resample<kLinear, scalar_t>
            : (kind == kCubic ? resample<kCubic, scalar_t> : resample<kAverage, scalar_t>);
    run(const_data<scalar_t>(grad), shape, arguments, mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_resample_backward", TORCH_BOX(&truncdet::resample_backward_cpu));
}
