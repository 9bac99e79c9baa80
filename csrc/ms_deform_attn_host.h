// What the CPU and the CUDA host functions of ms_deform_attn share: checks and dispatch.
#pragma once

#include "accumulate.h"
#include "checks.h"
#include "ms_deform_attn.h"

namespace truncdet {

inline MsDeformShape ms_deform_shape(const Tensor& value, const Tensor& spatial_shapes,
                                     const Tensor& level_start_index, const Tensor& locations,
                                     const Tensor& weights) {
  TRUNCDET_CHECK(value.dim() == 4 && locations.dim() == 6 && weights.dim() == 5,
                 "ms_deform_attn: value, sampling_locations and attention_weights must have 4, 6 "
                 "and 5 dimensions");
  const MsDeformShape shape{value.size(0),     value.size(1),     value.size(2),    value.size(3),
                            locations.size(1), locations.size(3), locations.size(4)};
  const int64_t sizes[6] = {shape.images, shape.queries, shape.heads,
                            shape.levels, shape.points,  2};
  for (int64_t d = 0; d < 6; ++d) {
    TRUNCDET_CHECK(locations.size(d) == sizes[d] && (d == 5 || weights.size(d) == sizes[d]),
                   "ms_deform_attn: sampling_locations and attention_weights must fit value");
  }
  for (const Tensor* index : {&spatial_shapes, &level_start_index}) {
    TRUNCDET_CHECK(index->scalar_type() == ScalarType::Long && index->dim() >= 1 &&
                       index->size(0) == shape.levels,
                   "ms_deform_attn: spatial_shapes and level_start_index must be int64, one row a "
                   "level");
  }
  TRUNCDET_CHECK(
      spatial_shapes.dim() == 2 && spatial_shapes.size(1) == 2 && level_start_index.dim() == 1,
      "ms_deform_attn: spatial_shapes must have shape [L, 2], level_start_index [L]");
  for (const Tensor* other : {&spatial_shapes, &level_start_index, &locations, &weights}) {
    TRUNCDET_CHECK(other->is_cuda() == value.is_cuda() &&
                       other->get_device_index() == value.get_device_index(),
                   "ms_deform_attn: all tensors must be on value's device");
  }
  const bool is_double = value.scalar_type() == ScalarType::Double;
  const ScalarType compute = is_double ? ScalarType::Double : ScalarType::Float;
  TRUNCDET_CHECK(
      locations.scalar_type() == weights.scalar_type() &&
          (locations.scalar_type() == compute || locations.scalar_type() == value.scalar_type()),
      "ms_deform_attn: sampling_locations and attention_weights must be of one dtype, "
      "value's or the one sums are computed in");
  TRUNCDET_CHECK(shape.headroom_bits() <= kMaxHeadroom,
                 "ms_deform_attn: a value must be sampled at most 2^", kMaxHeadroom, " times");
  return shape;
}

// A call's tensors, contiguous, and their shape.
struct MsDeformCall {
  MsDeformShape shape;
  Tensor value, spatial_shapes, level_start_index, locations, weights;

  MsDeformCall(const Tensor& v, const Tensor& shapes, const Tensor& starts, const Tensor& l,
               const Tensor& w)
      : shape(ms_deform_shape(v, shapes, starts, l, w)),
        value(torch::stable::contiguous(v)),
        spatial_shapes(torch::stable::contiguous(shapes)),
        level_start_index(torch::stable::contiguous(starts)),
        locations(torch::stable::contiguous(l)),
        weights(torch::stable::contiguous(w)) {}

  Tensor empty_output() const {
    const int64_t sizes[3] = {shape.images, shape.queries, shape.heads * shape.channels};
    return torch::stable::new_empty(value, {sizes, 3});
  }
};

// The three gradients, to be filled.
struct MsDeformGradients {
  Tensor value, locations, weights;

  explicit MsDeformGradients(const MsDeformCall& call)
      : value(torch::stable::new_empty(call.value, call.value.sizes())),
        locations(torch::stable::new_empty(call.locations, call.locations.sizes())),
        weights(torch::stable::new_empty(call.weights, call.weights.sizes())) {}
};

inline void check_grad(const Tensor& grad, const Tensor& value, const MsDeformShape& s) {
  TRUNCDET_CHECK(
      grad.dim() == 3 && grad.size(0) == s.images && grad.size(1) == s.queries &&
          grad.size(2) == s.heads * s.channels && grad.scalar_type() == value.scalar_type() &&
          grad.is_cuda() == value.is_cuda() && grad.get_device_index() == value.get_device_index(),
      "ms_deform_attn: grad must have the output's shape, dtype and device");
}

// Runs `...` with `scalar_t` and `location_t` standing for the types of values and of locations.
#define TRUNCDET_MS_DEFORM_DISPATCH(value, locations, ...)               \
  TRUNCDET_DISPATCH((value).scalar_type(), "ms_deform_attn", [&] {       \
    if ((locations).scalar_type() == (value).scalar_type()) {            \
      using location_t = scalar_t;                                       \
      __VA_ARGS__();                                                     \
    } else {                                                             \
      using location_t = typename ::truncdet::Format<scalar_t>::Compute; \
      __VA_ARGS__();                                                     \
    }                                                                    \
  })

}  // namespace truncdet
