// The gradient of rasterization on the CPU: the definition, read directly.
#include "../render_rasterize.h"
#include "vertex_sums.h"

namespace truncdet {
namespace {

template <class C>
struct Buffers {
  const C *grad, *grad_db;  // null: zeros
  const C *rast, *pos;
  const int32_t* tri;
};

// Calls f(row, component, contribution) for what every pixel adds.
template <class C, class F>
void each_contribution(const Buffers<C>& b, const RenderShape& s, F f) {
  for (int64_t at = 0; at < s.pixels(); ++at) {
    int32_t corner[kCorners];
    const Shown shown = find_corners(b.rast[4 * at + 3], b.tri, s, corner);
    TRUNCDET_CHECK(shown == Shown::kNothing || shown == Shown::kTriangle, "rasterize_gradient",
                   text_of(shown));
    if (shown == Shown::kNothing) continue;
    RasterGradient<C> grad{{}, {}, b.grad_db != nullptr};
    for (int i = 0; b.grad != nullptr && i < 2; ++i) grad.uv[i] = b.grad[4 * at + i];
    for (int i = 0; grad.any_db && i < 4; ++i) grad.db[i] = b.grad_db[4 * at + i];
    if (grad.is_zero()) continue;
    const int64_t row = at / s.width, image = row / s.height;
    int64_t rows[kCorners];
    C position[kCorners][kPositionSize], contribution[kCorners][kMoved];
    for (int k = 0; k < kCorners; ++k) {
      rows[k] = s.first_row(image) + corner[k];
      for (int i = 0; i < kPositionSize; ++i) {
        position[k][i] = b.pos[rows[k] * kPositionSize + i];
      }
    }
    if (!raster_contributions(position, pixel_place<C>(at - row * s.width, s.width),
                              pixel_place<C>(row - image * s.height, s.height), grad,
                              contribution)) {
      continue;
    }
    for (int k = 0; k < kCorners; ++k) {
      for (int m = 0; m < kMoved; ++m) f(rows[k], moved_component(m), contribution[k][m]);
    }
  }
}

template <class C>
void backward(const Buffers<C>& b, const RenderShape& s, C* out) {
  const KeepDenormals keep;
  VertexSums<C> sums(s.rows(), s.components, s.headroom_bits());
  each_contribution(b, s, [&](int64_t row, int, C value) { sums.see(row, value); });
  sums.start_adding();
  each_contribution(b, s, [&](int64_t row, int i, C value) { sums.add(row, i, value); });
  sums.finish(out);
}

Tensor backward_cpu(std::optional<Tensor> grad, std::optional<Tensor> grad_db, Tensor rast,
                    Tensor pos, Tensor tri) {
  const RenderShape shape = rasterize_shape(grad, grad_db, rast, pos, tri);
  for (Tensor* tensor : {&rast, &pos, &tri}) *tensor = torch::stable::contiguous(*tensor);
  for (std::optional<Tensor>* tensor : {&grad, &grad_db}) {
    if (tensor->has_value()) *tensor = torch::stable::contiguous(**tensor);
  }
  Tensor out = torch::stable::new_empty(pos, pos.sizes());
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    const auto data = [](const std::optional<Tensor>& tensor) {
      return tensor.has_value() ? const_data<C>(*tensor) : nullptr;
    };
    backward<C>({data(grad), data(grad_db), const_data<C>(rast), const_data<C>(pos),
                 const_data<int32_t>(tri)},
                shape, mutable_data<C>(out));
  };
  rast.scalar_type() == ScalarType::Double ? run(0.0) : run(0.f);
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("render_rasterize_backward", TORCH_BOX(&truncdet::backward_cpu));
}
