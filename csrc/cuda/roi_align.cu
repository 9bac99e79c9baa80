// RoIAlign with average pooling on CUDA: host functions.
#include "roi_align_atomic.cuh"
#include "roi_align_forward.cuh"
#include "roi_align_gather.cuh"

namespace truncdet {
namespace {

// How the backward is scheduled; every schedule gives the same bits.
// kWide and kPairs are the gather with tiles of 16 x 8 cells x 32 channels and 8 x 8 x 64.
enum Schedule : int64_t { kAuto = 0, kWide = 1, kPairs = 2, kAtomic = 3 };

Tensor roi_align_cuda(Tensor input, Tensor boxes, int64_t pooled_height, int64_t pooled_width,
                      double spatial_scale, int64_t sampling_ratio, bool aligned) {
  const RoiAlignShape shape = forward_shape(input, boxes, pooled_height, pooled_width,
                                            spatial_scale, sampling_ratio, aligned);
  const DeviceGuard guard(input.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align", [&] {
    launch_forward<scalar_t>(input, boxes, out, shape, channels_last, current_stream(input));
  });
  return out;
}

template <class T>
void run_backward(const Tensor& grad, const Tensor& boxes, const Tensor& out,
                  const RoiAlignShape& shape, bool channels_last, int64_t schedule) {
  const cudaStream_t stream = current_stream(grad);
  Tensor scratch;
  const auto statistics = roi_statistics<T>(grad, boxes, shape, stream, &scratch);
  if constexpr (!std::is_same_v<T, double>) {
    const bool wide = gather_fits<1, 16>(shape), pairs = gather_fits<2, 8>(shape);
    TRUNCDET_CHECK(schedule == kAuto || schedule == kAtomic || (schedule == kWide && wide) ||
                       (schedule == kPairs && pairs),
                   "roi_align_backward: this shape does not fit the schedule asked for");
    // Two channels a lane share the weights, but only if there are so many and two batches fit.
    const bool prefer_pairs = pairs && shape.channels > 32 && gather_plan<2, 8>(shape).stages == 2;
    if (schedule == kPairs || (schedule == kAuto && (prefer_pairs || (pairs && !wide)))) {
      launch_gather<2, 8, T>(grad, out, shape, statistics, channels_last, stream);
      return;
    }
    if (schedule == kWide || (schedule == kAuto && wide)) {
      launch_gather<1, 16, T>(grad, out, shape, statistics, channels_last, stream);
      return;
    }
  }
  launch_atomic<T>(grad, nullptr, out, shape, statistics, channels_last, stream);
}

Tensor roi_align_backward_scheduled(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                                    int64_t height, int64_t width, int64_t pooled_height,
                                    int64_t pooled_width, double spatial_scale,
                                    int64_t sampling_ratio, bool aligned, bool channels_last,
                                    int64_t schedule) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, sampling_ratio, aligned);
  const DeviceGuard guard(grad.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_backward", [&] {
    run_backward<scalar_t>(grad, boxes, out, shape, channels_last, schedule);
  });
  return out;
}

Tensor roi_align_backward_cuda(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                               int64_t height, int64_t width, int64_t pooled_height,
                               int64_t pooled_width, double spatial_scale, int64_t sampling_ratio,
                               bool aligned, bool channels_last) {
  return roi_align_backward_scheduled(grad, boxes, images, channels, height, width, pooled_height,
                                      pooled_width, spatial_scale, sampling_ratio, aligned,
                                      channels_last, kAuto);
}

}  // namespace
}  // namespace truncdet

// For tests: the schedule as a last argument.
STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) {
  m.def(
      "_roi_align_backward_scheduled(Tensor grad, Tensor boxes, int images, int channels, int "
      "height, int width, int pooled_height, int pooled_width, float spatial_scale, int "
      "sampling_ratio, bool aligned, bool channels_last, int schedule) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("roi_align", TORCH_BOX(&truncdet::roi_align_cuda));
  m.impl("roi_align_backward", TORCH_BOX(&truncdet::roi_align_backward_cuda));
  m.impl("_roi_align_backward_scheduled", TORCH_BOX(&truncdet::roi_align_backward_scheduled));
}
