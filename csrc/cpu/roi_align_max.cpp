// RoIAlign with max pooling on the CPU.
#include <tuple>

#include "../roi_align_max.h"
#include "roi_planes.h"

namespace truncdet {
namespace {

template <class T>
void forward(const T* input, const ImageStrides& stride, const typename Format<T>::Compute* boxes,
             const RoiAlignShape& shape, T* out, int32_t* argmax) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * shape.channels * shape.bins(); i < end * shape.channels * shape.bins();
         ++i) {
      // i = ((k * channels + c) * pooled_height + p) * pooled_width + q
      const int q = static_cast<int>(i % shape.pooled_width);
      const int p = static_cast<int>(i / shape.pooled_width % shape.pooled_height);
      const int64_t c = i / shape.bins() % shape.channels, k = i / shape.bins() / shape.channels;
      const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
      const T* plane = input + std::max<int64_t>(roi.image, 0) * stride.image + c * stride.channel;
      const MaxSample<C> best = max_sample(roi, p, q, [&](int y, int x) {
        return widen(plane[y * stride.row + x * stride.column]);
      });
      out[i] = narrow<T>(best.value);
      argmax[i] = best.number;
    }
  });
}

template <class T>
void backward(const T* grad, const int32_t* argmax, const typename Format<T>::Compute* boxes,
              const RoiAlignShape& shape, const ImageStrides& stride, T* out) {
  using C = typename Format<T>::Compute;
  const GradientStatistics<C> statistics(grad, boxes, shape);
  add_planes<T>(statistics, shape, shape.bins(), stride, out,
                [&](int64_t k, int64_t channel, PlaneSums<C>& plane) {
                  const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
                  for (int64_t bin = 0; bin < shape.bins(); ++bin) {
                    const int64_t at = (k * shape.channels + channel) * shape.bins() + bin;
                    const C raw = widen(grad[at]), value = plane.normalise(raw);
                    visit_chosen(roi, static_cast<int>(bin / shape.pooled_width),
                                 static_cast<int>(bin % shape.pooled_width), argmax[at],
                                 [&](int y, int x, C weight) {
                                   plane.add(y * shape.width + x, weight * value, raw);
                                 });
                  }
                });
}

std::tuple<Tensor, Tensor> roi_align_max_cpu(Tensor input, Tensor boxes, int64_t pooled_height,
                                             int64_t pooled_width, double spatial_scale,
                                             int64_t sampling_ratio, bool aligned) {
  const RoiAlignShape shape = forward_shape(input, boxes, pooled_height, pooled_width,
                                            spatial_scale, sampling_ratio, aligned);
  check_on_cpu(boxes);
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  Tensor argmax = torch::stable::new_empty(input, {sizes, 4}, ScalarType::Int);
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align_max", [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape);
    forward<scalar_t>(const_data<scalar_t>(input), image_strides(shape, channels_last),
                      const_data<C>(boxes), shape, mutable_data<scalar_t>(out),
                      mutable_data<int32_t>(argmax));
  });
  return {out, argmax};
}

Tensor roi_align_max_backward_cpu(Tensor grad, Tensor argmax, Tensor boxes, int64_t images,
                                  int64_t channels, int64_t height, int64_t width,
                                  int64_t pooled_height, int64_t pooled_width, double spatial_scale,
                                  int64_t sampling_ratio, bool aligned, bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, sampling_ratio, aligned);
  check_argmax(argmax, grad);
  check_on_cpu(boxes);
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  argmax = torch::stable::contiguous(argmax);
  Tensor out = empty_image(grad, shape, channels_last);
  if (shape.rois == 0) return torch::stable::zero_(out);
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_max_backward", [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape);
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<int32_t>(argmax),
                       const_data<C>(boxes), shape, image_strides(shape, channels_last),
                       mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("roi_align_max", TORCH_BOX(&truncdet::roi_align_max_cpu));
  m.impl("roi_align_max_backward", TORCH_BOX(&truncdet::roi_align_max_backward_cpu));
}
