// What the CPU and the CUDA host functions of rotated RoIAlign share: reading and checking
// arguments.
#pragma once

#include "roi_align_host.h"
#include "roi_align_rotated.h"

namespace truncdet {

inline void check_rotated(const RotatedShape& shape, const Tensor& rois, const Tensor& values) {
  TRUNCDET_CHECK(shape.pooled_height > 0 && shape.pooled_width > 0 &&
                     shape.pooled_height <= kMaxGrid && shape.pooled_width <= kMaxGrid &&
                     shape.bins() <= kMaxBins,
                 "roi_align_rotated: output_size must be positive, with at most ", kMaxGrid,
                 " bins an axis and ", kMaxBins, " in all");
  TRUNCDET_CHECK(shape.sampling_ratio <= kMaxRatio,
                 "roi_align_rotated: sampling_ratio must be at most ", kMaxRatio, ", got ",
                 shape.sampling_ratio);
  TRUNCDET_CHECK(shape.images >= 0 && shape.channels >= 0 && shape.height >= 0 && shape.width >= 0,
                 "roi_align_rotated: the input's sizes must not be negative");
  // Cells of one plane are addressed with 32 bits.
  TRUNCDET_CHECK(shape.height < (int64_t(1) << 31) && shape.width < (int64_t(1) << 31) &&
                     shape.cells() < (int64_t(1) << 31),
                 "roi_align_rotated: a feature map must have fewer than 2^31 cells, got ",
                 shape.height, " x ", shape.width);
  TRUNCDET_CHECK(rois.dim() == 2 && rois.size(1) == 6 && rois.size(0) == shape.rois,
                 "roi_align_rotated: rois must have shape [", shape.rois, ", 6]");
  TRUNCDET_CHECK(rois.scalar_type() == compute_type(values.scalar_type()),
                 "roi_align_rotated: rois must be float64 for float64 values and float32 "
                 "otherwise");
  TRUNCDET_CHECK(
      rois.is_cuda() == values.is_cuda() && rois.get_device_index() == values.get_device_index(),
      "roi_align_rotated: rois must be on the device of the values");
  TRUNCDET_CHECK(shape.rois == 0 || headroom(shape.rois) + headroom(shape.bins()) <= kMaxHeadroom,
                 "roi_align_rotated: too many RoIs for the accumulator");
}

inline RotatedShape rotated_forward_shape(const Tensor& input, const Tensor& rois,
                                          int64_t pooled_height, int64_t pooled_width,
                                          double spatial_scale, int64_t sampling_ratio,
                                          bool aligned, bool clockwise) {
  TRUNCDET_CHECK(input.dim() == 4 && rois.dim() == 2,
                 "roi_align_rotated: input must have 4 dimensions and rois 2, got ", input.dim(),
                 " and ", rois.dim());
  const RotatedShape shape{
      {rois.size(0), input.size(0), input.size(1), input.size(2), input.size(3), pooled_height,
       pooled_width, spatial_scale, sampling_ratio, aligned},
      clockwise};
  check_rotated(shape, rois, input);
  return shape;
}

inline RotatedShape rotated_backward_shape(const Tensor& grad, const Tensor& rois, int64_t images,
                                           int64_t channels, int64_t height, int64_t width,
                                           int64_t pooled_height, int64_t pooled_width,
                                           double spatial_scale, int64_t sampling_ratio,
                                           bool aligned, bool clockwise) {
  TRUNCDET_CHECK(rois.dim() == 2, "roi_align_rotated: rois must have 2 dimensions, got ",
                 rois.dim());
  const RotatedShape shape{{rois.size(0), images, channels, height, width, pooled_height,
                            pooled_width, spatial_scale, sampling_ratio, aligned},
                           clockwise};
  check_rotated(shape, rois, grad);
  TRUNCDET_CHECK(grad.dim() == 4 && grad.size(0) == shape.rois && grad.size(1) == channels &&
                     grad.size(2) == pooled_height && grad.size(3) == pooled_width,
                 "roi_align_rotated: grad must have shape [", shape.rois, ", ", channels, ", ",
                 pooled_height, ", ", pooled_width, "]");
  return shape;
}

}  // namespace truncdet
