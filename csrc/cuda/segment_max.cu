// Maxima of groups of rows on CUDA: the largest key by atomicMax, then the lowest row that has it
// by atomicMin. Both are free of order.
#include "../segment_max.h"

#include <array>
#include <tuple>

#include "scatter_params.cuh"

namespace truncdet {
namespace {

template <class T>
struct MaxParams {
  IndexMap map;
  const T* values;
  unsigned long long* best;    // [groups, columns] keys, zeroed
  unsigned long long* argmax;  // [groups, columns] rows; as large as can be before the second pass
  T* largest;                  // [groups, columns]
};

template <class T, bool kSecondPass>
__global__ void max_kernel(MaxParams<T> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < p.map.elements(); at += stride) {
    const int64_t row = p.map.by_width.quotient(at), column = at - row * p.map.width;
    const int64_t group = p.map.key(row, column);
    const unsigned long long key = ordered_key(widen(p.values[at]));
    if (group < 0 || key == 0) continue;
    const int64_t to = group * p.map.width + column;
    if constexpr (kSecondPass) {
      if (p.best[to] == key) atomicMin(p.argmax + to, static_cast<unsigned long long>(row));
    } else {
      atomicMax(p.best + to, key);
    }
  }
}

template <class T>
__global__ void max_finish_kernel(MaxParams<T> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = p.map.keys() * p.map.width;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    const int64_t group = p.map.by_width.quotient(at), column = at - group * p.map.width;
    const bool any = p.best[at] != 0;
    if (!any) p.argmax[at] = static_cast<unsigned long long>(p.map.rows());
    p.largest[at] = any ? p.values[static_cast<int64_t>(p.argmax[at]) * p.map.width + column]
                        : minus_infinity<T>();
  }
}

template <class T>
void segment_max(const MaxParams<T>& p, cudaStream_t stream) {
  const int64_t cells = p.map.keys() * p.map.width;
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(p.best, 0, 8 * cells, stream));
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(p.argmax, 0xff, 8 * cells, stream));
  if (p.map.elements() > 0) {
    const unsigned blocks = blocks_for(p.map.elements());
    max_kernel<T, false><<<blocks, kThreads, 0, stream>>>(p);
    TRUNCDET_LAUNCH_CHECK();
    max_kernel<T, true><<<blocks, kThreads, 0, stream>>>(p);
    TRUNCDET_LAUNCH_CHECK();
  }
  max_finish_kernel<T><<<blocks_for(cells), kThreads, 0, stream>>>(p);
  TRUNCDET_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor> segment_max_cuda(Tensor values, Tensor index, int64_t groups) {
  const SegmentShape s = segment_shape(values, index, groups);
  const DeviceGuard guard(values.get_device_index());
  values = torch::stable::contiguous(values);
  index = torch::stable::contiguous(index);
  const std::array<int64_t, 2> size{s.groups, s.columns};
  Tensor largest = torch::stable::new_empty(values, size);
  Tensor argmax = torch::stable::new_empty(index, size);
  if (largest.numel() == 0) return {largest, argmax};
  Tensor best = torch::stable::new_empty(index, size);
  const IndexMap map(const_data<int64_t>(index), {0, 1, 0}, 1, s.groups, s.rows, s.columns);
  TRUNCDET_DISPATCH(values.scalar_type(), "_segment_max", [&] {
    segment_max<scalar_t>(
        {map, const_data<scalar_t>(values), mutable_data<unsigned long long>(best),
         mutable_data<unsigned long long>(argmax), mutable_data<scalar_t>(largest)},
        current_stream(values));
  });
  return {largest, argmax};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_segment_max", TORCH_BOX(&truncdet::segment_max_cuda));
}
