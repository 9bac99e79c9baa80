// RoIAlign of rotated boxes on CUDA: host functions.
#include "roi_rotated_atomic.cuh"
#include "roi_rotated_forward.cuh"
#include "roi_rotated_gather.cuh"

namespace truncdet {
namespace {

// How the backward is scheduled; every schedule gives the same bits. kWide and kPairs are the
// gather with tiles of 16 x 8 cells x 32 channels and 8 x 8 x 64, kComputed is kPairs without
// matrices.
enum RotatedSchedule : int64_t { kAuto = 0, kWide = 1, kPairs = 2, kAtomic = 3, kComputed = 4 };

Tensor forward_cuda(Tensor input, Tensor rois, int64_t pooled_height, int64_t pooled_width,
                    double spatial_scale, int64_t sampling_ratio, bool aligned, bool clockwise) {
  const RotatedShape shape = rotated_forward_shape(
      input, rois, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, clockwise);
  const DeviceGuard guard(input.get_device_index());
  rois = torch::stable::contiguous(rois);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align_rotated", [&] {
    launch_rotated_forward<scalar_t>(input, rois, out, shape, channels_last, current_stream(input));
  });
  return out;
}

template <class T>
void run_backward(const Tensor& grad, const Tensor& rois, const Tensor& out,
                  const RotatedShape& shape, bool channels_last, int64_t schedule) {
  const cudaStream_t stream = current_stream(grad);
  Tensor scratch;
  if constexpr (!std::is_same_v<T, double>) {
    const bool wide = rotated_fits<1, 16>(shape), pairs = rotated_fits<2, 8>(shape);
    TRUNCDET_CHECK(schedule == kAuto || schedule == kAtomic || (schedule == kWide && wide) ||
                       ((schedule == kPairs || schedule == kComputed) && pairs),
                   "roi_align_rotated_backward: this shape does not fit the schedule asked for");
    // Two channels a lane share the weights, but only if there are so many and two batches fit.
    const bool prefer_pairs = pairs && shape.channels > 32 && rotated_plan<2, 8>(shape).stages == 2;
    const bool use_pairs = schedule == kPairs || schedule == kComputed ||
                           (schedule == kAuto && (prefer_pairs || (pairs && !wide)));
    if (use_pairs || schedule == kWide || (schedule == kAuto && wide)) {
      const auto statistics =
          rotated_statistics<T>(grad, rois, shape, schedule != kComputed, stream, &scratch);
      if (use_pairs) {
        launch_rotated_gather<2, 8, T>(grad, out, shape, statistics, channels_last, stream);
      } else {
        launch_rotated_gather<1, 16, T>(grad, out, shape, statistics, channels_last, stream);
      }
      return;
    }
  }
  const auto statistics = rotated_statistics<T>(grad, rois, shape, false, stream, &scratch);
  launch_rotated_atomic<T>(grad, out, shape, statistics, channels_last, stream);
}

Tensor backward_scheduled(Tensor grad, Tensor rois, int64_t images, int64_t channels,
                          int64_t height, int64_t width, int64_t pooled_height,
                          int64_t pooled_width, double spatial_scale, int64_t sampling_ratio,
                          bool aligned, bool clockwise, bool channels_last, int64_t schedule) {
  const RotatedShape shape =
      rotated_backward_shape(grad, rois, images, channels, height, width, pooled_height,
                             pooled_width, spatial_scale, sampling_ratio, aligned, clockwise);
  const DeviceGuard guard(grad.get_device_index());
  rois = torch::stable::contiguous(rois);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_rotated_backward", [&] {
    run_backward<scalar_t>(grad, rois, out, shape, channels_last, schedule);
  });
  return out;
}

Tensor backward_cuda(Tensor grad, Tensor rois, int64_t images, int64_t channels, int64_t height,
                     int64_t width, int64_t pooled_height, int64_t pooled_width,
                     double spatial_scale, int64_t sampling_ratio, bool aligned, bool clockwise,
                     bool channels_last) {
  return backward_scheduled(grad, rois, images, channels, height, width, pooled_height,
                            pooled_width, spatial_scale, sampling_ratio, aligned, clockwise,
                            channels_last, kAuto);
}

}  // namespace
}  // namespace truncdet

// For tests: the schedule as a last argument.
STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) {
  m.def(
      "_roi_align_rotated_backward_scheduled(Tensor grad, Tensor rois, int images, int channels, "
      "int height, int width, int pooled_height, int pooled_width, float spatial_scale, int "
      "sampling_ratio, bool aligned, bool clockwise, bool channels_last, int schedule) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("roi_align_rotated", TORCH_BOX(&truncdet::forward_cuda));
  m.impl("roi_align_rotated_backward", TORCH_BOX(&truncdet::backward_cuda));
  m.impl("_roi_align_rotated_backward_scheduled", TORCH_BOX(&truncdet::backward_scheduled));
}
