// interpolate on the GPU: a thread a pixel, no atomics but for the gradient of the attributes.
//
// That gradient takes two passes over the pixels, of which the first also writes the gradients of
// the buffers, since it reads the same values.
#include "../render_interpolate_host.h"
#include "render_vertex.cuh"

#include <tuple>

namespace truncdet {
namespace {

template <class C>
struct InterpolateParams {
  RenderShape shape;
  PixelTiles tiles;
  const C *attr, *rast, *rast_db;  // rast_db: null where there is none
  const int32_t* tri;
  unsigned* sticky;
  // Of the forward.
  C *out, *out_da;
  // Of the backward; null where not asked for.
  const C *grad, *grad_da;
  C *rast_gradient, *db_gradient;
  VertexSums<C> sums;
  DiffAttrs diff;
};

// One thread's pixel; nothing is read where it shows no triangle.
template <class C>
struct SeenPixel {
  bool shows;
  InterpolatedPixel<C> pixel;
  int64_t row[kCorners];
  uint64_t triangle;  // of this image: the same triangle of another image has other rows
};

template <class C>
__device__ __forceinline__ SeenPixel<C> see_pixel(const InterpolateParams<C>& p,
                                                  const TilePixel& at) {
  SeenPixel<C> seen{};
  if (!at.inside) return seen;
  C rast[4], db[4];
  load_four(p.rast + 4 * at.index, rast);
  int32_t corner[kCorners];
  const Shown shown = find_corners(rast[3], p.tri, p.shape, corner);
  seen.shows = shown == Shown::kTriangle;
  if (!seen.shows) {
    if (shown != Shown::kNothing) set_sticky(p.sticky, kStickyRenderInterpolate);
    return seen;
  }
  if (p.rast_db != nullptr) load_four(p.rast_db + 4 * at.index, db);
  seen.pixel = interpolated_pixel<C>(rast, p.rast_db != nullptr ? db : nullptr);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) seen.row[k] = p.shape.first_row(at.image) + corner[k];
  seen.triangle = static_cast<uint64_t>(rast[3]);
  return seen;
}

template <class C>
__global__ void __launch_bounds__(kThreads) forward_kernel(InterpolateParams<C> p) {
  const int64_t attributes = p.shape.components;
  for (int64_t tile = blockIdx.x; tile < p.tiles.total; tile += gridDim.x) {
    const TilePixel at = tile_pixel(p.tiles, tile);
    if (!at.inside) continue;
    const SeenPixel<C> seen = see_pixel(p, at);
    DiffCursor cursor(p.diff);
    for (int64_t i = 0; i < attributes; ++i) {
      C a[kCorners] = {};
      if (seen.shows) {
#pragma unroll
        for (int k = 0; k < kCorners; ++k) a[k] = p.attr[seen.row[k] * attributes + i];
      }
      p.out[at.index * attributes + i] =
          seen.shows ? narrow<C>(interpolated_value(seen.pixel, a[0], a[1], a[2])) : C(0);
      const int64_t position = cursor.position(i);
      if (position < 0) continue;
#pragma unroll
      for (int axis = 0; axis < 2; ++axis) {
        p.out_da[2 * (at.index * p.diff.count + position) + axis] =
            seen.shows ? narrow<C>(interpolated_slope(seen.pixel, axis, a[0], a[1], a[2])) : C(0);
      }
    }
  }
}

// Calls f(attribute, gradient, gradients of its differentials or null) in ascending order, zeros
// where the pixel shows nothing.
template <class C, class F>
__device__ __forceinline__ void each_attribute(const InterpolateParams<C>& p, int64_t pixel,
                                               bool shows, F f) {
  DiffCursor cursor(p.diff);
  for (int64_t i = 0; i < p.shape.components; ++i) {
    const int64_t position = cursor.position(i);
    const C grad = shows ? p.grad[pixel * p.shape.components + i] : C(0);
    C slopes[2] = {C(0), C(0)};
    if (position >= 0 && shows) {
      const C* from = p.grad_da + 2 * (pixel * p.diff.count + position);
      slopes[0] = from[0];
      slopes[1] = from[1];
    }
    f(i, grad, position >= 0 ? slopes : nullptr);
  }
}

// The first pass: what is complete in one pixel, and the largest contribution to each vertex.
template <class C, bool kVertices, bool kPixels>
__global__ void __launch_bounds__(kThreads) measure_kernel(InterpolateParams<C> p) {
  if (kVertices) clear_flags(p.sums);
  for (int64_t tile = blockIdx.x; tile < p.tiles.total; tile += gridDim.x) {
    const TilePixel at = tile_pixel(p.tiles, tile);
    const SeenPixel<C> seen = see_pixel(p, at);
    PixelGradient<C> sum;
    if (__any_sync(kAllLanes, seen.shows)) {
      LargestContribution<C> largest[kCorners];
      each_attribute(p, at.index, seen.shows, [&](int64_t i, C grad, const C* slopes) {
        if (kVertices) {
          C contribution[kCorners];
          interpolated_contributions(seen.pixel, grad, slopes, contribution);
#pragma unroll
          for (int k = 0; k < kCorners; ++k) largest[k].see(contribution[k]);
        }
        if (kPixels && seen.shows) {
          const auto a = [&](int k) { return p.attr[seen.row[k] * p.shape.components + i]; };
          sum.add(grad, slopes, a(0), a(1), a(2));
        }
      });
      if (kVertices) {
        const WarpGroup group(seen.shows, seen.triangle);
#pragma unroll
        for (int k = 0; k < kCorners; ++k) merge_largest(p.sums, group, seen.row[k], largest[k]);
      }
    }
    if (!kPixels || !at.inside) continue;
    if (p.rast_gradient != nullptr) {
      const C uv[4] = {narrow<C>(sum.uv[0]), narrow<C>(sum.uv[1]), C(0), C(0)};
      store_four(uv, p.rast_gradient + 4 * at.index);
    }
    if (p.db_gradient != nullptr) {
      C db[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) db[i] = narrow<C>(sum.db[i]);
      store_four(db, p.db_gradient + 4 * at.index);
    }
  }
}

// The second pass.
template <class C>
__global__ void __launch_bounds__(kThreads) add_kernel(InterpolateParams<C> p) {
  for (int64_t tile = blockIdx.x; tile < p.tiles.total; tile += gridDim.x) {
    const TilePixel at = tile_pixel(p.tiles, tile);
    const SeenPixel<C> seen = see_pixel(p, at);
    if (!__any_sync(kAllLanes, seen.shows)) continue;
    const WarpGroup group(seen.shows, seen.triangle);
    const Quantiser<C> quantiser[kCorners] = {p.sums.quantiser(seen.row[0]),
                                              p.sums.quantiser(seen.row[1]),
                                              p.sums.quantiser(seen.row[2])};
    each_attribute(p, at.index, seen.shows, [&](int64_t i, C grad, const C* slopes) {
      C contribution[kCorners];
      interpolated_contributions(seen.pixel, grad, slopes, contribution);
#pragma unroll
      for (int k = 0; k < kCorners; ++k) {
        add_contribution(p.sums, group, seen.row[k] * p.shape.components + i, quantiser[k],
                         contribution[k]);
      }
    });
  }
}

template <class C>
InterpolateParams<C> make_params(const RenderShape& shape, const DiffAttrs& diff,
                                 const Tensor& attr, const Tensor& rast, const Tensor& tri,
                                 const std::optional<Tensor>& rast_db) {
  return {shape,
          PixelTiles(shape.images, shape.height, shape.width),
          const_data<C>(attr),
          const_data<C>(rast),
          rast_db.has_value() ? const_data<C>(*rast_db) : nullptr,
          const_data<int32_t>(tri),
          sticky_word(),
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          {},
          diff};
}

std::tuple<Tensor, Tensor> forward_cuda(Tensor attr, Tensor rast, Tensor tri,
                                        std::optional<Tensor> rast_db, std::vector<int64_t> attrs) {
  const RenderShape shape = interpolate_shape(attr, rast, tri, rast_db, attrs);
  const DiffAttrs diff = diff_attrs(attrs, shape.components);
  const DeviceGuard guard(rast.get_device_index());
  attr = torch::stable::contiguous(attr);
  tri = torch::stable::contiguous(tri);
  rast = packed(rast);
  if (rast_db.has_value()) rast_db = packed(*rast_db);
  Tensor out = new_like_rast(rast, shape.components), out_da = new_like_rast(rast, 2 * diff.count);
  if (shape.pixels() == 0) return {out, out_da};
  const cudaStream_t stream = current_stream(rast);
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    InterpolateParams<C> params = make_params<C>(shape, diff, attr, rast, tri, rast_db);
    params.out = mutable_data<C>(out);
    params.out_da = mutable_data<C>(out_da);
    forward_kernel<C><<<params.tiles.blocks(), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  };
  rast.scalar_type() == ScalarType::Double ? run(0.0) : run(0.f);
  return {out, out_da};
}

template <class C>
void launch_backward(InterpolateParams<C> params, const Tensor& attr_gradient, bool for_attr,
                     cudaStream_t stream) {
  const RenderShape& s = params.shape;
  const unsigned blocks = params.tiles.blocks();
  const bool for_pixels = params.rast_gradient != nullptr || params.db_gradient != nullptr;
  if (!for_attr) {
    if (s.pixels() == 0 || !for_pixels) return;
    measure_kernel<C, false, true><<<blocks, kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
    return;
  }
  const int64_t bytes = VertexSums<C>::bytes(s.rows(), s.components);
  const Tensor memory = new_bytes(attr_gradient, bytes);
  params.sums = VertexSums<C>(memory.mutable_data_ptr(), s.rows(), s.components, s.headroom_bits(),
                              attr_gradient);
  TRUNCDET_CUDA_CHECK(
      cudaMemsetAsync(memory.mutable_data_ptr(), 0, static_cast<size_t>(bytes), stream));
  if (s.pixels() > 0) {
    if (for_pixels) {
      measure_kernel<C, true, true><<<blocks, kThreads, 0, stream>>>(params);
    } else {
      measure_kernel<C, true, false><<<blocks, kThreads, 0, stream>>>(params);
    }
    TRUNCDET_LAUNCH_CHECK();
    if (params.sums.cells > 0) {
      add_kernel<C><<<blocks, kThreads, 0, stream>>>(params);
      TRUNCDET_LAUNCH_CHECK();
    }
  }
  launch_vertex_finish<C>(params.sums, s.components, attr_gradient, stream);
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(Tensor grad, Tensor grad_da, Tensor attr,
                                                 Tensor rast, Tensor tri,
                                                 std::optional<Tensor> rast_db,
                                                 std::vector<int64_t> attrs, bool for_attr,
                                                 bool for_rast, bool for_db) {
  const RenderShape shape = interpolate_shape(attr, rast, tri, rast_db, attrs);
  const DiffAttrs diff = diff_attrs(attrs, shape.components);
  check_beside("interpolate", "grad", grad, rast, shape.components);
  check_beside("interpolate", "grad_da", grad_da, rast, 2 * diff.count);
  const DeviceGuard guard(rast.get_device_index());
  for (Tensor* tensor : {&grad, &grad_da, &attr, &tri}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  rast = packed(rast);
  if (rast_db.has_value()) rast_db = packed(*rast_db);
  Tensor attr_gradient = gradient_of(attr, for_attr);
  Tensor rast_gradient = new_like_rast(rast, 4, for_rast);
  Tensor db_gradient = new_like_rast(rast, 4, for_db);
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    InterpolateParams<C> params = make_params<C>(shape, diff, attr, rast, tri, rast_db);
    params.grad = const_data<C>(grad);
    params.grad_da = const_data<C>(grad_da);
    params.rast_gradient = for_rast ? mutable_data<C>(rast_gradient) : nullptr;
    params.db_gradient = for_db ? mutable_data<C>(db_gradient) : nullptr;
    launch_backward<C>(params, attr_gradient, for_attr, current_stream(rast));
  };
  rast.scalar_type() == ScalarType::Double ? run(0.0) : run(0.f);
  return {attr_gradient, rast_gradient, db_gradient};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("render_interpolate", TORCH_BOX(&truncdet::forward_cuda));
  m.impl("render_interpolate_backward", TORCH_BOX(&truncdet::backward_cuda));
}
