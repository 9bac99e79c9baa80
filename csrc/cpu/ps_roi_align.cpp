// ps_roi_align on the CPU: RoIAlign whose every bin has an input channel of its own.
#include <algorithm>
#include <vector>

#include "roi_planes.h"

namespace truncdet {
namespace {

constexpr const char* kOp = "ps_roi_align";

// The weights of a RoI by bin, of both axes.
template <class C>
struct RoiWeights {
  BinTable<C> rows, columns;

  RoiWeights(const Roi<C>& roi, const RoiAlignShape& shape)
      : rows(roi.y, shape.pooled_height, C(1)), columns(roi.x, shape.pooled_width, roi.count) {}
};

template <class T>
void forward(const T* input, const ImageStrides& stride, const typename Format<T>::Compute* boxes,
             const RoiAlignShape& shape, T* out) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const Roi<C> roi = make_roi(boxes + 5 * k, shape);
      const RoiWeights<C> weights(roi, shape);
      const T* image = input + std::max<int64_t>(roi.image, 0) * stride.image;
      for (int64_t c = 0; c < shape.channels; ++c) {
        // c = (output channel * pooled_height + p) * pooled_width + q
        const int64_t p = c / shape.pooled_width % shape.pooled_height, q = c % shape.pooled_width;
        const T* plane = image + c * stride.channel;
        C sum = C(0);
        for (const auto* y = weights.rows.begin(p); y != weights.rows.end(p); ++y) {
          C line = C(0);
          for (const auto* x = weights.columns.begin(q); x != weights.columns.end(q); ++x) {
            line += x->weight * widen(plane[y->cell * stride.row + x->cell * stride.column]);
          }
          sum += y->weight * line;
        }
        out[k * shape.channels + c] = narrow<T>(sum);
      }
    }
  });
}

template <class T>
void backward(const T* grad, const typename Format<T>::Compute* boxes, const RoiAlignShape& shape,
              const ImageStrides& stride, T* out) {
  using C = typename Format<T>::Compute;
  const GradientStatistics<C> statistics(grad, boxes, shape, shape.channels);
  std::vector<RoiWeights<C>> weights;
  for (int64_t k = 0; k < shape.rois; ++k) {
    weights.emplace_back(make_roi(boxes + 5 * k, shape), shape);
  }
  add_planes<T>(statistics, shape, 1, stride, out, [&](int64_t k, int64_t c, PlaneSums<C>& plane) {
    const int64_t p = c / shape.pooled_width % shape.pooled_height;
    const int64_t q = c % shape.pooled_width;
    const C raw = widen(grad[k * shape.channels + c]), value = plane.normalise(raw);
    const BinTable<C>&rows = weights[k].rows, &columns = weights[k].columns;
    for (const auto* y = rows.begin(p); y != rows.end(p); ++y) {
      for (const auto* x = columns.begin(q); x != columns.end(q); ++x) {
        plane.add(y->cell * shape.width + x->cell, (y->weight * x->weight) * value, raw);
      }
    }
  });
}

Tensor ps_roi_align_cpu(Tensor input, Tensor boxes, int64_t pooled_height, int64_t pooled_width,
                        double spatial_scale, int64_t sampling_ratio) {
  const RoiAlignShape shape = forward_shape(input, boxes, pooled_height, pooled_width,
                                            spatial_scale, sampling_ratio, true, kOp);
  check_sensitive(shape, kOp);
  check_on_cpu(boxes, kOp);
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels / shape.bins(), pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  TRUNCDET_DISPATCH(input.scalar_type(), kOp, [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape, kOp);
    forward<scalar_t>(const_data<scalar_t>(input), image_strides(shape, channels_last),
                      const_data<C>(boxes), shape, mutable_data<scalar_t>(out));
  });
  return out;
}

Tensor ps_roi_align_backward_cpu(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                                 int64_t height, int64_t width, int64_t pooled_height,
                                 int64_t pooled_width, double spatial_scale, int64_t sampling_ratio,
                                 bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, sampling_ratio, true, kOp, true);
  check_on_cpu(boxes, kOp);
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (shape.rois == 0) return torch::stable::zero_(out);
  TRUNCDET_DISPATCH(grad.scalar_type(), kOp, [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape, kOp);
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<C>(boxes), shape,
                       image_strides(shape, channels_last), mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("ps_roi_align", TORCH_BOX(&truncdet::ps_roi_align_cpu));
  m.impl("ps_roi_align_backward", TORCH_BOX(&truncdet::ps_roi_align_backward_cpu));
}
