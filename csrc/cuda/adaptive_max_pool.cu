// The gradient of adaptive max pooling on CUDA. A block owns a band of cells of one plane: it fills
// the band with zeros, and then the first of the outputs that chose a cell of the band writes the
// sum of them all. Nothing is written by two threads.
#include "../adaptive_max_pool.h"
#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {
namespace {

// Most cells of a band: few enough that a multiprocessor holds several, some of which fill theirs
// while others wait for what they have loaded.
constexpr int64_t kBand = 1 << 13;
// Outputs of a band that a block keeps in shared memory, and how many of them each thread loads.
constexpr int kLoads = 2;
constexpr int kKept = kLoads * kThreads;

template <class T>
struct MaxPoolParams {
  MaxPoolShape shape;
  const T* grad;
  const int64_t* indices;
  T* out;
  int64_t bands, band;  // of a plane; cells of a band
  Divider by_bands, by_height, by_width, by_columns;

  // MaxPoolShape::outputs_of with a multiplication in place of the division; Index counts the
  // cells of a plane.
  template <class Index>
  __device__ __forceinline__ OutputRange outputs_of(int axis, int32_t cell) const {
    const Divider& by = axis == 0 ? by_height : by_width;
    const Index in = shape.in[axis], out = shape.out[axis];
    return {static_cast<int32_t>(quotient(by, cell * out)),
            static_cast<int32_t>(quotient(by, (cell + Index(1)) * out + in - 1))};
  }
  static __device__ __forceinline__ int32_t quotient(const Divider& by, int32_t number) {
    return static_cast<int32_t>(by.small_quotient(static_cast<uint32_t>(number)));
  }
  static __device__ __forceinline__ int64_t quotient(const Divider& by, int64_t number) {
    return by.quotient(number);
  }
};

// Zeros for [begin, end), 16 bytes at a time where the address allows it. Most stay as they are, so
// no cache need keep them.
template <class T>
__device__ __forceinline__ void fill_zeros(T* begin, T* end) {
  constexpr int kStep = 16 / sizeof(T);
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(begin) / sizeof(T) % kStep);
  T* aligned = begin + (skew == 0 ? 0 : kStep - skew);
  if (aligned > end) aligned = end;
  const int quads = static_cast<int>(end - aligned) / kStep;
  for (T* at = begin + threadIdx.x; at < aligned; at += kThreads) *at = T{};
  uint4* const packs = reinterpret_cast<uint4*>(aligned);
#pragma unroll 4
  for (int i = threadIdx.x; i < quads; i += kThreads) __stcs(packs + i, make_uint4(0, 0, 0, 0));
  for (T* at = aligned + quads * kStep + threadIdx.x; at < end; at += kThreads) *at = T{};
}

// The sum for the cell output o chose, if that is a cell of its window and no earlier output chose
// it too. choice(o) and value(o) are what an output chose and its gradient.
template <class T, class C, class Index, class Choice, class Value>
__device__ __forceinline__ bool owns_choice(const MaxPoolParams<T>& p, Index o, Index cell,
                                            const Choice& choice, const Value& value, C* sum) {
  const Index row = p.quotient(p.by_width, cell), y = p.quotient(p.by_columns, o);
  const int32_t column = static_cast<int32_t>(cell - row * p.shape.in[1]);
  const OutputRange rows = p.template outputs_of<Index>(0, static_cast<int32_t>(row));
  const OutputRange columns = p.template outputs_of<Index>(1, column);
  if (!contains(rows, static_cast<int32_t>(y)) ||
      !contains(columns, static_cast<int32_t>(o - y * p.shape.out[1]))) {
    return false;
  }
  *sum = C(0);
  for (int32_t r = rows.first; r < rows.last; ++r) {
    for (int32_t c = columns.first; c < columns.last; ++c) {
      const Index other = Index(r) * p.shape.out[1] + c;
      if (choice(other) != cell) continue;
      if (other < o) return false;
      *sum = *sum + value(other);
    }
  }
  return true;
}

// A band whose outputs fit in shared memory, of a small plane. They are under way while the zeros
// are written.
template <class T>
__device__ __forceinline__ void write_band(const MaxPoolParams<T>& p, T* out, const T* grad,
                                           const int64_t* indices, int cells, int32_t begin,
                                           int32_t first, int number) {
  using C = typename Format<T>::Compute;
  __shared__ int32_t chosen[kKept];  // -1: none of the band's cells
  __shared__ T values[kKept];
  int64_t loaded[kLoads];
  T grads[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int o = threadIdx.x + k * kThreads;
    if (o < number) {
      loaded[k] = indices[o];
      grads[k] = grad[o];
    }
  }
  fill_zeros(out, out + cells);
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int o = threadIdx.x + k * kThreads;
    if (o < number) {
      const bool ours = loaded[k] >= begin && loaded[k] < begin + int64_t(cells);
      chosen[o] = ours ? static_cast<int32_t>(loaded[k]) : -1;
      values[o] = grads[k];
    }
  }
  __syncthreads();  // after it the block's zeros are written for each of its threads, too
#pragma unroll 1
  for (int o = threadIdx.x; o < number; o += kThreads) {
    const int32_t cell = chosen[o];
    if (cell < 0) continue;
    C sum;
    if (owns_choice<T, C, int32_t>(
            p, first + o, cell, [&](int32_t other) { return chosen[other - first]; },
            [&](int32_t other) { return C(widen(values[other - first])); }, &sum)) {
      out[cell - begin] = narrow<T>(sum);
    }
  }
  __syncthreads();  // shared memory may be written again
}

// A band of any number of outputs.
template <class T>
__device__ __forceinline__ void write_large_band(const MaxPoolParams<T>& p, T* out, const T* grad,
                                                 const int64_t* indices, int64_t begin, int64_t end,
                                                 int64_t first, int64_t last) {
  using C = typename Format<T>::Compute;
  fill_zeros(out + begin, out + end);
  __syncthreads();
  for (int64_t o = first + threadIdx.x; o < last; o += kThreads) {
    const int64_t cell = indices[o];
    if (cell < begin || cell >= end) continue;
    C sum;
    if (owns_choice<T, C, int64_t>(
            p, o, cell, [&](int64_t other) { return indices[other]; },
            [&](int64_t other) { return C(widen(grad[other])); }, &sum)) {
      out[cell] = narrow<T>(sum);
    }
  }
}

// kKeep: all bands are fit for write_band.
template <bool kKeep, class T>
__global__ void __launch_bounds__(kThreads, kKeep && sizeof(T) < 8 ? 8 : 4)
    max_pool_backward_kernel(MaxPoolParams<T> p) {
  const MaxPoolShape& s = p.shape;
  using Index = std::conditional_t<kKeep, int32_t, int64_t>;
  const int64_t cells = s.cells();
  for (int64_t item = blockIdx.x; item < s.planes * p.bands; item += gridDim.x) {
    const int64_t plane = p.by_bands.quotient(item), begin = (item - plane * p.bands) * p.band;
    const int64_t end = begin + p.band < cells ? begin + p.band : cells;
    // Only windows of the band's rows can have chosen one of its cells.
    const auto row_of = [&](int64_t cell) {
      return static_cast<int32_t>(p.quotient(p.by_width, static_cast<Index>(cell)));
    };
    const Index first = Index(p.template outputs_of<Index>(0, row_of(begin)).first) * s.out[1];
    const Index last = Index(p.template outputs_of<Index>(0, row_of(end - 1)).last) * s.out[1];
    T* const out = p.out + plane * cells;
    const T* const grad = p.grad + plane * s.outputs();
    const int64_t* const indices = p.indices + plane * s.outputs();
    if constexpr (kKeep) {
      write_band(p, out + begin, grad + first, indices + first, static_cast<int>(end - begin),
                 static_cast<int32_t>(begin), first, last - first);
    } else {
      write_large_band(p, out, grad, indices, begin, end, first, last);
    }
  }
}

template <class T>
void run(const Tensor& grad, const Tensor& indices, const Tensor& out, const MaxPoolShape& shape) {
  const int64_t wanted = (shape.cells() + kBand - 1) / kBand;
  // Whole lines of memory, where planes are.
  const int64_t band = ((shape.cells() + wanted - 1) / wanted + 31) / 32 * 32;
  const int64_t bands = (shape.cells() + band - 1) / band;
  // What is divided by a size: cells, and the numerators of window_start and window_end.
  const auto limit = [&](int axis) {
    const int64_t windows = (shape.in[axis] + int64_t(1)) * shape.out[axis] + shape.in[axis];
    return windows > shape.cells() ? windows : shape.cells();
  };
  constexpr int64_t kSmall = int64_t(1) << 31;
  // Rows of cells of a band, and of the outputs whose windows they may lie in.
  const int64_t rows = band / shape.in[1] + 2, most_rows = rows * shape.out[0] / shape.in[0] + 2;
  const bool keep = limit(0) < kSmall && limit(1) < kSmall && shape.outputs() < kSmall &&
                    (most_rows < shape.out[0] ? most_rows : shape.out[0]) * shape.out[1] <= kKept;
  const MaxPoolParams<T> params{shape,
                                const_data<T>(grad),
                                const_data<int64_t>(indices),
                                mutable_data<T>(out),
                                bands,
                                band,
                                Divider(bands, shape.planes * bands),
                                Divider(shape.in[0], limit(0)),
                                Divider(shape.in[1], limit(1)),
                                Divider(shape.out[1], shape.outputs())};
  const unsigned blocks = blocks_for(shape.planes * bands, 1);
  const cudaStream_t stream = current_stream(grad);
  if (keep) {
    max_pool_backward_kernel<true, T><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    max_pool_backward_kernel<false, T><<<blocks, kThreads, 0, stream>>>(params);
  }
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
