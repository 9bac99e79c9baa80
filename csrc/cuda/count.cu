// Counts of indices on CUDA.
#include "../count.h"

#include <array>

#include "scatter_params.cuh"

namespace truncdet {
namespace {

// Cells that a block counts in shared memory, where there are so many indices for each of them.
constexpr int kSharedCells = 4096;
constexpr int64_t kIndicesPerCell = 512;
constexpr int64_t kIndicesPerThread = 32;
constexpr int64_t kMaxCountBlocks = 1024;

// The counter of an index, or -1 if it is out of range.
__device__ __forceinline__ int64_t counter(const IndexMap& map, int64_t at) {
  const int64_t row = map.by_width.quotient(at), column = at - row * map.width;
  const int64_t key = map.key(row, column);
  return key < 0 ? -1 : key * map.width + column;
}

__global__ void count_kernel(IndexMap map, int64_t* counts) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < map.elements(); at += stride) {
    const int64_t cell = counter(map, at);
    if (cell >= 0) add_int64(counts + cell, 1);
  }
}

// A thread sees few enough indices that a block's 32-bit counters cannot overflow: the host's grid
// leaves each block at most 2^31.
__global__ void count_shared_kernel(IndexMap map, int64_t* counts) {
  __shared__ uint32_t own[kSharedCells];
  const int cells = static_cast<int>(map.keys() * map.width);
  for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) own[cell] = 0;
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < map.elements(); at += stride) {
    const int64_t cell = counter(map, at);
    if (cell >= 0) atomicAdd(own + cell, 1u);
  }
  __syncthreads();
  for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
    if (own[cell] != 0) add_int64(counts + cell, own[cell]);
  }
}

Tensor count_cuda(Tensor index, int64_t cells) {
  const CountShape s = count_shape(index, cells);
  const DeviceGuard guard(index.get_device_index());
  index = torch::stable::contiguous(index);
  const std::array<int64_t, 3> size{s.outer, s.cells, s.inner};
  Tensor out = torch::stable::new_empty(index, size);
  if (out.numel() == 0) return out;
  const cudaStream_t stream = current_stream(index);
  int64_t* counts = mutable_data<int64_t>(out);
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(counts, 0, 8 * out.numel(), stream));
  const int64_t indices = s.indices();
  if (indices == 0) return out;
  const IndexMap map(const_data<int64_t>(index), {s.count * s.inner, s.inner, 1}, s.outer, s.cells,
                     s.count, s.inner);
  const bool crowded = s.total_cells() <= kSharedCells && indices < (int64_t(1) << 40) &&
                       indices >= kIndicesPerCell * s.total_cells();
  if (crowded) {
    const int64_t wanted = indices / (kThreads * kIndicesPerThread);
    const int64_t blocks = wanted < 1 ? 1 : (wanted < kMaxCountBlocks ? wanted : kMaxCountBlocks);
    count_shared_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(map, counts);
  } else {
    count_kernel<<<blocks_for(indices), kThreads, 0, stream>>>(map, counts);
  }
  TRUNCDET_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) { m.impl("_count", TORCH_BOX(&truncdet::count_cuda)); }
