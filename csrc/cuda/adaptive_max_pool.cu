// The gradient of adaptive max pooling on CUDA. A block owns a band of cells of one plane: it fills
// the band with zeros, and then the first of the outputs that chose a cell of the band writes the
// sum of them all. Nothing is written by two threads.
#include "../adaptive_max_pool.h"
#include "launch.cuh"

namespace truncdet {
namespace {

// Most cells of a band: enough to hide the walk over the outputs behind the filling.
constexpr int64_t kBand = 1 << 14;

template <class T>
struct MaxPoolParams {
  MaxPoolShape shape;
  const T* grad;
  const int64_t* indices;
  T* out;
  int64_t bands, band;  // of a plane; cells of a band
};

// Zeros for [begin, end), 16 bytes at a time where the address allows it.
template <class T>
__device__ void fill_zeros(T* begin, T* end) {
  constexpr int64_t kStep = 16 / sizeof(T);
  const int64_t skew = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) / sizeof(T)) % kStep;
  T* aligned = begin + (skew == 0 ? 0 : kStep - skew);
  if (aligned > end) aligned = end;
  const int64_t quads = (end - aligned) / kStep;
  for (T* at = begin + threadIdx.x; at < aligned; at += kThreads) *at = T{};
  for (int64_t i = threadIdx.x; i < quads; i += kThreads) {
    reinterpret_cast<uint4*>(aligned)[i] = make_uint4(0, 0, 0, 0);
  }
  for (T* at = aligned + quads * kStep + threadIdx.x; at < end; at += kThreads) *at = T{};
}

// The sum for the cell output (y, x) chose, if that is a cell of its window and no earlier output
// chose it too.
template <class T, class C>
__device__ bool owns_choice(const MaxPoolShape& s, const T* grad, const int64_t* indices, int32_t y,
                            int32_t x, int64_t cell, C* sum) {
  const OutputRange rows = s.outputs_of(0, static_cast<int32_t>(cell / s.in[1]));
  const OutputRange columns = s.outputs_of(1, static_cast<int32_t>(cell % s.in[1]));
  if (!contains(rows, y) || !contains(columns, x)) return false;
  *sum = C(0);
  for (int32_t r = rows.first; r < rows.last; ++r) {
    for (int32_t c = columns.first; c < columns.last; ++c) {
      const int64_t o = int64_t(r) * s.out[1] + c;
      if (indices[o] != cell) continue;
      if (r < y || (r == y && c < x)) return false;
      *sum = *sum + widen(grad[o]);
    }
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(kThreads) max_pool_backward_kernel(MaxPoolParams<T> p) {
  using C = typename Format<T>::Compute;
  const MaxPoolShape& s = p.shape;
  const int64_t cells = s.cells();
  for (int64_t item = blockIdx.x; item < s.planes * p.bands; item += gridDim.x) {
    const int64_t plane = item / p.bands, begin = item % p.bands * p.band;
    if (begin >= cells) continue;  // the same for all threads of the block
    const int64_t end = begin + p.band < cells ? begin + p.band : cells;
    T* out = p.out + plane * cells;
    fill_zeros(out + begin, out + end);
    __syncthreads();  // after it the block's zeros are written for each of its threads
    const T* grad = p.grad + plane * s.outputs();
    const int64_t* indices = p.indices + plane * s.outputs();
    // Only windows of the band's rows can have chosen one of its cells.
    const int32_t first = s.outputs_of(0, static_cast<int32_t>(begin / s.in[1])).first;
    const int32_t last = s.outputs_of(0, static_cast<int32_t>((end - 1) / s.in[1])).last;
    for (int64_t o = int64_t(first) * s.out[1] + threadIdx.x; o < int64_t(last) * s.out[1];
         o += kThreads) {
      const int64_t cell = indices[o];
      C sum;
      if (cell >= begin && cell < end &&
          owns_choice(s, grad, indices, static_cast<int32_t>(o / s.out[1]),
                      static_cast<int32_t>(o % s.out[1]), cell, &sum)) {
        out[cell] = narrow<T>(sum);
      }
    }
  }
}

template <class T>
void run(const Tensor& grad, const Tensor& indices, const Tensor& out, const MaxPoolShape& shape) {
  MaxPoolParams<T> params{
      shape, const_data<T>(grad), const_data<int64_t>(indices), mutable_data<T>(out), 0, 0};
  params.bands = (shape.cells() + kBand - 1) / kBand;
  params.band = (shape.cells() + params.bands - 1) / params.bands;
  const unsigned blocks = blocks_for(shape.planes * params.bands, 1);
  max_pool_backward_kernel<T><<<blocks, kThreads, 0, current_stream(grad)>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

Tensor max_pool_backward_cuda(Tensor grad, Tensor indices, int64_t height, int64_t width) {
  const MaxPoolShape shape = max_pool_shape(grad, indices, height, width);
  const DeviceGuard guard(grad.get_device_index());
  Tensor out = empty_planes(grad, shape);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "_max_pool_backward",
                    [&] { run<scalar_t>(grad, indices, out, shape); });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_max_pool_backward", TORCH_BOX(&truncdet::max_pool_backward_cuda));
}
