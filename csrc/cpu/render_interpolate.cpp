// interpolate on the CPU: the definition, read directly.
#include "../render_interpolate_host.h"
#include "vertex_sums.h"

#include <tuple>

namespace truncdet {
namespace {

// Fewest pixels worth a thread.
constexpr int64_t kGrain = 1 << 10;

template <class C>
struct Buffers {
  const C *attr, *rast, *rast_db;  // rast_db: null where there is none
  const int32_t* tri;
};

// A pixel that shows a triangle.
template <class C>
struct Seen {
  InterpolatedPixel<C> pixel;
  int64_t row[kCorners];  // of attr
};

template <class C>
bool see_pixel(const Buffers<C>& b, const RenderShape& s, int64_t at, Seen<C>* seen) {
  int32_t corner[kCorners];
  const C* rast = b.rast + 4 * at;
  const Shown shown = find_corners(rast[3], b.tri, s, corner);
  TRUNCDET_CHECK(shown == Shown::kNothing || shown == Shown::kTriangle, "interpolate",
                 text_of(shown));
  if (shown == Shown::kNothing) return false;
  seen->pixel = interpolated_pixel(rast, b.rast_db != nullptr ? b.rast_db + 4 * at : nullptr);
  for (int k = 0; k < kCorners; ++k) {
    seen->row[k] = s.first_row(at / s.image_pixels()) + corner[k];
  }
  return true;
}

template <class C>
void forward_pixels(const Buffers<C>& b, const RenderShape& s, const DiffAttrs& diff, C* out,
                    C* out_da) {
  torch::stable::parallel_for(0, s.pixels(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      Seen<C> seen;
      const bool shows = see_pixel(b, s, at, &seen);
      DiffCursor cursor(diff);
      for (int64_t i = 0; i < s.components; ++i) {
        C a[kCorners] = {};
        for (int k = 0; shows && k < kCorners; ++k) a[k] = b.attr[seen.row[k] * s.components + i];
        out[at * s.components + i] =
            shows ? narrow<C>(interpolated_value(seen.pixel, a[0], a[1], a[2])) : C(0);
        const int64_t position = cursor.position(i);
        if (position < 0) continue;
        for (int axis = 0; axis < 2; ++axis) {
          out_da[2 * (at * diff.count + position) + axis] =
              shows ? narrow<C>(interpolated_slope(seen.pixel, axis, a[0], a[1], a[2])) : C(0);
        }
      }
    }
  });
}

template <class C>
struct Gradients {
  const C *out, *out_da;     // out_da: null where there is none
  C *attr, *rast, *rast_db;  // null where not asked for
};

// Calls f(attribute, gradient, gradients of its differentials or null) in ascending order.
template <class C, class F>
void each_attribute(const Gradients<C>& g, const RenderShape& s, const DiffAttrs& diff, int64_t at,
                    F f) {
  DiffCursor cursor(diff);
  for (int64_t i = 0; i < s.components; ++i) {
    const int64_t position = cursor.position(i);
    f(i, g.out[at * s.components + i],
      position < 0 ? nullptr : g.out_da + 2 * (at * diff.count + position));
  }
}

template <class C>
void backward_pixels(const Buffers<C>& b, const RenderShape& s, const DiffAttrs& diff,
                     const Gradients<C>& g) {
  torch::stable::parallel_for(0, s.pixels(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      Seen<C> seen;
      PixelGradient<C> sum;
      if (see_pixel(b, s, at, &seen)) {
        each_attribute(g, s, diff, at, [&](int64_t i, C grad, const C* slopes) {
          const auto a = [&](int k) { return b.attr[seen.row[k] * s.components + i]; };
          sum.add(grad, slopes, a(0), a(1), a(2));
        });
      }
      for (int i = 0; i < 4; ++i) {
        if (g.rast != nullptr) g.rast[4 * at + i] = i < 2 ? narrow<C>(sum.uv[i]) : C(0);
        if (g.rast_db != nullptr) g.rast_db[4 * at + i] = narrow<C>(sum.db[i]);
      }
    }
  });
}

template <class C>
void backward_vertices(const Buffers<C>& b, const RenderShape& s, const DiffAttrs& diff,
                       const Gradients<C>& g) {
  const KeepDenormals keep;
  VertexSums<C> sums(s.rows(), s.components, s.headroom_bits());
  const auto each_contribution = [&](auto f) {
    for (int64_t at = 0; at < s.pixels(); ++at) {
      Seen<C> seen;
      if (!see_pixel(b, s, at, &seen)) continue;
      each_attribute(g, s, diff, at, [&](int64_t i, C grad, const C* slopes) {
        C contribution[kCorners];
        interpolated_contributions(seen.pixel, grad, slopes, contribution);
        for (int k = 0; k < kCorners; ++k) f(seen.row[k], i, contribution[k]);
      });
    }
  };
  each_contribution([&](int64_t row, int64_t, C value) { sums.see(row, value); });
  sums.start_adding();
  each_contribution([&](int64_t row, int64_t i, C value) { sums.add(row, i, value); });
  sums.finish(g.attr);
}

template <class C>
Buffers<C> buffers(const Tensor& attr, const Tensor& rast, const Tensor& tri,
                   const std::optional<Tensor>& rast_db) {
  return {const_data<C>(attr), const_data<C>(rast),
          rast_db.has_value() ? const_data<C>(*rast_db) : nullptr, const_data<int32_t>(tri)};
}

void make_contiguous(std::initializer_list<Tensor*> tensors) {
  for (Tensor* tensor : tensors) *tensor = torch::stable::contiguous(*tensor);
}

std::tuple<Tensor, Tensor> forward_cpu(Tensor attr, Tensor rast, Tensor tri,
                                       std::optional<Tensor> rast_db, std::vector<int64_t> attrs) {
  const RenderShape shape = interpolate_shape(attr, rast, tri, rast_db, attrs);
  const DiffAttrs diff = diff_attrs(attrs, shape.components);
  make_contiguous({&attr, &rast, &tri});
  if (rast_db.has_value()) make_contiguous({&*rast_db});
  Tensor out = new_like_rast(rast, shape.components), out_da = new_like_rast(rast, 2 * diff.count);
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    forward_pixels(buffers<C>(attr, rast, tri, rast_db), shape, diff, mutable_data<C>(out),
                   mutable_data<C>(out_da));
  };
  rast.scalar_type() == ScalarType::Double ? run(0.0) : run(0.f);
  return {out, out_da};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(Tensor grad, Tensor grad_da, Tensor attr,
                                                Tensor rast, Tensor tri,
                                                std::optional<Tensor> rast_db,
                                                std::vector<int64_t> attrs, bool for_attr,
                                                bool for_rast, bool for_db) {
  const RenderShape shape = interpolate_shape(attr, rast, tri, rast_db, attrs);
  const DiffAttrs diff = diff_attrs(attrs, shape.components);
  check_beside("interpolate", "grad", grad, rast, shape.components);
  check_beside("interpolate", "grad_da", grad_da, rast, 2 * diff.count);
  make_contiguous({&grad, &grad_da, &attr, &rast, &tri});
  if (rast_db.has_value()) make_contiguous({&*rast_db});
  Tensor attr_gradient = gradient_of(attr, for_attr);
  Tensor rast_gradient = new_like_rast(rast, 4, for_rast);
  Tensor db_gradient = new_like_rast(rast, 4, for_db);
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    const auto b = buffers<C>(attr, rast, tri, rast_db);
    const Gradients<C> g{const_data<C>(grad), const_data<C>(grad_da),
                         for_attr ? mutable_data<C>(attr_gradient) : nullptr,
                         for_rast ? mutable_data<C>(rast_gradient) : nullptr,
                         for_db ? mutable_data<C>(db_gradient) : nullptr};
    if (for_rast || for_db) backward_pixels(b, shape, diff, g);
    if (for_attr) backward_vertices(b, shape, diff, g);
  };
  rast.scalar_type() == ScalarType::Double ? run(0.0) : run(0.f);
  return {attr_gradient, rast_gradient, db_gradient};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("render_interpolate", TORCH_BOX(&truncdet::forward_cpu));
  m.impl("render_interpolate_backward", TORCH_BOX(&truncdet::backward_cpu));
}
