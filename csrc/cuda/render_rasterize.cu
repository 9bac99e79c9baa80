// The gradient of rasterization on the GPU: two passes over the pixels, a thread a pixel.
#include "../render_rasterize.h"
#include "render_vertex.cuh"

namespace truncdet {
namespace {

template <class C>
struct RasterizeParams {
  RenderShape shape;
  PixelTiles tiles;
  const C *grad, *grad_db;  // null: zeros
  const C *rast, *pos;
  const int32_t* tri;
  unsigned* sticky;
  VertexSums<C> sums;
};

// One thread's pixel: what it adds, if anything.
template <class C>
struct RasterPixel {
  bool adds;
  int64_t row[kCorners];
  uint64_t triangle;
  C contribution[kCorners][kMoved];
};

template <class C>
__device__ __forceinline__ RasterPixel<C> raster_pixel(const RasterizeParams<C>& p,
                                                       const TilePixel& at) {
  RasterPixel<C> pixel{};
  if (!at.inside) return pixel;
  const C number = p.rast[4 * at.index + 3];
  int32_t corner[kCorners];
  const Shown shown = find_corners(number, p.tri, p.shape, corner);
  if (shown != Shown::kTriangle) {
    if (shown != Shown::kNothing) set_sticky(p.sticky, kStickyRasterizeGradient);
    return pixel;
  }
  RasterGradient<C> grad{{}, {}, p.grad_db != nullptr};
  if (p.grad != nullptr) {
    C loaded[4];
    load_four(p.grad + 4 * at.index, loaded);
    grad.uv[0] = loaded[0];
    grad.uv[1] = loaded[1];
  }
  if (grad.any_db) load_four(p.grad_db + 4 * at.index, grad.db);
  if (grad.is_zero()) return pixel;
  C position[kCorners][kPositionSize];
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    pixel.row[k] = p.shape.first_row(at.image) + corner[k];
    load_four(p.pos + kPositionSize * pixel.row[k], position[k]);
  }
  pixel.triangle = static_cast<uint64_t>(number);
  pixel.adds = raster_contributions(position, pixel_place<C>(at.x, p.tiles.width),
                                    pixel_place<C>(at.y, p.tiles.height), grad, pixel.contribution);
  if (!pixel.adds) return RasterPixel<C>{};
  return pixel;
}

template <class C>
__global__ void __launch_bounds__(kThreads) measure_kernel(RasterizeParams<C> p) {
  clear_flags(p.sums);
  for (int64_t tile = blockIdx.x; tile < p.tiles.total; tile += gridDim.x) {
    const RasterPixel<C> pixel = raster_pixel(p, tile_pixel(p.tiles, tile));
    if (!__any_sync(kAllLanes, pixel.adds)) continue;
    const WarpGroup group(pixel.adds, pixel.triangle);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      LargestContribution<C> largest;
#pragma unroll
      for (int m = 0; m < kMoved; ++m) largest.see(pixel.contribution[k][m]);
      merge_largest(p.sums, group, pixel.row[k], largest);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads) add_kernel(RasterizeParams<C> p) {
  for (int64_t tile = blockIdx.x; tile < p.tiles.total; tile += gridDim.x) {
    const RasterPixel<C> pixel = raster_pixel(p, tile_pixel(p.tiles, tile));
    if (!__any_sync(kAllLanes, pixel.adds)) continue;
    const WarpGroup group(pixel.adds, pixel.triangle);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const Quantiser<C> quantiser = p.sums.quantiser(pixel.row[k]);
#pragma unroll
      for (int m = 0; m < kMoved; ++m) {
        add_contribution(p.sums, group, pixel.row[k] * kPositionSize + moved_component(m),
                         quantiser, pixel.contribution[k][m]);
      }
    }
  }
}

template <class C>
void launch_backward(const std::optional<Tensor>& grad, const std::optional<Tensor>& grad_db,
                     const Tensor& rast, const Tensor& pos, const Tensor& tri, const RenderShape& s,
                     const Tensor& out) {
  const cudaStream_t stream = current_stream(rast);
  const int64_t bytes = VertexSums<C>::bytes(s.rows(), s.components);
  const Tensor memory = new_bytes(out, bytes);
  TRUNCDET_CUDA_CHECK(
      cudaMemsetAsync(memory.mutable_data_ptr(), 0, static_cast<size_t>(bytes), stream));
  const auto data = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? const_data<C>(*tensor) : nullptr;
  };
  const RasterizeParams<C> params{
      s,
      PixelTiles(s.images, s.height, s.width),
      data(grad),
      data(grad_db),
      const_data<C>(rast),
      const_data<C>(pos),
      const_data<int32_t>(tri),
      sticky_word(),
      VertexSums<C>(memory.mutable_data_ptr(), s.rows(), s.components, s.headroom_bits(), out)};
  if (s.pixels() > 0 && s.rows() > 0) {
    measure_kernel<C><<<params.tiles.blocks(), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
    add_kernel<C><<<params.tiles.blocks(), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  }
  launch_vertex_finish<C>(params.sums, s.components, out, stream);
}

Tensor backward_cuda(std::optional<Tensor> grad, std::optional<Tensor> grad_db, Tensor rast,
                     Tensor pos, Tensor tri) {
  const RenderShape shape = rasterize_shape(grad, grad_db, rast, pos, tri);
  const DeviceGuard guard(rast.get_device_index());
  rast = torch::stable::contiguous(rast);
  tri = torch::stable::contiguous(tri);
  pos = packed(pos);
  for (std::optional<Tensor>* tensor : {&grad, &grad_db}) {
    if (tensor->has_value()) *tensor = packed(**tensor);
  }
  Tensor out = torch::stable::new_empty(pos, pos.sizes());
  if (rast.scalar_type() == ScalarType::Double) {
    launch_backward<double>(grad, grad_db, rast, pos, tri, shape, out);
  } else {
    launch_backward<float>(grad, grad_db, rast, pos, tri, shape, out);
  }
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("render_rasterize_backward", TORCH_BOX(&truncdet::backward_cuda));
}
