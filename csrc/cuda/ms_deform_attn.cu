// ms_deform_attn: a thread an output element forward; backward a group of lanes a row (an image's
// query and head), one lane a channel, so that loads and atomics of a tap go to one run of memory.
#include "../ms_deform_attn_host.h"
#include "ms_deform_attn_gather.cuh"

#include <tuple>

namespace truncdet {
namespace {

template <class T, class W>
struct DeviceInputs {
  const T* value;
  const int64_t *spatial_shapes, *level_start_index;
  const W *locations, *weights;
  MsDeformShape shape;
  unsigned* sticky;

  __device__ __forceinline__ Level level(int64_t l) const {
    return read_level(spatial_shapes, level_start_index, l, shape.values);
  }
  template <class C>
  __device__ __forceinline__ LevelSample<C> sample(int64_t at, const Level& level) const {
    return sample_level<C>(widen(locations[2 * at]), widen(locations[2 * at + 1]), level);
  }
  // The row of channels of cell 0 of a level's map, for a row's head.
  __device__ __forceinline__ int64_t first_row(int64_t image, int64_t head,
                                               const Level& level) const {
    return (image * shape.values + level.start) * shape.heads + head;
  }
};

template <class T, class W>
__global__ void __launch_bounds__(kThreads) forward_kernel(DeviceInputs<T, W> in, T* out) {
  using C = typename Format<T>::Compute;
  const MsDeformShape& s = in.shape;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t cell_stride = s.heads * s.channels;
  bool bad = false;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < s.rows() * s.channels; i += stride) {
    // i = ((image * queries + query) * heads + head) * channels + channel
    const int64_t row = i / s.channels, channel = i - row * s.channels;
    const int64_t head = row % s.heads, image = row / (s.heads * s.queries);
    C sum(0);
    int64_t at = row * s.samples();
    for (int64_t l = 0; l < s.levels; ++l) {
      const Level level = in.level(l);
      bad |= !level.valid;
      const T* map = in.value + in.first_row(image, head, level) * s.channels + channel;
      for (int64_t point = 0; point < s.points; ++point, ++at) {
        const auto sample = in.template sample<C>(at, level);
        if (!sample.inside) continue;
        const auto found = interpolate<2>(sample.axis, level.size, [&](int64_t cell) {
          return C(widen(map[cell * cell_stride]));
        });
        sum += found.value * widen(in.weights[at]);
      }
    }
    out[i] = narrow<T>(sum);
  }
  if (bad) set_sticky(in.sticky, kStickyMsDeformAttn);
}

template <class T, class W>
struct MsDeformBackwardParams {
  using C = typename Format<T>::Compute;
  DeviceInputs<T, W> in;
  const T* grad;
  Accumulator<C> sums;
  TapLists<C> lists;  // in place of sums, where taps are few
  ScaleSource<C> scale;
  W *location_gradient, *weight_gradient;
};

// Blocks an SM shall hold, so that loads and atomics of others fill the wait for memory.
template <class T>
constexpr int resident_blocks() {
  return sizeof(typename Format<T>::Compute) == 4 ? 4 : 2;
}

// Lanes in halves, as _channel_sum has it; lanes beyond the width would add +0.
template <int kWidth, class C>
__device__ __forceinline__ C add_group(C value) {
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
    value = value + __shfl_xor_sync(0xffffffffu, value, half, kWidth);
  }
  return value;
}

// kWidth lanes a row; all channels of a lane are kChannelLanes apart, so less than that many lanes
// serve only where they suffice for all channels. kLinked: few rows, whose levels are worked on
// side by side, and taps join lists.
template <class T, class W, int kWidth, bool kLinked>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>())
    backward_kernel(MsDeformBackwardParams<T, W> p) {
  using C = typename Format<T>::Compute;
  constexpr int kRows = kThreads / kWidth;
  const MsDeformShape& s = p.in.shape;
  const int lane = threadIdx.x % kWidth;
  const int64_t cell_stride = s.heads * s.channels;
  const int64_t items = kLinked ? s.rows() * s.levels : s.rows();
  bool bad = false;
  // All threads of a block take every turn, since the sums need whole warps.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < items;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const bool valid = first + threadIdx.x / kWidth < items;
    const int64_t item = valid ? first + threadIdx.x / kWidth : first;
    const int64_t row = kLinked ? item / s.levels : item;
    const int64_t first_level = kLinked ? item - row * s.levels : 0;
    const int64_t last_level = kLinked ? first_level + 1 : s.levels;
    const int64_t head = row % s.heads, image = row / (s.heads * s.queries);
    const Scale<C> scale = p.scale(image);
    const int grad_exponent = exponent_above<C>(p.scale.amax[image]);
    const int weight_exponent = exponent_above<C>(p.scale.second_amax[image]);
    const T* grad = p.grad + row * s.channels;
    const C own = lane < s.channels ? C(widen(grad[lane])) : C(0);
    int64_t at = row * s.samples() + first_level * s.points;
    for (int64_t l = first_level; l < last_level; ++l) {
      const Level level = p.in.level(l);
      bad |= !level.valid;
      const int64_t first_row = p.in.first_row(image, head, level), map = first_row * s.channels;
      for (int64_t point = 0; point < s.points; ++point, ++at) {
        const auto sample = p.in.template sample<C>(at, level);
        const bool inside = valid && sample.inside;
        typename TapLists<C>::Tap tap{};
        if constexpr (kLinked) {
          // Queries and samples spread over a row's lists.
          if (inside && lane < 4) {
            tap =
                p.lists.link(sample, level, first_row, s.heads, row / s.heads + at, 4 * at + lane);
          }
        }
        const C weight = inside ? C(widen(p.in.weights[at])) : C(0);
        const C normal_weight = scale_exponent<C>(weight, -weight_exponent);
        C value(0), along_x(0), along_y(0);
        for (int64_t c = lane; inside && c < s.channels; c += kWidth) {
          const C g = c == lane ? own : C(widen(grad[c]));
          const auto found = interpolate<2>(sample.axis, level.size, [&](int64_t cell) {
            return C(widen(p.in.value[map + cell * cell_stride + c]));
          });
          value += g * found.value;
          along_x += g * found.slope[0];
          along_y += g * found.slope[1];
          if constexpr (kLinked) continue;
          const uint32_t seen = product_flag(weight, g);
          if (seen != 0) {
            for_each_tap<2>(sample.axis, level.size, [&](int64_t cell, C share) {
              if (share != C(0)) p.sums.flags.template add<T>(map + cell * cell_stride + c, seen);
            });
            continue;
          }
          const C normal = normal_weight * scale_exponent<C>(g, -grad_exponent);
          for_each_tap<2>(sample.axis, level.size, [&](int64_t cell, C share) {
            p.sums.add(map + cell * cell_stride + c, scale, share * normal);
          });
        }
        value = add_group<kWidth>(value);
        along_x = add_group<kWidth>(along_x);
        along_y = add_group<kWidth>(along_y);
        if constexpr (kLinked) {
          // Only here, since what the list began with takes time to arrive.
          if (tap.weight != C(0)) p.lists.taps[4 * at + lane] = tap;
        }
        if (valid && lane == 0) {
          p.weight_gradient[at] = narrow<W>(value);
          p.location_gradient[2 * at] =
              narrow<W>((along_x * weight) * static_cast<C>(level.size[0]));
          p.location_gradient[2 * at + 1] =
              narrow<W>((along_y * weight) * static_cast<C>(level.size[1]));
        }
      }
    }
  }
  if (bad) set_sticky(p.in.sticky, kStickyMsDeformAttn);
}

template <bool kLinked, class T, class W>
void launch_backward(const MsDeformBackwardParams<T, W>& p, cudaStream_t stream) {
  const int64_t items = p.in.shape.rows() * (kLinked ? p.in.shape.levels : 1);
  if (items == 0) return;
  const auto launch = [&](auto kernel, int width) {
    kernel<<<blocks_for(items * width), kThreads, 0, stream>>>(p);
  };
  if (p.in.shape.channels <= 8) {
    launch(backward_kernel<T, W, 8, kLinked>, 8);
  } else if (p.in.shape.channels <= 16) {
    launch(backward_kernel<T, W, 16, kLinked>, 16);
  } else {
    launch(backward_kernel<T, W, 32, kLinked>, 32);
  }
  TRUNCDET_LAUNCH_CHECK();
}

template <class T, class W>
DeviceInputs<T, W> device_inputs(const MsDeformCall& call) {
  return {const_data<T>(call.value),
          const_data<int64_t>(call.spatial_shapes),
          const_data<int64_t>(call.level_start_index),
          const_data<W>(call.locations),
          const_data<W>(call.weights),
          call.shape,
          sticky_word()};
}

template <class T, class W>
void backward(const MsDeformCall& call, const T* grad, const MsDeformGradients& out) {
  using C = typename Format<T>::Compute;
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const MsDeformShape& s = call.shape;
  const cudaStream_t stream = current_stream(call.value);
  const bool linked = few_taps(s, grad);
  // Statistics of the gradient and of the weights: twice as many words as there are images. They
  // lie behind the sums, or behind the lists.
  const int64_t segments = 2 * s.images, cells = linked ? 0 : s.total_cells();
  const int64_t front = linked ? TapLists<C>::bytes(s) : 0;
  const int64_t bytes = front + Accumulator<C>::bytes(cells, segments, kTwoLimbs);
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             call.value.device(), std::nullopt, std::nullopt);
  char* const at = static_cast<char*>(memory.mutable_data_ptr());
  const Accumulator<C> sums(at + front, cells, segments, kTwoLimbs, out.value);
  const TapLists<C> lists = TapLists<C>::in(at, s);
  const ScaleSource<C> scale{sums.amax, s.headroom_bits(), nullptr, sums.amax + s.images};
  const MsDeformBackwardParams<T, W> params{
      device_inputs<T, W>(call),   grad, sums, lists, scale, mutable_data<W>(out.locations),
      mutable_data<W>(out.weights)};
  const int64_t rows = s.queries * s.heads;
  const AmaxParams<T> of_grad{grad, s.images, rows * s.channels, sums.amax, sums.nonfinite};
  const AmaxParams<W> of_weights{params.in.weights, s.images, rows * s.samples(),
                                 sums.amax + s.images, sums.nonfinite};
  T* const result = mutable_data<T>(out.value);
  if (linked) {
    // Without sums there are no flags either.
    const Zeros zeros{at, TapLists<C>::first_bytes(s)};
    launch_prepare(sums, cells, segments, zeros, of_grad, of_weights, stream);
    launch_backward<true>(params, stream);
    launch_tap_gather<T, W>(lists, s, grad, params.in.weights, scale, sums.nonfinite, result,
                            stream);
  } else {
    launch_prepare(sums, cells, segments, of_grad, of_weights, stream);
    launch_backward<false>(params, stream);
    launch_finish<T>({sums, scale, nullptr, result, s.images, s.values * s.heads * s.channels},
                     stream);
  }
}

Tensor forward_cuda(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor locations,
                    Tensor weights) {
  const DeviceGuard guard(value.get_device_index());
  const MsDeformCall call(value, spatial_shapes, level_start_index, locations, weights);
  const Tensor out = call.empty_output();
  const int64_t total = call.shape.rows() * call.shape.channels;
  if (total == 0) return out;
  TRUNCDET_MS_DEFORM_DISPATCH(value, locations, [&] {
    forward_kernel<<<blocks_for(total), kThreads, 0, current_stream(value)>>>(
        device_inputs<scalar_t, location_t>(call), mutable_data<scalar_t>(out));
    TRUNCDET_LAUNCH_CHECK();
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(Tensor grad, Tensor value, Tensor spatial_shapes,
                                                 Tensor level_start_index, Tensor locations,
                                                 Tensor weights) {
  const DeviceGuard guard(value.get_device_index());
  const MsDeformCall call(value, spatial_shapes, level_start_index, locations, weights);
  check_grad(grad, value, call.shape);
  grad = torch::stable::contiguous(grad);
  const MsDeformGradients out(call);
  TRUNCDET_MS_DEFORM_DISPATCH(value, locations, [&] {
    backward<scalar_t, location_t>(call, const_data<scalar_t>(grad), out);
  });
  return {out.value, out.locations, out.weights};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&truncdet::forward_cuda));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&truncdet::backward_cuda));
}
