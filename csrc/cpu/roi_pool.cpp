// roi_pool on the CPU.
#include <algorithm>
#include <tuple>

#include "../roi_pool.h"
#include "roi_planes.h"

namespace truncdet {
namespace {

constexpr const char* kOp = "roi_pool";

PoolRule rule(bool rounded) { return rounded ? PoolRule::kInclusive : PoolRule::kExact; }

template <class T>
void forward(const T* input, const ImageStrides& stride, const typename Format<T>::Compute* boxes,
             const RoiAlignShape& shape, bool rounded, T* out, int32_t* argmax) {
  using C = typename Format<T>::Compute;
  const int64_t length = shape.channels * shape.bins();
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * length; i < end * length; ++i) {
      // i = ((k * channels + c) * pooled_height + p) * pooled_width + q
      const int q = static_cast<int>(i % shape.pooled_width);
      const int p = static_cast<int>(i / shape.pooled_width % shape.pooled_height);
      const int64_t c = i / shape.bins() % shape.channels, k = i / length;
      const PoolRoi<C> roi = make_pool_roi(boxes + 5 * k, shape, rule(rounded));
      const T* plane = input + std::max<int64_t>(roi.image, 0) * stride.image + c * stride.channel;
      const MaxCell<C> best = max_cell<C>(
          roi.y.cells(p), roi.x.cells(q), static_cast<int>(shape.width),
          [&](int y, int x) { return widen(plane[y * stride.row + x * stride.column]); });
      out[i] = narrow<T>(best.value);
      argmax[i] = best.cell;
    }
  });
}

template <class T>
void backward(const T* grad, const int32_t* argmax, const typename Format<T>::Compute* boxes,
              const RoiAlignShape& shape, bool rounded, const ImageStrides& stride, T* out) {
  using C = typename Format<T>::Compute;
  const GradientStatistics<C> statistics(grad, boxes, shape);
  add_planes<T>(statistics, shape, shape.bins(), stride, out,
                [&](int64_t k, int64_t channel, PlaneSums<C>& plane) {
                  const PoolRoi<C> roi = make_pool_roi(boxes + 5 * k, shape, rule(rounded));
                  const CellRange rows = roi.y.all_cells(static_cast<int>(shape.pooled_height));
                  const CellRange columns = roi.x.all_cells(static_cast<int>(shape.pooled_width));
                  const int64_t first = (k * shape.channels + channel) * shape.bins();
                  for (int64_t i = first; i < first + shape.bins(); ++i) {
                    if (!may_choose(rows, columns, argmax[i], shape.width)) continue;
                    const C raw = widen(grad[i]);
                    plane.add(argmax[i], plane.normalise(raw), raw);
                  }
                });
}

std::tuple<Tensor, Tensor> roi_pool_cpu(Tensor input, Tensor boxes, int64_t pooled_height,
                                        int64_t pooled_width, double spatial_scale, bool rounded) {
  const RoiAlignShape shape =
      forward_shape(input, boxes, pooled_height, pooled_width, spatial_scale, 0, false, kOp);
  check_on_cpu(boxes, kOp);
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  Tensor argmax = torch::stable::new_empty(input, {sizes, 4}, ScalarType::Int);
  TRUNCDET_DISPATCH(input.scalar_type(), kOp, [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape, kOp);
    forward<scalar_t>(const_data<scalar_t>(input), image_strides(shape, channels_last),
                      const_data<C>(boxes), shape, rounded, mutable_data<scalar_t>(out),
                      mutable_data<int32_t>(argmax));
  });
  return {out, argmax};
}

Tensor roi_pool_backward_cpu(Tensor grad, Tensor argmax, Tensor boxes, int64_t images,
                             int64_t channels, int64_t height, int64_t width, int64_t pooled_height,
                             int64_t pooled_width, double spatial_scale, bool rounded,
                             bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, 0, false, kOp);
  check_argmax(argmax, grad, kOp);
  check_on_cpu(boxes, kOp);
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  argmax = torch::stable::contiguous(argmax);
  Tensor out = empty_image(grad, shape, channels_last);
  if (shape.rois == 0) return torch::stable::zero_(out);
  TRUNCDET_DISPATCH(grad.scalar_type(), kOp, [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape, kOp);
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<int32_t>(argmax),
                       const_data<C>(boxes), shape, rounded, image_strides(shape, channels_last),
                       mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("roi_pool", TORCH_BOX(&truncdet::roi_pool_cpu));
  m.impl("roi_pool_backward", TORCH_BOX(&truncdet::roi_pool_backward_cpu));
}
