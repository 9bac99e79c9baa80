// roi_pool on CUDA: host functions.
#include <tuple>

#include "roi_pool_forward.cuh"
#include "roi_pool_statistics.cuh"
#include "roi_tile_chosen.cuh"

namespace truncdet {
namespace {

constexpr const char* kOp = "roi_pool";

PoolRule rule(bool rounded) { return rounded ? PoolRule::kInclusive : PoolRule::kExact; }

std::tuple<Tensor, Tensor> roi_pool_cuda(Tensor input, Tensor boxes, int64_t pooled_height,
                                         int64_t pooled_width, double spatial_scale, bool rounded) {
  const RoiAlignShape shape =
      forward_shape(input, boxes, pooled_height, pooled_width, spatial_scale, 0, false, kOp);
  const DeviceGuard guard(input.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  Tensor argmax = torch::stable::new_empty(input, {sizes, 4}, ScalarType::Int);
  if (out.numel() == 0) return {out, argmax};
  TRUNCDET_DISPATCH(input.scalar_type(), kOp, [&] {
    launch_pool_forward<scalar_t, false>(input, boxes, shape, rule(rounded), channels_last,
                                         kStickyRoiPool, mutable_data<scalar_t>(out),
                                         mutable_data<int32_t>(argmax), current_stream(input));
  });
  return {out, argmax};
}

// Channels of a block. Four of channels first: 16 bytes a load, and rows of the output stay long.
// A map that fits a tile alone needs no list of RoIs that would have to be shared.
template <class T>
int64_t channels_of_block(const RoiAlignShape& shape, bool channels_last) {
  if (shape.bins() >= 1 << 20) return 1;
  if (channels_last) return 8;
  const int64_t cells =
      kTileBytes / (2 * static_cast<int64_t>(sizeof(typename Format<T>::Compute)));
  const bool fits = (shape.width + 3) / 4 * 4 * shape.height <= cells;
  return fits && shape.bins() % 4 == 0 ? 1 : 4;
}

template <class T>
void run_backward(const Tensor& grad, const Tensor& argmax, const Tensor& boxes, const Tensor& out,
                  const RoiAlignShape& shape, bool rounded, bool channels_last, int64_t channels,
                  int64_t bytes) {
  using C = typename Format<T>::Compute;
  const cudaStream_t stream = current_stream(grad);
  Tensor scratch;
  const auto statistics = roi_statistics<T>(grad, boxes, shape, stream, &scratch, kStickyRoiPool,
                                            PooledRois<C>{rule(rounded)});
  const TileParams<T> params(out, shape, channels_last, statistics, shape.bins(),
                             channels > 0 ? channels : channels_of_block<T>(shape, channels_last),
                             bytes > 0 ? bytes : kTileBytes);
  const T* values = const_data<T>(grad);
  const int32_t* chosen = const_data<int32_t>(argmax);
  const int group = params.plan.channels;
  if (ChosenCells<T, 4>::fits(values, chosen, shape, group)) {
    launch_tile_sums(params, ChosenCells<T, 4>(values, chosen, shape, group), stream);
  } else {
    launch_tile_sums(params, ChosenCells<T, 1>(values, chosen, shape, group), stream);
  }
}

Tensor roi_pool_backward_scheduled(Tensor grad, Tensor argmax, Tensor boxes, int64_t images,
                                   int64_t channels, int64_t height, int64_t width,
                                   int64_t pooled_height, int64_t pooled_width,
                                   double spatial_scale, bool rounded, bool channels_last,
                                   int64_t block_channels, int64_t tile_bytes) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, 0, false, kOp);
  check_argmax(argmax, grad, kOp);
  const int64_t least = 512 * (block_channels > 8 ? block_channels : 8);
  TRUNCDET_CHECK(block_channels >= 0 && block_channels <= 32 && tile_bytes <= kTileBytes &&
                     (tile_bytes == 0 || tile_bytes >= least) &&
                     (block_channels == 0 || shape.bins() < 1 << 20),
                 "roi_pool: no such schedule");
  const DeviceGuard guard(grad.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  argmax = torch::stable::contiguous(argmax);
  Tensor out = empty_image(grad, shape, channels_last);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), kOp, [&] {
    run_backward<scalar_t>(grad, argmax, boxes, out, shape, rounded, channels_last, block_channels,
                           tile_bytes);
  });
  return out;
}

Tensor roi_pool_backward_cuda(Tensor grad, Tensor argmax, Tensor boxes, int64_t images,
                              int64_t channels, int64_t height, int64_t width,
                              int64_t pooled_height, int64_t pooled_width, double spatial_scale,
                              bool rounded, bool channels_last) {
  return roi_pool_backward_scheduled(grad, argmax, boxes, images, channels, height, width,
                                     pooled_height, pooled_width, spatial_scale, rounded,
                                     channels_last, 0, 0);
}

}  // namespace
}  // namespace truncdet

// For tests: channels of a block and bytes of its sums as last arguments, 0 for the usual ones.
STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) {
  m.def(
      "_roi_pool_backward_scheduled(Tensor grad, Tensor argmax, Tensor boxes, int images, int "
      "channels, int height, int width, int pooled_height, int pooled_width, float spatial_scale, "
      "bool rounded, bool channels_last, int block_channels, int tile_bytes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("roi_pool", TORCH_BOX(&truncdet::roi_pool_cuda));
  m.impl("roi_pool_backward", TORCH_BOX(&truncdet::roi_pool_backward_cuda));
  m.impl("_roi_pool_backward_scheduled", TORCH_BOX(&truncdet::roi_pool_backward_scheduled));
}
