// ms_deform_attn on the CPU: the definition, read directly.
#include "../ms_deform_attn_host.h"
#include "statistics.h"

#include <tuple>
#include <vector>

namespace truncdet {
namespace {

// Fewest rows (an image's query and head) worth a thread.
constexpr int64_t kGrain = 16;

std::vector<Level> read_levels(const MsDeformCall& call) {
  std::vector<Level> levels;
  for (int64_t l = 0; l < call.shape.levels; ++l) {
    levels.push_back(read_level(const_data<int64_t>(call.spatial_shapes),
                                const_data<int64_t>(call.level_start_index), l, call.shape.values));
    TRUNCDET_CHECK(levels.back().valid, "ms_deform_attn: spatial_shapes must lie inside value, ",
                   "level ", l, " does not");
  }
  return levels;
}

template <class T, class W>
struct Inputs {
  const T* value;
  const W *locations, *weights;
};

// The values of one image and head; `cell` counts inside a level.
template <class T>
struct Map {
  const T* value;
  int64_t stride;

  Map(const T* all, const MsDeformShape& s, int64_t row, const Level& level)
      : value(all +
              ((row / (s.queries * s.heads) * s.values + level.start) * s.heads + row % s.heads) *
                  s.channels),
        stride(s.heads * s.channels) {}
  auto operator()(int64_t cell, int64_t channel) const {
    return widen(value[cell * stride + channel]);
  }
};

template <class T, class W>
void forward(const Inputs<T, W>& in, const std::vector<Level>& levels, const MsDeformShape& s,
             T* out) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, s.rows(), kGrain, [&](int64_t begin, int64_t end) {
    std::vector<C> sums(s.channels);
    for (int64_t row = begin; row < end; ++row) {
      sums.assign(s.channels, C(0));
      for (int64_t i = 0; i < s.samples(); ++i) {
        const Level& level = levels[i / s.points];
        const int64_t at = row * s.samples() + i;
        const auto sample =
            sample_level<C>(widen(in.locations[2 * at]), widen(in.locations[2 * at + 1]), level);
        if (!sample.inside) continue;
        const Map<T> map(in.value, s, row, level);
        for (int64_t c = 0; c < s.channels; ++c) {
          const auto found = interpolate<2>(sample.axis, level.size,
                                            [&](int64_t cell) { return C(map(cell, c)); });
          sums[c] += found.value * widen(in.weights[at]);
        }
      }
      for (int64_t c = 0; c < s.channels; ++c) out[row * s.channels + c] = narrow<T>(sums[c]);
    }
  });
}

template <class T, class W>
void gather(const T* grad, const Inputs<T, W>& in, const std::vector<Level>& levels,
            const MsDeformShape& s, W* location_gradient, W* weight_gradient) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, s.rows(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * s.samples(); at < end * s.samples(); ++at) {
      const int64_t row = at / s.samples();
      const Level& level = levels[at % s.samples() / s.points];
      const auto sample =
          sample_level<C>(widen(in.locations[2 * at]), widen(in.locations[2 * at + 1]), level);
      C value[kChannelLanes] = {}, along_x[kChannelLanes] = {}, along_y[kChannelLanes] = {};
      if (sample.inside) {
        const Map<T> map(in.value, s, row, level);
        for (int64_t c = 0; c < s.channels; ++c) {
          const auto found = interpolate<2>(sample.axis, level.size,
                                            [&](int64_t cell) { return C(map(cell, c)); });
          const C g = widen(grad[row * s.channels + c]);
          value[c % kChannelLanes] += g * found.value;
          along_x[c % kChannelLanes] += g * found.slope[0];
          along_y[c % kChannelLanes] += g * found.slope[1];
        }
      }
      const C weight = sample.inside ? C(widen(in.weights[at])) : C(0);
      weight_gradient[at] = narrow<W>(add_lanes(value));
      location_gradient[2 * at] =
          narrow<W>((add_lanes(along_x) * weight) * static_cast<C>(level.size[0]));
      location_gradient[2 * at + 1] =
          narrow<W>((add_lanes(along_y) * weight) * static_cast<C>(level.size[1]));
    }
  });
}

template <class T, class W>
void accumulate(const T* grad, const Inputs<T, W>& in, const std::vector<Level>& levels,
                const MsDeformShape& s, T* out) {
  using C = typename Format<T>::Compute;
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const int64_t image_cells = s.values * s.heads * s.channels;
  std::vector<int64_t> high(image_cells), low(kTwoLimbs ? image_cells : 0);
  std::vector<uint8_t> flags;
  for (int64_t image = 0; image < s.images; ++image) {
    const int64_t first_row = image * s.queries * s.heads, rows = s.queries * s.heads;
    const auto of_grad = value_statistics(grad + first_row * s.channels, rows * s.channels);
    const auto of_weights =
        value_statistics(in.weights + first_row * s.samples(), rows * s.samples());
    const int grad_exponent = exponent_above<C>(of_grad.amax);
    const int weight_exponent = exponent_above<C>(of_weights.amax);
    const Scale<C> scale(grad_exponent + weight_exponent, s.headroom_bits());
    const bool flagged = of_grad.nonfinite || of_weights.nonfinite;
    high.assign(image_cells, 0);
    low.assign(kTwoLimbs ? image_cells : 0, 0);
    flags.assign(flagged ? image_cells : 0, 0);
    // Heads share no cell, so threads that own heads need no atomics.
    torch::stable::parallel_for(0, s.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = first_row; row < first_row + rows; ++row) {
        const int64_t head = row % s.heads;
        if (head < begin || head >= end) continue;
        for (int64_t i = 0; i < s.samples(); ++i) {
          const Level& level = levels[i / s.points];
          const int64_t at = row * s.samples() + i;
          const auto sample =
              sample_level<C>(widen(in.locations[2 * at]), widen(in.locations[2 * at + 1]), level);
          if (!sample.inside) continue;
          const C weight = widen(in.weights[at]);
          const C normal_weight = scale_exponent<C>(weight, -weight_exponent);
          for (int64_t c = 0; c < s.channels; ++c) {
            const C g = widen(grad[row * s.channels + c]);
            const uint32_t seen = product_flag(weight, g);
            const C normal = normal_weight * scale_exponent<C>(g, -grad_exponent);
            for_each_tap<2>(sample.axis, level.size, [&](int64_t cell, C tap) {
              const int64_t to = ((level.start + cell) * s.heads + head) * s.channels + c;
              if (seen != 0) {
                if (tap != C(0)) flags[to] |= static_cast<uint8_t>(seen);
                return;
              }
              const C contribution = tap * normal;
              const int64_t rounded = scale.quantise(contribution);
              high[to] += rounded;
              if (kTwoLimbs) low[to] += scale.quantise_rest(contribution, rounded);
            });
          }
        }
      }
    });
    for (int64_t cell = 0; cell < image_cells; ++cell) {
      out[image * image_cells + cell] = finish_cell<T>(
          T{}, high[cell], kTwoLimbs ? low[cell] : 0, kTwoLimbs, flagged ? flags[cell] : 0u, scale);
    }
  }
}

template <class T, class W>
Inputs<T, W> inputs(const MsDeformCall& call) {
  return {const_data<T>(call.value), const_data<W>(call.locations), const_data<W>(call.weights)};
}

Tensor forward_cpu(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor locations,
                   Tensor weights) {
  const MsDeformCall call(value, spatial_shapes, level_start_index, locations, weights);
  const std::vector<Level> levels = read_levels(call);
  const Tensor out = call.empty_output();
  TRUNCDET_MS_DEFORM_DISPATCH(value, locations, [&] {
    forward(inputs<scalar_t, location_t>(call), levels, call.shape, mutable_data<scalar_t>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(Tensor grad, Tensor value, Tensor spatial_shapes,
                                                Tensor level_start_index, Tensor locations,
                                                Tensor weights) {
  const MsDeformCall call(value, spatial_shapes, level_start_index, locations, weights);
  check_grad(grad, value, call.shape);
  const std::vector<Level> levels = read_levels(call);
  grad = torch::stable::contiguous(grad);
  const MsDeformGradients out(call);
  TRUNCDET_MS_DEFORM_DISPATCH(value, locations, [&] {
    const auto in = inputs<scalar_t, location_t>(call);
    const scalar_t* g = const_data<scalar_t>(grad);
    accumulate(g, in, levels, call.shape, mutable_data<scalar_t>(out.value));
    gather(g, in, levels, call.shape, mutable_data<location_t>(out.locations),
           mutable_data<location_t>(out.weights));
  });
  return {out.value, out.locations, out.weights};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&truncdet::forward_cpu));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&truncdet::backward_cpu));
}
