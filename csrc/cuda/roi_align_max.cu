// RoIAlign with max pooling on CUDA.
#include <tuple>

#include "roi_align_atomic.cuh"

namespace truncdet {
namespace {

template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    roi_max_forward_kernel(const T* input, ImageStrides stride, const C* boxes, RoiAlignShape shape,
                           T* out, int32_t* argmax, unsigned* sticky) {
  const int64_t total = shape.rois * shape.channels * shape.bins();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * kThreads) {
    // i = ((k * channels + c) * pooled_height + p) * pooled_width + q
    const int q = static_cast<int>(i % shape.pooled_width);
    const int p = static_cast<int>(i / shape.pooled_width % shape.pooled_height);
    const int64_t c = i / shape.bins() % shape.channels, k = i / shape.bins() / shape.channels;
    const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
    if (roi.image < 0) set_sticky(sticky, kStickyRoiAlign);
    const T* plane = input + max(roi.image, int64_t(0)) * stride.image + c * stride.channel;
    const MaxSample<C> best = max_sample(
        roi, p, q, [&](int y, int x) { return widen(plane[y * stride.row + x * stride.column]); });
    out[i] = narrow<T>(best.value);
    argmax[i] = best.number;
  }
}

template <class T>
void run_forward(const Tensor& input, const Tensor& boxes, const Tensor& out, const Tensor& argmax,
                 const RoiAlignShape& shape, bool channels_last) {
  using C = typename Format<T>::Compute;
  roi_max_forward_kernel<T, C><<<blocks_for(out.numel()), kThreads, 0, current_stream(input)>>>(
      const_data<T>(input), image_strides(shape, channels_last), const_data<C>(boxes), shape,
      mutable_data<T>(out), mutable_data<int32_t>(argmax), sticky_word());
  TRUNCDET_LAUNCH_CHECK();
}

template <class T>
void run_backward(const Tensor& grad, const Tensor& argmax, const Tensor& boxes, const Tensor& out,
                  const RoiAlignShape& shape, bool channels_last) {
  const cudaStream_t stream = current_stream(grad);
  Tensor scratch;
  const auto statistics = roi_statistics<T>(grad, boxes, shape, stream, &scratch);
  launch_atomic<T>(grad, &argmax, out, shape, statistics, channels_last, stream);
}

std::tuple<Tensor, Tensor> roi_align_max_cuda(Tensor input, Tensor boxes, int64_t pooled_height,
                                              int64_t pooled_width, double spatial_scale,
                                              int64_t sampling_ratio, bool aligned) {
  const RoiAlignShape shape = forward_shape(input, boxes, pooled_height, pooled_width,
                                            spatial_scale, sampling_ratio, aligned);
  const DeviceGuard guard(input.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  Tensor argmax = torch::stable::new_empty(input, {sizes, 4}, ScalarType::Int);
  if (out.numel() == 0) return {out, argmax};
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align_max", [&] {
    run_forward<scalar_t>(input, boxes, out, argmax, shape, channels_last);
  });
  return {out, argmax};
}

Tensor roi_align_max_backward_cuda(Tensor grad, Tensor argmax, Tensor boxes, int64_t images,
                                   int64_t channels, int64_t height, int64_t width,
                                   int64_t pooled_height, int64_t pooled_width,
                                   double spatial_scale, int64_t sampling_ratio, bool aligned,
                                   bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, sampling_ratio, aligned);
  check_argmax(argmax, grad);
  const DeviceGuard guard(grad.get_device_index());
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  argmax = torch::stable::contiguous(argmax);
  Tensor out = empty_image(grad, shape, channels_last);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_max_backward", [&] {
    run_backward<scalar_t>(grad, argmax, boxes, out, shape, channels_last);
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("roi_align_max", TORCH_BOX(&truncdet::roi_align_max_cuda));
  m.impl("roi_align_max_backward", TORCH_BOX(&truncdet::roi_align_max_backward_cuda));
}
