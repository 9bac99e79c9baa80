// The backward of grid_sample: the input's gradient by int64 atomics, the grid's without any.
//
// A block owns a tile of locations and walks over their channels in steps of 32. Reading has a
// location a lane, since both gradients come channels first; adding has a channel a lane, since the
// sums lie channels last. In between g goes through shared memory.
#include "../grid_sample_host.h"
#include "channel_tile.cuh"
#include "prepare.cuh"
#include "transpose.cuh"

#include <algorithm>
#include <tuple>

namespace truncdet {
namespace {

// Blocks an SM shall hold, so that loads and atomics of others fill the wait for memory; more taps
// and wider numbers need the registers themselves.
template <class T, int kDims, Interpolation kMode>
constexpr int resident_blocks() {
  const bool small = kDims * taps_per_axis<kMode>() <= 4;
  return small && sizeof(typename Format<T>::Compute) == 4 ? 4 : 1;
}

template <class T>
struct BackwardParams {
  using C = typename Format<T>::Compute;
  GridSampleShape shape;
  const T *grad, *input, *grid;
  int64_t input_channel, input_cell;  // element strides of the input
  Accumulator<C> sums;                // [images, cells, channels]
  ScaleSource<C> scale;
  T* grid_gradient;
  bool want_input, want_grid;
};

// The channel sums of one tile's locations, to the grid's gradient.
template <class T, int kDims, class C>
__device__ void write_grid_gradient(const C (&lanes)[kDims][kRounds], C (*partial)[kTile],
                                    const C* derivative, T* out, bool inside) {
#pragma unroll
  for (int a = 0; a < kDims; ++a) {
    const C sum = add_rounds(lanes[a], partial);
    if (threadIdx.x < kTile && inside) out[a] = narrow<T>(sum * derivative[a]);
  }
}

template <class T, int kDims, Interpolation kMode>
__global__ void __launch_bounds__(32 * kWarps, resident_blocks<T, kDims, kMode>())
    backward_kernel(BackwardParams<T> p) {
  using C = typename Format<T>::Compute;
  using S = Sample<C, kDims, kMode>;
  __shared__ S samples[kTile];
  __shared__ C tile[kChannelLanes][kTile + 1];
  __shared__ C partial[kWarps][kTile];
  const GridSampleShape& s = p.shape;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t tiles = (s.locations + kTile - 1) / kTile;
  for (int64_t image = blockIdx.y; image < s.images; image += gridDim.y) {
    const Scale<C> scale = p.want_input ? p.scale(image) : Scale<C>(0, 0);
    const T* input = p.input + image * s.channels * s.cells;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const int count = static_cast<int>(min(s.locations - t * kTile, int64_t(kTile)));
      const int64_t location = image * s.locations + t * kTile + lane;
      const bool inside = lane < count;
      if (warp == 0 && inside) {
        samples[lane] = make_sample<kDims, kMode>(p.grid + location * kDims, s);
      }
      __syncthreads();
      const S mine = samples[inside ? lane : 0];
      C lanes[kDims][kRounds] = {};
      for (int64_t first = 0; first < s.channels; first += kChannelLanes) {
        const int channels = static_cast<int>(min(s.channels - first, int64_t(kChannelLanes)));
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const int c = warp + kWarps * r;
          if (!inside || c >= channels) continue;
          const int64_t channel = first + c;
          const C g =
              widen(p.grad[(image * s.channels + channel) * s.locations + t * kTile + lane]);
          tile[c][lane] = g;
          if (kMode == Interpolation::kNearest || !p.want_grid) continue;
          const T* plane = input + channel * p.input_channel;
          const auto found = interpolate<kDims>(
              mine.axis, s.size, [&](int64_t cell) { return widen(plane[cell * p.input_cell]); });
#pragma unroll
          for (int a = 0; a < kDims; ++a) lanes[a][r] += g * found.slope[a];
        }
        __syncthreads();
        if (p.want_input) {
          for (int i = threadIdx.x; i < channels * count; i += blockDim.x) {
            // i = location * channels + channel
            const int at = channels == kChannelLanes ? i / kChannelLanes : i / channels;
            const int c = i - at * channels;
            const C g = tile[c][at];
            const uint32_t seen = nonfinite_flag(g);
            const C normal = scale.normalise(g);
            const int64_t to = image * s.cells * s.channels + first + c;
            for_each_tap<kDims>(samples[at].axis, s.size, [&](int64_t cell, C weight) {
              if (seen == 0) {
                p.sums.add(to + cell * s.channels, scale, weight * normal);
              } else if (weight != C(0)) {
                // Flags lie in the output, channels first.
                p.sums.flags.template add<T>((image * s.channels + first + c) * s.cells + cell,
                                             seen);
              }
            });
          }
        }
        __syncthreads();
      }
      if (kMode != Interpolation::kNearest && p.want_grid) {
        write_grid_gradient<T, kDims>(lanes, partial, mine.derivative,
                                      p.grid_gradient + location * kDims, inside);
      }
      __syncthreads();
    }
  }
}

template <class T, int kDims, Interpolation kMode>
void launch_backward(const BackwardParams<T>& p, cudaStream_t stream) {
  const GridSampleShape& s = p.shape;
  if (s.images == 0 || s.locations == 0) return;
  const int64_t tiles = (s.locations + kTile - 1) / kTile;
  const dim3 blocks(static_cast<unsigned>(tiles < kMaxBlocks ? tiles : kMaxBlocks),
                    static_cast<unsigned>(std::min(s.images, kMaxSegmentBlocks)));
  backward_kernel<T, kDims, kMode><<<blocks, tile_threads(s.channels), 0, stream>>>(p);
  TRUNCDET_LAUNCH_CHECK();
}

template <class T>
void backward(const Tensor& grad, const Tensor& input, const Tensor& grid, const GridSampleShape& s,
              const Tensor* input_gradient, const Tensor* grid_gradient) {
  using C = typename Format<T>::Compute;
  using scalar_t = T;
  const cudaStream_t stream = current_stream(input);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  BackwardParams<T> params{s,
                           const_data<T>(grad),
                           const_data<T>(input),
                           const_data<T>(grid),
                           channels_last ? 1 : s.cells,
                           channels_last ? s.channels : 1,
                           {},
                           {},
                           grid_gradient != nullptr ? mutable_data<T>(*grid_gradient) : nullptr,
                           input_gradient != nullptr,
                           grid_gradient != nullptr};
  if (input_gradient == nullptr) {
    TRUNCDET_GRID_SAMPLE_DISPATCH(s, launch_backward, params, stream);
    return;
  }
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const int64_t bytes = Accumulator<C>::bytes(s.total_cells(), s.images, kTwoLimbs);
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             input.device(), std::nullopt, std::nullopt);
  params.sums = Accumulator<C>(memory.mutable_data_ptr(), s.total_cells(), s.images, kTwoLimbs,
                               *input_gradient);
  params.scale = {params.sums.amax, s.headroom_bits()};
  const AmaxParams<T> amax{params.grad, s.images, s.channels * s.locations, params.sums.amax,
                           params.sums.nonfinite};
  launch_prepare(params.sums, s.total_cells(), s.images, amax, AmaxParams<T>{}, stream);
  TRUNCDET_GRID_SAMPLE_DISPATCH(s, launch_backward, params, stream);
  launch_transposed_finish<T>(
      {params.sums, params.scale, mutable_data<T>(*input_gradient), s.images, s.channels, s.cells},
      stream);
}

std::tuple<Tensor, Tensor> backward_cuda(Tensor grad, Tensor input, Tensor grid, int64_t mode,
                                         int64_t padding, bool align_corners, bool input_gradient,
                                         bool grid_gradient) {
  const GridSampleShape shape = grid_sample_shape(grad, input, grid, mode, padding, align_corners);
  const DeviceGuard guard(input.get_device_index());
  grad = torch::stable::contiguous(grad);
  if (!is_channels_last(input)) input = torch::stable::contiguous(input);
  grid = torch::stable::contiguous(grid);
  Tensor for_input = gradient_like(input, input_gradient);
  Tensor for_grid = gradient_like(grid, grid_gradient);
  // The nearest cell does not change with the location.
  if (shape.mode == Interpolation::kNearest) torch::stable::zero_(for_grid);
  TRUNCDET_DISPATCH(input.scalar_type(), "grid_sample", [&] {
    backward<scalar_t>(grad, input, grid, shape, input_gradient ? &for_input : nullptr,
                       grid_gradient ? &for_grid : nullptr);
  });
  return {for_input, for_grid};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("grid_sample_backward", TORCH_BOX(&truncdet::backward_cuda));
}
