// Sampling of deform_conv2d and its gradients on the CPU: the definition, read directly.
#include "../deform_sample_host.h"
#include "sums.h"

namespace truncdet {
namespace {

// Fewest samples worth a thread.
constexpr int64_t kGrain = 256;

// All samples of one image.
template <class T, class C = typename Format<T>::Compute>
std::vector<DeformSample<C>> image_samples(const T* offset, int64_t image, const DeformShape& s) {
  std::vector<DeformSample<C>> samples(s.samples());
  torch::stable::parallel_for(0, s.samples(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // i = (group * taps + tap) * places + place; an offset of y and one of x for each
      const int64_t plane = i / s.places(), place = i % s.places();
      const int64_t first = 2 * (s.sample(image, 0, 0) + plane * s.places());
      samples[i] = deform_sample(offset + first + place, plane % s.taps(), place, s);
    }
  });
  return samples;
}

template <class T>
void sample(const DeformCall& call, T* columns) {
  using C = typename Format<T>::Compute;
  const DeformShape& s = call.shape;
  const T* mask = call.mask_data<T>();
  for (int64_t image = 0; image < s.images; ++image) {
    const auto samples = image_samples(const_data<T>(call.offset), image, s);
    torch::stable::parallel_for(0, s.channels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t channel = begin; channel < end; ++channel) {
        const T* plane = const_data<T>(call.input) + (image * s.channels + channel) * s.cells();
        for (int64_t i = 0; i < s.taps() * s.places(); ++i) {
          const int64_t tap = i / s.places(), place = i % s.places();
          const int64_t at = s.sample(0, channel / s.group_channels(), tap) + place;
          C value = deform_interpolate(samples[at], s, [&](int64_t cell) {
                      return C(widen(plane[cell]));
                    }).value;
          if (mask != nullptr) value = C(widen(mask[s.sample(image, 0, 0) + at])) * value;
          columns[s.row(channel, tap, image) + place] = narrow<T>(value);
        }
      }
    });
  }
}

// The largest finite magnitude of one image's columns.
template <class T, class C = typename Format<T>::Compute>
Statistics<C> column_statistics(const T* grad, int64_t image, const DeformShape& s) {
  Statistics<C> all;
  for (int64_t i = 0; i < s.channels * s.taps(); ++i) {
    const auto found = statistics(grad + s.row(0, i, image), s.places());
    all.amax = std::max(all.amax, found.amax);
    all.nonfinite |= found.nonfinite;
  }
  return all;
}

// The input's gradient. Planes share no cell, so threads that own planes need no atomics.
template <class T>
void accumulate(const T* grad, const DeformCall& call, T* out) {
  using C = typename Format<T>::Compute;
  const DeformShape& s = call.shape;
  const std::vector<T> nothing(s.cells());
  for (int64_t image = 0; image < s.images; ++image) {
    const auto samples = image_samples(const_data<T>(call.offset), image, s);
    const T* mask = call.mask_data<T>();
    if (mask != nullptr) mask += s.sample(image, 0, 0);
    const auto of_grad = column_statistics(grad, image, s);
    const auto of_mask = mask != nullptr ? statistics(mask, s.samples()) : Statistics<C>{};
    const Scale<C> scale(of_grad.exponent() + of_mask.exponent(), s.headroom_bits());
    torch::stable::parallel_for(0, s.channels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t channel = begin; channel < end; ++channel) {
        Sums<C> sums(s.cells(), scale, std::is_same_v<C, double>,
                     of_grad.nonfinite || of_mask.nonfinite);
        for (int64_t i = 0; i < s.taps() * s.places(); ++i) {
          const int64_t tap = i / s.places(), place = i % s.places();
          const int64_t at = s.sample(0, channel / s.group_channels(), tap) + place;
          const C g = widen(grad[s.row(channel, tap, image) + place]);
          C normal = scale_exponent<C>(g, -of_grad.exponent());
          uint32_t seen = nonfinite_flag(g);
          if (mask != nullptr) {
            const C factor = widen(mask[at]);
            normal = scale_exponent<C>(factor, -of_mask.exponent()) * normal;
            seen = product_flag(factor, g);
          }
          for_each_tap<2>(samples[at].axis, s.size, [&](int64_t cell, C weight) {
            if (seen == 0) {
              sums.add(cell, weight * normal);
            } else if (weight != C(0)) {
              sums.flag(cell, seen);
            }
          });
        }
        sums.finish(nothing.data(), out + (image * s.channels + channel) * s.cells());
      }
    });
  }
}

// The gradients of offset and, where there is one, mask.
template <class T>
void gather(const T* grad, const DeformCall& call, T* offset_gradient, T* mask_gradient) {
  using C = typename Format<T>::Compute;
  const DeformShape& s = call.shape;
  const T* mask = call.mask_data<T>();
  for (int64_t image = 0; image < s.images; ++image) {
    const auto samples = image_samples(const_data<T>(call.offset), image, s);
    torch::stable::parallel_for(0, s.samples(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t plane = i / s.places(), place = i % s.places();
        const int64_t group = plane / s.taps(), tap = plane % s.taps();
        C value[kChannelLanes] = {}, along_x[kChannelLanes] = {}, along_y[kChannelLanes] = {};
        for (int64_t c = 0; c < s.group_channels(); ++c) {
          const int64_t channel = group * s.group_channels() + c;
          const T* cells = const_data<T>(call.input) + (image * s.channels + channel) * s.cells();
          const auto found = deform_interpolate(
              samples[i], s, [&](int64_t cell) { return C(widen(cells[cell])); });
          const C g = widen(grad[s.row(channel, tap, image) + place]);
          value[c % kChannelLanes] += g * found.value;
          along_x[c % kChannelLanes] += g * found.slope[0];
          along_y[c % kChannelLanes] += g * found.slope[1];
        }
        const int64_t at = s.sample(image, group, tap);
        C x = add_lanes(along_x), y = add_lanes(along_y);
        if (mask != nullptr) {
          const C factor = widen(mask[at + place]);
          x = x * factor;
          y = y * factor;
          mask_gradient[at + place] = narrow<T>(add_lanes(value));
        }
        offset_gradient[2 * at + place] = narrow<T>(y);
        offset_gradient[2 * at + s.places() + place] = narrow<T>(x);
      }
    });
  }
}

Tensor sample_cpu(Tensor input, Tensor offset, std::optional<Tensor> mask,
                  std::vector<int64_t> geometry) {
  const DeformCall call(input, offset, mask, geometry);
  const Tensor columns = call.empty_columns();
  TRUNCDET_DISPATCH(input.scalar_type(), "deform_conv2d",
                    [&] { sample(call, mutable_data<scalar_t>(columns)); });
  return columns;
}

std::tuple<Tensor, Tensor, Tensor> sample_backward_cpu(Tensor grad, Tensor input, Tensor offset,
                                                       std::optional<Tensor> mask,
                                                       std::vector<int64_t> geometry,
                                                       bool input_gradient, bool offset_gradient) {
  const DeformCall call(input, offset, mask, geometry);
  grad = call.contiguous_grad(grad);
  const DeformGradients out(call, input_gradient, offset_gradient);
  TRUNCDET_DISPATCH(input.scalar_type(), "deform_conv2d", [&] {
    const scalar_t* g = const_data<scalar_t>(grad);
    if (input_gradient) accumulate(g, call, mutable_data<scalar_t>(out.input));
    if (offset_gradient) {
      gather(g, call, mutable_data<scalar_t>(out.offset), mutable_data<scalar_t>(out.mask));
    }
  });
  return out.as_tuple();
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_deform_sample", TORCH_BOX(&truncdet::sample_cpu));
  m.impl("_deform_sample_backward", TORCH_BOX(&truncdet::sample_backward_cpu));
}
