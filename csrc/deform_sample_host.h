// What the CPU and the CUDA host functions behind deform_conv2d share: checks and outputs.
//
// Both work on columns [channels, taps, images, places], the matrix that the weight multiplies.
#pragma once

#include "accumulate.h"
#include "checks.h"
#include "deform_sample.h"

#include <optional>
#include <tuple>
#include <vector>

namespace truncdet {

// `geometry`: kernel, stride, padding and dilation, rows before columns.
inline DeformShape deform_shape(const Tensor& input, const Tensor& offset,
                                const std::optional<Tensor>& mask,
                                const std::vector<int64_t>& geometry) {
  constexpr int64_t kLimit = int64_t(1) << 31;  // so that no product of two overflows
  TRUNCDET_CHECK(input.dim() == 4 && offset.dim() == 4 && (!mask.has_value() || mask->dim() == 4),
                 "deform_conv2d: input, offset and mask must have 4 dimensions");
  TRUNCDET_CHECK(geometry.size() == 8, "deform_conv2d: geometry must have 8 numbers");
  DeformShape s{input.size(0), input.size(1), 0, {}, {}, {}, {}, {}, {}};
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t at = 1 - axis;
    s.size[axis] = input.size(2 + at);
    s.out[axis] = offset.size(2 + at);
    s.kernel[axis] = geometry[at];
    s.stride[axis] = geometry[2 + at];
    s.padding[axis] = geometry[4 + at];
    s.dilation[axis] = geometry[6 + at];
    TRUNCDET_CHECK(s.size[axis] < kLimit && s.out[axis] < kLimit,
                   "deform_conv2d: a dimension must have fewer than 2^31 cells");
    TRUNCDET_CHECK(s.kernel[axis] > 0 && s.kernel[axis] < kLimit && s.stride[axis] > 0 &&
                       s.stride[axis] < kLimit && s.padding[axis] >= 0 &&
                       s.padding[axis] < kLimit && s.dilation[axis] > 0 &&
                       s.dilation[axis] < kLimit,
                   "deform_conv2d: kernel, stride and dilation must be positive, padding must not "
                   "be negative");
  }
  s.groups = offset.size(1) / (2 * s.taps());
  TRUNCDET_CHECK(s.groups > 0 && offset.size(1) == 2 * s.groups * s.taps() &&
                     s.channels % s.groups == 0 && offset.size(0) == s.images,
                 "deform_conv2d: offset must have input's batch size and two channels a tap for "
                 "each of the groups that input's channels divide into");
  if (mask.has_value()) {
    TRUNCDET_CHECK(mask->size(0) == s.images && mask->size(1) == s.groups * s.taps() &&
                       mask->size(2) == offset.size(2) && mask->size(3) == offset.size(3),
                   "deform_conv2d: mask must have offset's shape with half its channels");
  }
  for (const Tensor* other : {&offset, mask.has_value() ? &*mask : &offset}) {
    TRUNCDET_CHECK(other->scalar_type() == input.scalar_type() &&
                       other->is_cuda() == input.is_cuda() &&
                       other->get_device_index() == input.get_device_index(),
                   "deform_conv2d: offset and mask must have input's dtype and device");
  }
  TRUNCDET_CHECK(s.headroom_bits() <= kMaxHeadroom, "deform_conv2d: an image must have at most 2^",
                 kMaxHeadroom, " samples");
  return s;
}

// A call's tensors, contiguous, and their shape.
struct DeformCall {
  DeformShape shape;
  Tensor input, offset;
  std::optional<Tensor> mask;

  DeformCall(const Tensor& i, const Tensor& o, const std::optional<Tensor>& m,
             const std::vector<int64_t>& geometry)
      : shape(deform_shape(i, o, m, geometry)),
        input(torch::stable::contiguous(i)),
        offset(torch::stable::contiguous(o)) {
    if (m.has_value()) mask = torch::stable::contiguous(*m);
  }

  template <class T>
  const T* mask_data() const {
    return mask.has_value() ? const_data<T>(*mask) : nullptr;
  }
  Tensor empty_columns() const {
    const int64_t sizes[4] = {shape.channels, shape.taps(), shape.images, shape.places()};
    return torch::stable::new_empty(input, {sizes, 4});
  }
  Tensor contiguous_grad(const Tensor& grad) const {
    TRUNCDET_CHECK(
        grad.dim() == 4 && grad.size(0) == shape.channels && grad.size(1) == shape.taps() &&
            grad.size(2) == shape.images && grad.size(3) == shape.places() &&
            grad.scalar_type() == input.scalar_type() && grad.is_cuda() == input.is_cuda() &&
            grad.get_device_index() == input.get_device_index(),
        "deform_conv2d: grad must have the columns' shape, dtype and device");
    return torch::stable::contiguous(grad);
  }
};

// The three gradients, to be filled; what is not asked for is an empty tensor.
struct DeformGradients {
  Tensor input, offset, mask;

  DeformGradients(const DeformCall& call, bool want_input, bool want_offset)
      : input(like(call.input, want_input)),
        offset(like(call.offset, want_offset)),
        mask(like(call.mask.has_value() ? *call.mask : call.offset,
                  want_offset && call.mask.has_value())) {}

  std::tuple<Tensor, Tensor, Tensor> as_tuple() const { return {input, offset, mask}; }

 private:
  static Tensor like(const Tensor& tensor, bool wanted) {
    const int64_t none = 0;
    if (!wanted) return torch::stable::new_empty(tensor, {&none, 1});
    return torch::stable::new_empty(tensor, tensor.sizes());
  }
};

}  // namespace truncdet
