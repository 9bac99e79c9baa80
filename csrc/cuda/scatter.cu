// scatter_add and index_add by int64 atomics.
#include "../scatter.h"
#include "accumulate.cuh"

namespace truncdet {
namespace {

template <class T>
struct ScatterParams {
  using C = typename Format<T>::Compute;
  ScatterShape shape;
  const int64_t* index;
  const T* src;
  Accumulator<C> sums;
  ScaleSource<C> scale;
  unsigned* sticky;
  StickyBit bit;
};

// One contribution a turn. An index out of range is noted, never followed.
template <class T>
__global__ void scatter_kernel(ScatterParams<T> p) {
  using C = typename Format<T>::Compute;
  const ScatterShape& s = p.shape;
  const Scale<C> scale = p.scale(0);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = s.outer * s.count * s.inner;
  bool bad = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    // at = (o * count + k) * inner + i
    const int64_t row = at / s.inner, i = at - row * s.inner;
    const int64_t o = row / s.count, k = row - o * s.count;
    const int64_t to = p.index[o * s.index_outer + k * s.index_count + i * s.index_inner];
    if (to < 0 || to >= s.cells) {
      bad = true;
      continue;
    }
    const int64_t cell = (o * s.cells + to) * s.inner + i;
    const C value = widen(p.src[at]);
    const uint32_t seen = nonfinite_flag(value);
    if (seen != 0) {
      or_flags(p.sums.flags, cell, seen);
    } else {
      p.sums.add(cell, scale, scale.normalise(value));
    }
  }
  if (bad) set_sticky(p.sticky, p.bit);
}

template <class T>
void accumulate(const Tensor& input, const Tensor& index, const Tensor& src,
                const ScatterShape& shape, bool exact, StickyBit bit, const Tensor& out) {
  using C = typename Format<T>::Compute;
  const bool two_limbs = needs_two_limbs<C>(exact);
  const cudaStream_t stream = current_stream(input);
  const int64_t bytes = Accumulator<C>::bytes(shape.total_cells(), 1, two_limbs);
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             input.device(), std::nullopt, std::nullopt);
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(memory.mutable_data_ptr(), 0, bytes, stream));
  const Accumulator<C> sums(memory.mutable_data_ptr(), shape.total_cells(), 1, two_limbs);
  const ScaleSource<C> scale{sums.amax, headroom(shape.count)};
  const T* values = const_data<T>(src);
  const int64_t total = shape.contributions();
  launch_amax<T>({values, 1, total, sums.amax, sums.nonfinite}, stream);
  if (total > 0) {
    const ScatterParams<T> params{
        shape, const_data<int64_t>(index), values, sums, scale, sticky_word(), bit};
    scatter_kernel<T><<<blocks_for(total), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  }
  launch_finish<T>(
      {sums, scale, const_data<T>(input), mutable_data<T>(out), 1, shape.total_cells()}, stream);
}

Tensor accumulate_cuda(Tensor input, Tensor index, Tensor src, bool exact, int64_t bit) {
  const ScatterShape shape = scatter_shape(input, index, src);
  const DeviceGuard guard(input.get_device_index());
  input = torch::stable::contiguous(input);
  src = torch::stable::contiguous(src);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(input.scalar_type(), "_accumulate", [&] {
    accumulate<scalar_t>(input, index, src, shape, exact, static_cast<StickyBit>(bit), out);
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_accumulate", TORCH_BOX(&truncdet::accumulate_cuda));
}
