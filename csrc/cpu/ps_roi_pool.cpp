// ps_roi_pool on the CPU: the mean of a bin's cells, every bin with an input channel of its own.
#include <algorithm>

#include "../roi_pool.h"
#include "roi_planes.h"

namespace truncdet {
namespace {

constexpr const char* kOp = "ps_roi_pool";

template <class T>
void forward(const T* input, const ImageStrides& stride, const typename Format<T>::Compute* boxes,
             const RoiAlignShape& shape, T* out) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const PoolRoi<C> roi = make_pool_roi(boxes + 5 * k, shape, PoolRule::kHalfOpen);
      const T* image = input + std::max<int64_t>(roi.image, 0) * stride.image;
      for (int64_t c = 0; c < shape.channels; ++c) {
        // c = (output channel * pooled_height + p) * pooled_width + q
        const int p = static_cast<int>(c / shape.pooled_width % shape.pooled_height);
        const int q = static_cast<int>(c % shape.pooled_width);
        const T* plane = image + c * stride.channel;
        out[k * shape.channels + c] =
            narrow<T>(mean_cell<C>(mean_cells(roi.y, p), mean_cells(roi.x, q), [&](int y, int x) {
              return widen(plane[y * stride.row + x * stride.column]);
            }));
      }
    }
  });
}

template <class T>
void backward(const T* grad, const typename Format<T>::Compute* boxes, const RoiAlignShape& shape,
              const ImageStrides& stride, T* out) {
  using C = typename Format<T>::Compute;
  const GradientStatistics<C> statistics(grad, boxes, shape, shape.channels);
  add_planes<T>(statistics, shape, 1, stride, out, [&](int64_t k, int64_t c, PlaneSums<C>& plane) {
    const PoolRoi<C> roi = make_pool_roi(boxes + 5 * k, shape, PoolRule::kHalfOpen);
    const CellRange rows =
        roi.y.cells(static_cast<int>(c / shape.pooled_width % shape.pooled_height));
    const CellRange columns = roi.x.cells(static_cast<int>(c % shape.pooled_width));
    if (rows.empty() || columns.empty()) return;
    const C raw = widen(grad[k * shape.channels + c]);
    const C share = plane.normalise(raw) / cell_count<C>(rows, columns);
    for (int y = rows.first; y < rows.last; ++y) {
      for (int x = columns.first; x < columns.last; ++x) {
        plane.add(y * shape.width + x, share, raw);
      }
    }
  });
}

Tensor ps_roi_pool_cpu(Tensor input, Tensor boxes, int64_t pooled_height, int64_t pooled_width,
                       double spatial_scale) {
  const RoiAlignShape shape =
      forward_shape(input, boxes, pooled_height, pooled_width, spatial_scale, 0, false, kOp);
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

Tensor ps_roi_pool_backward_cpu(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                                int64_t height, int64_t width, int64_t pooled_height,
                                int64_t pooled_width, double spatial_scale, bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, 0, false, kOp, true);
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
  m.impl("ps_roi_pool", TORCH_BOX(&truncdet::ps_roi_pool_cpu));
  m.impl("ps_roi_pool_backward", TORCH_BOX(&truncdet::ps_roi_pool_backward_cpu));
}
