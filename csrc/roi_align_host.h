// What the CPU and the CUDA host functions of the RoI operators share: reading and checking
// arguments. `op` is the name in messages.
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

inline void check_shape(const RoiAlignShape& shape, const char* op) {
  TRUNCDET_CHECK(shape.pooled_height > 0 && shape.pooled_width > 0, op,
                 ": output_size must be positive");
  TRUNCDET_CHECK(shape.pooled_height <= kMaxGrid && shape.pooled_width <= kMaxGrid, op,
                 ": output_size must be at most ", kMaxGrid, " bins an axis");
  TRUNCDET_CHECK(shape.sampling_ratio <= kMaxGrid, op, ": sampling_ratio must be at most ",
                 kMaxGrid, ", got ", shape.sampling_ratio);
  TRUNCDET_CHECK(shape.images >= 0 && shape.channels >= 0 && shape.height >= 0 && shape.width >= 0,
                 op, ": the input's sizes must not be negative");
  // Cells of one plane are addressed with 32 bits.
  TRUNCDET_CHECK(shape.cells() < (int64_t(1) << 31), op,
                 ": a feature map must have fewer than 2^31 cells, got ", shape.height, " x ",
                 shape.width);
}

inline void check_boxes(const Tensor& boxes, const Tensor& values, int64_t rois, const char* op) {
  TRUNCDET_CHECK(boxes.dim() == 2 && boxes.size(1) == 5 && boxes.size(0) == rois, op,
                 ": boxes must have shape [", rois, ", 5]");
  const bool is_double = values.scalar_type() == ScalarType::Double;
  TRUNCDET_CHECK(boxes.scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float), op,
                 ": boxes must be float64 for float64 values and float32 otherwise");
  TRUNCDET_CHECK(
      boxes.is_cuda() == values.is_cuda() && boxes.get_device_index() == values.get_device_index(),
      op, ": boxes must be on the device of the values");
}

inline RoiAlignShape forward_shape(const Tensor& input, const Tensor& boxes, int64_t pooled_height,
                                   int64_t pooled_width, double spatial_scale,
                                   int64_t sampling_ratio, bool aligned,
                                   const char* op = "roi_align") {
  TRUNCDET_CHECK(input.dim() == 4, op, ": input must have 4 dimensions, got ", input.dim());
  const RoiAlignShape shape{boxes.size(0),  input.size(0), input.size(1), input.size(2),
                            input.size(3),  pooled_height, pooled_width,  spatial_scale,
                            sampling_ratio, aligned};
  check_shape(shape, op);
  check_boxes(boxes, input, shape.rois, op);
  return shape;
}

inline void check_sensitive(const RoiAlignShape& shape, const char* op) {
  TRUNCDET_CHECK(shape.channels % shape.bins() == 0, op, ": input must have a multiple of ",
                 shape.bins(), " channels, got ", shape.channels);
}

// `sensitive`: every bin has input channels of its own, so that grad has channels / bins of them.
inline RoiAlignShape backward_shape(const Tensor& grad, const Tensor& boxes, int64_t images,
                                    int64_t channels, int64_t height, int64_t width,
                                    int64_t pooled_height, int64_t pooled_width,
                                    double spatial_scale, int64_t sampling_ratio, bool aligned,
                                    const char* op = "roi_align", bool sensitive = false) {
  const RoiAlignShape shape{boxes.size(0), images,       channels,      height,         width,
                            pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned};
  check_shape(shape, op);
  if (sensitive) check_sensitive(shape, op);
  const int64_t outputs = sensitive ? channels / shape.bins() : channels;
  TRUNCDET_CHECK(grad.dim() == 4 && grad.size(0) == shape.rois && grad.size(1) == outputs &&
                     grad.size(2) == pooled_height && grad.size(3) == pooled_width,
                 op, ": grad must have shape [", shape.rois, ", ", outputs, ", ", pooled_height,
                 ", ", pooled_width, "]");
  check_boxes(boxes, grad, shape.rois, op);
  TRUNCDET_CHECK(shape.rois == 0 || headroom(shape.rois) + headroom(shape.bins()) <= kMaxHeadroom,
                 op, ": too many RoIs for the accumulator");
  return shape;
}

inline void check_argmax(const Tensor& argmax, const Tensor& grad,
                         const char* op = "roi_align_max_backward") {
  TRUNCDET_CHECK(argmax.scalar_type() == ScalarType::Int && argmax.dim() == 4 &&
                     argmax.is_cuda() == grad.is_cuda() &&
                     argmax.get_device_index() == grad.get_device_index(),
                 op, ": argmax must be int32 with the shape and device of grad");
  for (int i = 0; i < 4; ++i) {
    TRUNCDET_CHECK(argmax.size(i) == grad.size(i), op, ": argmax must have the shape of grad");
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
