// The gradients of deform_conv2d's sampling: the input's by int64 atomics, those of offset and mask
// without any.
//
// A block owns a tile of places of one image, offset group and tap, and walks over the group's
// channels in steps of 32. Reading has a place a lane, since columns and input lie channels first;
// adding has a channel a lane, since the sums lie channels last. In between g goes through shared
// memory.
#include "../deform_sample_host.h"
#include "channel_tile.cuh"
#include "column_amax.cuh"
#include "deform_tiles.cuh"
#include "transpose.cuh"

namespace truncdet {
namespace {

// Blocks an SM shall hold, so that loads and atomics of others fill the wait for memory; double
// needs the registers itself.
template <class T>
constexpr int resident_blocks() {
  return sizeof(typename Format<T>::Compute) == 4 ? 4 : 1;
}

template <class T>
struct DeformBackwardParams {
  using C = typename Format<T>::Compute;
  DeformShape shape;
  const T *grad, *input, *offset, *mask;  // mask: null for ones
  Accumulator<C> sums;                    // [images, cells, channels]
  ScaleSource<C> scale;                   // of grad, and of mask where there is one
  T *offset_gradient, *mask_gradient;     // null where not asked for, or no mask
  bool want_input, want_offset;
};

template <class T>
__global__ void __launch_bounds__(kTile* kWarps, resident_blocks<T>())
    deform_backward_kernel(DeformBackwardParams<T> p) {
  using C = typename Format<T>::Compute;
  __shared__ DeformSample<C> samples[kTile];
  __shared__ C factors[kTile], normal_factors[kTile];
  __shared__ C values[kChannelLanes][kTile + 1];
  __shared__ C partial[kWarps][kTile];
  const DeformShape& s = p.shape;
  const int lane = threadIdx.x % kTile, warp = threadIdx.x / kTile;
  const int64_t work = deform_tiles(s), group_channels = s.group_channels();
  for (int64_t image = blockIdx.y; image < s.images; image += gridDim.y) {
    const Scale<C> scale = p.want_input ? p.scale(image) : Scale<C>(0, 0);
    const int grad_exponent = p.want_input ? exponent_above<C>(p.scale.amax[image]) : 0;
    const int mask_exponent = scale.exponent - grad_exponent;
    for (int64_t t = blockIdx.x; t < work; t += gridDim.x) {
      const DeformTile tile(t, s);
      const int64_t place = tile.first_place + lane;
      const int64_t at = s.sample(image, tile.group, tile.tap) + place;
      const bool inside = place < s.places();
      const int count = static_cast<int>(min(s.places() - tile.first_place, int64_t(kTile)));
      if (warp == 0 && inside) {
        const C factor = p.mask != nullptr ? C(widen(p.mask[at])) : C(1);
        // at counts samples; there are an offset of y and one of x for each
        samples[lane] = deform_sample(p.offset + 2 * at - place, tile.tap, place, s);
        factors[lane] = factor;
        normal_factors[lane] = scale_exponent<C>(factor, -mask_exponent);
      }
      __syncthreads();
      C along_y[kRounds] = {}, along_x[kRounds] = {}, found_value[kRounds] = {};
      for (int64_t first = 0; first < group_channels; first += kChannelLanes) {
        const int channels = static_cast<int>(min(group_channels - first, int64_t(kChannelLanes)));
        const int64_t first_channel = tile.group * group_channels + first;
        // Read again in every step, so that it takes no registers while sums are added to.
        const DeformSample<C> mine = samples[inside ? lane : 0];
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const int c = warp + kWarps * r;
          if (!inside || c >= channels) continue;
          const int64_t channel = first_channel + c;
          const C g = widen(p.grad[s.row(channel, tile.tap, image) + place]);
          values[c][lane] = g;
          if (!p.want_offset) continue;
          const T* plane = p.input + (image * s.channels + channel) * s.cells();
          const auto found =
              deform_interpolate(mine, s, [&](int64_t cell) { return C(widen(plane[cell])); });
          along_y[r] += g * found.slope[1];
          along_x[r] += g * found.slope[0];
          found_value[r] += g * found.value;
        }
        __syncthreads();
        if (p.want_input) {
          for (int i = threadIdx.x; i < channels * count; i += blockDim.x) {
            // i = place * channels + channel
            const int to_place = channels == kChannelLanes ? i / kChannelLanes : i / channels;
            const int c = i - to_place * channels;
            const C g = values[c][to_place];
            const uint32_t seen = product_flag(factors[to_place], g);
            const C normal = normal_factors[to_place] * scale_exponent<C>(g, -grad_exponent);
            const int64_t to = image * s.cells() * s.channels + first_channel + c;
            for_each_tap<2>(samples[to_place].axis, s.size, [&](int64_t cell, C weight) {
              if (seen == 0) {
                p.sums.add(to + cell * s.channels, scale, weight * normal);
              } else if (weight != C(0)) {
                p.sums.flags.template add<T>(
                    (image * s.channels + first_channel + c) * s.cells() + cell, seen);
              }
            });
          }
        }
        __syncthreads();
      }
      if (p.want_offset) {
        const C factor = factors[inside ? lane : 0];
        const C y = add_rounds(along_y, partial), x = add_rounds(along_x, partial);
        const C value = p.mask_gradient != nullptr ? add_rounds(found_value, partial) : C(0);
        if (warp == 0 && inside) {
          p.offset_gradient[2 * at - place] = narrow<T>(y * factor);
          p.offset_gradient[2 * at - place + s.places()] = narrow<T>(x * factor);
          if (p.mask_gradient != nullptr) p.mask_gradient[at] = narrow<T>(value);
        }
      }
      __syncthreads();  // samples may be written again
    }
  }
}

template <class T>
void launch_backward(const DeformBackwardParams<T>& p, cudaStream_t stream) {
  deform_backward_kernel<T>
      <<<deform_grid(p.shape), tile_threads(p.shape.group_channels()), 0, stream>>>(p);
  TRUNCDET_LAUNCH_CHECK();
}

// None of the call's dimensions is empty.
template <class T>
void backward(const Tensor& grad, const DeformCall& call, const DeformGradients& out,
              bool want_input, bool want_offset) {
  using C = typename Format<T>::Compute;
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const DeformShape& s = call.shape;
  const cudaStream_t stream = current_stream(call.input);
  const T* mask = call.mask_data<T>();
  DeformBackwardParams<T> params{
      s,
      const_data<T>(grad),
      const_data<T>(call.input),
      const_data<T>(call.offset),
      mask,
      {},
      {},
      want_offset ? mutable_data<T>(out.offset) : nullptr,
      want_offset && mask != nullptr ? mutable_data<T>(out.mask) : nullptr,
      want_input,
      want_offset};
  if (!want_input) {
    launch_backward(params, stream);
    return;
  }
  // Statistics of the columns and of the mask: twice as many words as there are images.
  const int64_t cells = s.images * s.cells() * s.channels;
  const int64_t bytes = Accumulator<C>::bytes(cells, 2 * s.images, kTwoLimbs);
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             call.input.device(), std::nullopt, std::nullopt);
  params.sums =
      Accumulator<C>(memory.mutable_data_ptr(), cells, 2 * s.images, kTwoLimbs, out.input);
  auto* const mask_amax = params.sums.amax + s.images;
  params.scale = {params.sums.amax, s.headroom_bits(), nullptr,
                  mask != nullptr ? mask_amax : nullptr};
  const AmaxParams<T> of_mask{mask, mask == nullptr ? 0 : s.images, s.samples(), mask_amax,
                              params.sums.nonfinite};
  launch_prepare(params.sums, cells, 2 * s.images, of_mask, AmaxParams<T>{}, stream);
  // launch_prepare clears the flags only for what it has looked at itself, which the columns are
  // not.
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(mutable_data<T>(out.input), 0, cells * sizeof(T), stream));
  launch_column_amax(params.grad, s, params.sums, stream);
  launch_backward(params, stream);
  launch_transposed_finish<T>(
      {params.sums, params.scale, mutable_data<T>(out.input), s.images, s.channels, s.cells()},
      stream);
}

std::tuple<Tensor, Tensor, Tensor> sample_backward_cuda(Tensor grad, Tensor input, Tensor offset,
                                                        std::optional<Tensor> mask,
                                                        std::vector<int64_t> geometry,
                                                        bool input_gradient, bool offset_gradient) {
  const DeviceGuard guard(input.get_device_index());
  const DeformCall call(input, offset, mask, geometry);
  grad = call.contiguous_grad(grad);
  const DeformGradients out(call, input_gradient, offset_gradient);
  if (grad.numel() == 0) {
    // Without channels, images or places all sums are empty.
    for (const Tensor* tensor : {&out.input, &out.offset, &out.mask}) {
      Tensor zeros = *tensor;
      if (zeros.numel() > 0) torch::stable::zero_(zeros);
    }
    return out.as_tuple();
  }
  TRUNCDET_DISPATCH(input.scalar_type(), "deform_conv2d",
                    [&] { backward<scalar_t>(grad, call, out, input_gradient, offset_gradient); });
  return out.as_tuple();
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_deform_sample_backward", TORCH_BOX(&truncdet::sample_backward_cuda));
}
