// ps_roi_pool on CUDA: host functions.
#include "roi_pool_forward.cuh"
#include "roi_pool_statistics.cuh"
#include "roi_tile_own.cuh"

namespace truncdet {
namespace {

constexpr const char* kOp = "ps_roi_pool";

Tensor ps_roi_pool_cuda(Tensor input, Tensor boxes, int64_t pooled_height, int64_t pooled_width,
                        double spatial_scale) {
  const RoiAlignShape shape =
      forward_shape(input, boxes, pooled_height, pooled_width, spatial_scale, 0, false, kOp);
  check_sensitive(shape, kOp);
  const DeviceGuard guard(input.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels / shape.bins(), pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(input.scalar_type(), kOp, [&] {
    launch_pool_forward<scalar_t, true>(input, boxes, shape, PoolRule::kHalfOpen, false,
                                        kStickyPsRoiPool, mutable_data<scalar_t>(out), nullptr,
                                        current_stream(input));
  });
  return out;
}

template <class T>
void run_backward(const Tensor& grad, const Tensor& boxes, const Tensor& out,
                  const RoiAlignShape& shape, bool channels_last, int64_t channels, int64_t bytes,
                  int64_t lanes) {
  using C = typename Format<T>::Compute;
  const cudaStream_t stream = current_stream(grad);
  Tensor scratch;
  const auto statistics = roi_statistics<T>(grad, boxes, shape, stream, &scratch, kStickyPsRoiPool,
                                            PooledRois<C>{PoolRule::kHalfOpen});
  const TileParams<T> params(out, shape, channels_last, statistics, 1,
                             channels > 0 ? channels : own_channels_of_block(channels_last),
                             bytes > 0 ? bytes : kTileBytes);
  launch_tile_sums(params,
                   OwnChannels<T, EqualShares<C>>{
                       const_data<T>(grad), {const_data<C>(boxes)}, static_cast<int>(lanes)},
                   stream);
}

Tensor ps_roi_pool_backward_scheduled(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                                      int64_t height, int64_t width, int64_t pooled_height,
                                      int64_t pooled_width, double spatial_scale,
                                      bool channels_last, int64_t block_channels,
                                      int64_t tile_bytes, int64_t lanes) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, 0, false, kOp, true);
  check_own_schedule(kOp, block_channels, tile_bytes, lanes);
  const DeviceGuard guard(grad.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), kOp, [&] {
    run_backward<scalar_t>(grad, boxes, out, shape, channels_last, block_channels, tile_bytes,
                           lanes);
  });
  return out;
}

Tensor ps_roi_pool_backward_cuda(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                                 int64_t height, int64_t width, int64_t pooled_height,
                                 int64_t pooled_width, double spatial_scale, bool channels_last) {
  return ps_roi_pool_backward_scheduled(grad, boxes, images, channels, height, width, pooled_height,
                                        pooled_width, spatial_scale, channels_last, 0, 0, 1);
}

}  // namespace
}  // namespace truncdet

// For tests and measurements: channels of a block, bytes of its sums (0: the usual ones) and
// threads of a RoI as last arguments.
STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) {
  m.def(
      "_ps_roi_pool_backward_scheduled(Tensor grad, Tensor boxes, int images, int channels, int "
      "height, int width, int pooled_height, int pooled_width, float spatial_scale, bool "
      "channels_last, int block_channels, int tile_bytes, int lanes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("ps_roi_pool", TORCH_BOX(&truncdet::ps_roi_pool_cuda));
  m.impl("ps_roi_pool_backward", TORCH_BOX(&truncdet::ps_roi_pool_backward_cuda));
  m.impl("_ps_roi_pool_backward_scheduled", TORCH_BOX(&truncdet::ps_roi_pool_backward_scheduled));
}
