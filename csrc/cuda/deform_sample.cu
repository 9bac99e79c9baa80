// Sampling of deform_conv2d on CUDA; its gradients are in deform_sample_backward.cu.
//
// A block owns a tile of places of one image, offset group and tap: a place a lane, a channel a
// warp. Columns lie places last and are written in whole runs; the reads of neighbouring places lie
// near each other as long as their offsets do.
#include "../deform_sample_host.h"
#include "channel_tile.cuh"
#include "deform_tiles.cuh"

namespace truncdet {
namespace {

template <class T>
struct SampleParams {
  DeformShape shape;
  const T *input, *offset, *mask;  // mask: null for ones
  T* columns;
};

template <class T>
__global__ void __launch_bounds__(kTile* kWarps) sample_kernel(SampleParams<T> p) {
  using C = typename Format<T>::Compute;
  const DeformShape& s = p.shape;
  const int lane = threadIdx.x % kTile, warp = threadIdx.x / kTile, warps = blockDim.x / kTile;
  const int64_t work = deform_tiles(s);
  for (int64_t image = blockIdx.y; image < s.images; image += gridDim.y) {
    for (int64_t t = blockIdx.x; t < work; t += gridDim.x) {
      const DeformTile tile(t, s);
      const int64_t place = tile.first_place + lane;
      if (place >= s.places()) continue;
      const int64_t at = s.sample(image, tile.group, tile.tap);
      const auto sample = deform_sample(p.offset + 2 * at + place, tile.tap, place, s);
      const C factor = p.mask != nullptr ? C(widen(p.mask[at + place])) : C(1);
#pragma unroll 4
      for (int64_t c = warp; c < s.group_channels(); c += warps) {
        const int64_t channel = tile.group * s.group_channels() + c;
        const T* plane = p.input + (image * s.channels + channel) * s.cells();
        const auto found =
            deform_interpolate(sample, s, [&](int64_t cell) { return C(widen(plane[cell])); });
        p.columns[s.row(channel, tile.tap, image) + place] = narrow<T>(factor * found.value);
      }
    }
  }
}

Tensor sample_cuda(Tensor input, Tensor offset, std::optional<Tensor> mask,
                   std::vector<int64_t> geometry) {
  const DeviceGuard guard(input.get_device_index());
  const DeformCall call(input, offset, mask, geometry);
  const Tensor columns = call.empty_columns();
  if (columns.numel() == 0) return columns;
  TRUNCDET_DISPATCH(input.scalar_type(), "deform_conv2d", [&] {
    const SampleParams<scalar_t> params{
        call.shape, const_data<scalar_t>(call.input), const_data<scalar_t>(call.offset),
        call.mask_data<scalar_t>(), mutable_data<scalar_t>(columns)};
    sample_kernel<scalar_t><<<deform_grid(call.shape), tile_threads(call.shape.group_channels()), 0,
                              current_stream(input)>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return columns;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_deform_sample", TORCH_BOX(&truncdet::sample_cuda));
}
