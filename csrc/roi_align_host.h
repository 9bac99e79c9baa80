// What the CPU and the CUDA host functions of RoIAlign share: reading and checking arguments.
#pragma once

#include "checks.h"
#include "roi_align.h"

namespace truncdet {

// Element strides of an image tensor.
struct ImageStrides {
  int64_t image, channel, row, column;
};

inline ImageStrides image_strides(const RoiAlignShape& shape, bool channels_last) {
  const int64_t cells = shape.cells();
  if (channels_last) {
    return {cells * shape.channels, 1, shape.width * shape.channels, shape.channels};
  }
  return {cells * shape.channels, cells, shape.width, 1};
}

inline void check_shape(const RoiAlignShape& shape) {
  TRUNCDET_CHECK(shape.pooled_height > 0 && shape.pooled_width > 0,
                 "roi_align: output_size must be positive");
  TRUNCDET_CHECK(shape.pooled_height <= kMaxGrid && shape.pooled_width <= kMaxGrid,
                 "roi_align: output_size must be at most ", kMaxGrid, " bins an axis");
  TRUNCDET_CHECK(shape.sampling_ratio <= kMaxGrid, "roi_align: sampling_ratio must be at most ",
                 kMaxGrid, ", got ", shape.sampling_ratio);
  TRUNCDET_CHECK(shape.images >= 0 && shape.channels >= 0 && shape.height >= 0 && shape.width >= 0,
                 "roi_align: the input's sizes must not be negative");
  // Cells of one plane are addressed with 32 bits.
  TRUNCDET_CHECK(shape.cells() < (int64_t(1) << 31),
                 "roi_align: a feature map must have fewer than 2^31 cells, got ", shape.height,
                 " x ", shape.width);
}

inline void check_boxes(const Tensor& boxes, const Tensor& values, int64_t rois) {
  TRUNCDET_CHECK(boxes.dim() == 2 && boxes.size(1) == 5 && boxes.size(0) == rois,
                 "roi_align: boxes must have shape [", rois, ", 5]");
  const bool is_double = values.scalar_type() == ScalarType::Double;
  TRUNCDET_CHECK(boxes.scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float),
                 "roi_align: boxes must be float64 for float64 values and float32 otherwise");
  TRUNCDET_CHECK(
      boxes.is_cuda() == values.is_cuda() && boxes.get_device_index() == values.get_device_index(),
      "roi_align: boxes must be on the device of the values");
}

inline RoiAlignShape forward_shape(const Tensor& input, const Tensor& boxes, int64_t pooled_height,
                                   int64_t pooled_width, double spatial_scale,
                                   int64_t sampling_ratio, bool aligned) {
  TRUNCDET_CHECK(input.dim() == 4, "roi_align: input must have 4 dimensions, got ", input.dim());
  const RoiAlignShape shape{boxes.size(0),  input.size(0), input.size(1), input.size(2),
                            input.size(3),  pooled_height, pooled_width,  spatial_scale,
                            sampling_ratio, aligned};
  check_shape(shape);
  check_boxes(boxes, input, shape.rois);
  return shape;
}

inline RoiAlignShape backward_shape(const Tensor& grad, const Tensor& boxes, int64_t images,
                                    int64_t channels, int64_t height, int64_t width,
                                    int64_t pooled_height, int64_t pooled_width,
                                    double spatial_scale, int64_t sampling_ratio, bool aligned) {
  const RoiAlignShape shape{boxes.size(0), images,       channels,      height,         width,
                            pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned};
  check_shape(shape);
  TRUNCDET_CHECK(grad.dim() == 4 && grad.size(0) == shape.rois && grad.size(1) == channels &&
                     grad.size(2) == pooled_height && grad.size(3) == pooled_width,
                 "roi_align: grad must have shape [", shape.rois, ", ", channels, ", ",
                 pooled_height, ", ", pooled_width, "]");
  check_boxes(boxes, grad, shape.rois);
  TRUNCDET_CHECK(shape.rois == 0 || headroom(shape.rois) + headroom(shape.bins()) <= kMaxHeadroom,
                 "roi_align: too many RoIs for the accumulator");
  return shape;
}

inline void check_argmax(const Tensor& argmax, const Tensor& grad) {
  TRUNCDET_CHECK(argmax.scalar_type() == ScalarType::Int && argmax.dim() == 4 &&
                     argmax.is_cuda() == grad.is_cuda() &&
                     argmax.get_device_index() == grad.get_device_index(),
                 "roi_align_max_backward: argmax must be int32 with the shape and device of grad");
  for (int i = 0; i < 4; ++i) {
    TRUNCDET_CHECK(argmax.size(i) == grad.size(i),
                   "roi_align_max_backward: argmax must have the shape of grad");
  }
}

// An image tensor of the wanted memory order, contents undefined.
inline Tensor empty_image(const Tensor& like, const RoiAlignShape& shape, bool channels_last) {
  const int64_t sizes[4] = {shape.images, shape.channels, shape.height, shape.width};
  return torch::stable::empty({sizes, 4}, like.scalar_type(), std::nullopt, like.device(),
                              std::nullopt,
                              channels_last ? torch::headeronly::MemoryFormat::ChannelsLast
                                            : torch::headeronly::MemoryFormat::Contiguous);
}

}  // namespace truncdet
