// What the CPU and the CUDA host functions of interpolate share.
#pragma once

#include <algorithm>
#include <vector>

#include "render_interpolate.h"

namespace truncdet {

inline DiffAttrs diff_attrs(const std::vector<int64_t>& given, int64_t attributes) {
  const auto count = static_cast<int64_t>(given.size());
  DiffAttrs diff{count, count == attributes, {}, {}};
  for (int64_t i = 0; i < count; ++i) {
    TRUNCDET_CHECK(given[i] >= 0 && given[i] < attributes,
                   "interpolate: diff_attrs must be in [0, ", attributes, "), got ", given[i]);
    diff.all = diff.all && given[i] == i;
  }
  if (diff.all) return diff;
  TRUNCDET_CHECK(count <= kMaxDiffAttrs, "interpolate: diff_attrs must have at most ",
                 kMaxDiffAttrs, " entries, or be all in order, got ", count);
  std::vector<int32_t> order(given.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return given[a] < given[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    diff.attribute[i] = static_cast<int32_t>(given[order[i]]);
    diff.position[i] = order[i];
    TRUNCDET_CHECK(i == 0 || diff.attribute[i] != diff.attribute[i - 1],
                   "interpolate: diff_attrs must name an attribute once, got ", diff.attribute[i],
                   " twice");
  }
  return diff;
}

// Checks what is beside attr and tri; differentials are asked for together with rast_db alone.
inline RenderShape interpolate_shape(const Tensor& attr, const Tensor& rast, const Tensor& tri,
                                     const std::optional<Tensor>& rast_db,
                                     const std::vector<int64_t>& diff) {
  const RenderShape shape = render_shape("interpolate", rast, tri, attr);
  if (rast_db.has_value()) check_beside("interpolate", "rast_db", *rast_db, rast, 4);
  TRUNCDET_CHECK(rast_db.has_value() || diff.empty(),
                 "interpolate: diff_attrs must be empty without rast_db");
  return shape;
}

// A contiguous gradient of `tensor`, or an empty stand-in where none is asked for.
inline Tensor gradient_of(const Tensor& tensor, bool wanted) {
  const int64_t none = 0;
  if (!wanted) return torch::stable::new_empty(tensor, {&none, 1});
  return torch::stable::new_empty(tensor, tensor.sizes());
}

inline Tensor new_like_rast(const Tensor& rast, int64_t last, bool wanted = true) {
  const int64_t none = 0, sizes[4] = {rast.size(0), rast.size(1), rast.size(2), last};
  if (!wanted) return torch::stable::new_empty(rast, {&none, 1});
  return torch::stable::new_empty(rast, {sizes, 4});
}

}  // namespace truncdet
