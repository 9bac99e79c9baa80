// The backward of grid_sample on the CPU: the definition, read directly.
#include "../channel_sum.h"
#include "../grid_sample_host.h"
#include "statistics.h"

#include <tuple>
#include <vector>

namespace truncdet {
namespace {

// Fewest locations worth a thread.
constexpr int64_t kGrain = 256;

template <class T>
struct Tensors {
  const T *grad, *input, *grid;
  T *input_gradient, *grid_gradient;  // null where not asked for
};

// The gradient of one image's input. Planes share no cell, so threads that own planes need no
// atomics.
template <class T, class S, int kDims, class C = typename Format<T>::Compute>
void accumulate_planes(const T* grad, const std::vector<S>& samples, const GridSampleShape& s,
                       T* out) {
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const ValueStatistics<C> found = value_statistics(grad, s.channels * s.locations);
  const Scale<C> scale(exponent_above<C>(found.amax), s.headroom_bits());
  torch::stable::parallel_for(0, s.channels, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> high, low;
    std::vector<uint8_t> flags;
    for (int64_t channel = begin; channel < end; ++channel) {
      high.assign(s.cells, 0);
      low.assign(kTwoLimbs ? s.cells : 0, 0);
      flags.assign(found.nonfinite ? s.cells : 0, 0);
      for (int64_t p = 0; p < s.locations; ++p) {
        const C value = widen(grad[channel * s.locations + p]);
        const uint32_t seen = nonfinite_flag(value);
        const C normal = scale.normalise(value);
        for_each_tap<kDims>(samples[p].axis, s.size, [&](int64_t cell, C weight) {
          if (seen != 0) {
            if (weight != C(0)) flags[cell] |= static_cast<uint8_t>(seen);
            return;
          }
          const C contribution = weight * normal;
          const int64_t rounded = scale.quantise(contribution);
          high[cell] += rounded;
          if (kTwoLimbs) low[cell] += scale.quantise_rest(contribution, rounded);
        });
      }
      for (int64_t cell = 0; cell < s.cells; ++cell) {
        out[channel * s.cells + cell] =
            finish_cell<T>(T{}, high[cell], kTwoLimbs ? low[cell] : 0, kTwoLimbs,
                           found.nonfinite ? flags[cell] : 0u, scale);
      }
    }
  });
}

// The gradient of one image's grid.
template <class T, class S, int kDims, class C = typename Format<T>::Compute>
void gather_locations(const T* grad, const T* input, const std::vector<S>& samples,
                      const GridSampleShape& s, T* out) {
  torch::stable::parallel_for(0, s.locations, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      C lanes[kDims][kChannelLanes] = {};
      for (int64_t channel = 0; channel < s.channels; ++channel) {
        const T* plane = input + channel * s.cells;
        const auto found = interpolate<kDims>(samples[p].axis, s.size,
                                              [&](int64_t cell) { return widen(plane[cell]); });
        const C value = widen(grad[channel * s.locations + p]);
        for (int a = 0; a < kDims; ++a) lanes[a][channel % kChannelLanes] += value * found.slope[a];
      }
      for (int a = 0; a < kDims; ++a) {
        out[p * kDims + a] = narrow<T>(add_lanes(lanes[a]) * samples[p].derivative[a]);
      }
    }
  });
}

template <class T, int kDims, Interpolation kMode>
void backward(const Tensors<T>& t, const GridSampleShape& s) {
  using C = typename Format<T>::Compute;
  using S = Sample<C, kDims, kMode>;
  std::vector<S> samples(s.locations);
  for (int64_t image = 0; image < s.images; ++image) {
    const T* grid = t.grid + image * s.locations * kDims;
    torch::stable::parallel_for(0, s.locations, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        samples[p] = make_sample<kDims, kMode>(grid + p * kDims, s);
      }
    });
    const T* grad = t.grad + image * s.channels * s.locations;
    if (t.input_gradient != nullptr) {
      accumulate_planes<T, S, kDims>(grad, samples, s,
                                     t.input_gradient + image * s.channels * s.cells);
    }
    if (t.grid_gradient != nullptr && kMode != Interpolation::kNearest) {
      gather_locations<T, S, kDims>(grad, t.input + image * s.channels * s.cells, samples, s,
                                    t.grid_gradient + image * s.locations * kDims);
    }
  }
}

std::tuple<Tensor, Tensor> backward_cpu(Tensor grad, Tensor input, Tensor grid, int64_t mode,
                                        int64_t padding, bool align_corners, bool input_gradient,
                                        bool grid_gradient) {
  const GridSampleShape shape = grid_sample_shape(grad, input, grid, mode, padding, align_corners);
  grad = torch::stable::contiguous(grad);
  input = torch::stable::contiguous(input);
  grid = torch::stable::contiguous(grid);
  Tensor for_input = gradient_like(input, input_gradient);
  Tensor for_grid = gradient_like(grid, grid_gradient);
  // The nearest cell does not change with the location.
  if (shape.mode == Interpolation::kNearest) torch::stable::zero_(for_grid);
  TRUNCDET_DISPATCH(input.scalar_type(), "grid_sample", [&] {
    const Tensors<scalar_t> tensors{const_data<scalar_t>(grad), const_data<scalar_t>(input),
                                    const_data<scalar_t>(grid),
                                    input_gradient ? mutable_data<scalar_t>(for_input) : nullptr,
                                    grid_gradient ? mutable_data<scalar_t>(for_grid) : nullptr};
    TRUNCDET_GRID_SAMPLE_DISPATCH(shape, backward, tensors, shape);
  });
  return {for_input, for_grid};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("grid_sample_backward", TORCH_BOX(&truncdet::backward_cpu));
}
