// Contributions that go to their cells by atomics, one by one or in runs.
#pragma once

#include "scatter_params.cuh"
#include "shared_sum.cuh"

namespace truncdet {

constexpr unsigned kWarp = 0xffffffffu;

// One element a turn; neighbouring threads have neighbouring columns, so that the atomics of a warp
// share sectors of memory.
template <class T, bool kTwoLimbs>
__global__ void add_elements_kernel(AddParams<T> p) {
  const Adder<T, kTwoLimbs, false> adder(p);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = p.map.elements();
  bool bad = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    // at = row * width + column
    const int64_t row = p.map.by_width.quotient(at), column = at - row * p.map.width;
    const int64_t key = p.map.key(row, column), from = p.source(row);
    bad |= key < 0;
    if (key < 0 || from < 0) continue;
    const int64_t cell = key * p.map.width + column;
    const T element = p.src[from * p.map.width + column];
    adder.add(cell, adder.amount(cell, element, adder.weight(row)));
  }
  p.report(bad);
}

// Elements of which one thread takes care at once.
constexpr int kRun = 4;

// For a plain vector of elements and indices: neighbours that go to one cell are added up before
// they go there. Sorted indices, and one cell for all, would make every atomic wait for the last.
template <class T, bool kTwoLimbs>
__global__ void add_runs_kernel(AddParams<T> p) {
  const Adder<T, kTwoLimbs, false> adder(p);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * kRun;
  const int64_t total = p.map.count;
  const unsigned lane = threadIdx.x % 32;
  bool bad = false;
  // The whole warp takes every turn, since its threads talk to each other.
  for (int64_t base = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x - lane) * kRun;
       base < total; base += stride) {
    const int64_t first = base + lane * kRun;
    int64_t cells[kRun];
    Amount amounts[kRun];
    if (first + kRun <= total) {
      const Pack<int64_t, kRun> index = load_pack<int64_t, kRun>(p.map.index + first);
      const Pack<T, kRun> elements = load_pack<T, kRun>(p.src + first);
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const bool outside = index.at[j] < 0 || index.at[j] >= p.map.cells;
        bad |= outside;
        cells[j] = outside ? -1 : index.at[j];
        if (!outside) amounts[j] = adder.amount(cells[j], elements.at[j], 1);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        cells[j] = -1;
        if (first + j >= total) continue;
        cells[j] = p.map.key(first + j, 0);
        bad |= cells[j] < 0;
        if (cells[j] >= 0) amounts[j] = adder.amount(cells[j], p.src[first + j], 1);
      }
    }
    const int64_t of_warp = __shfl_sync(kWarp, cells[0], 0);
    bool alike = of_warp >= 0;
#pragma unroll
    for (int j = 0; j < kRun; ++j) alike &= cells[j] == of_warp;
    if (__all_sync(kWarp, alike)) {
      Amount sum;
#pragma unroll
      for (int j = 0; j < kRun; ++j) sum += amounts[j];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) {
        sum += {__shfl_xor_sync(kWarp, sum.high, other), __shfl_xor_sync(kWarp, sum.low, other)};
      }
      if (lane == 0) adder.add(of_warp, sum);
      continue;
    }
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      if (j + 1 < kRun && cells[j + 1] == cells[j]) {
        amounts[j + 1] += amounts[j];
      } else if (cells[j] >= 0) {
        adder.add(cells[j], amounts[j]);
      }
    }
  }
  p.report(bad);
}

// Shared memory of a block's own sums, and elements a thread should see before they pay off.
constexpr int kSharedBytes = 32 * 1024;
constexpr int64_t kSharedPerThread = 32;
constexpr int64_t kSharedPerCell = 512;
constexpr int64_t kMaxSharedBlocks = 1024;

// For few cells: each block sums for itself, since global atomics on few addresses wait in line.
template <class T, bool kTwoLimbs>
__global__ void add_shared_kernel(AddParams<T> p) {
  __shared__ uint32_t words[kSharedBytes / sizeof(uint32_t)];
  const Adder<T, kTwoLimbs, false> adder(p);
  constexpr int kLimbs = kTwoLimbs ? 2 : 1;
  const int cells = static_cast<int>(p.map.keys() * p.map.width);
  for (int i = threadIdx.x; i < 2 * kLimbs * cells; i += blockDim.x) words[i] = 0;
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = p.map.elements();
  bool bad = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    const int64_t row = p.map.by_width.quotient(at), column = at - row * p.map.width;
    const int64_t key = p.map.key(row, column), from = p.source(row);
    bad |= key < 0;
    if (key < 0 || from < 0) continue;
    const int64_t cell = key * p.map.width + column;
    const Amount amount = adder.amount(cell, p.src[from * p.map.width + column], adder.weight(row));
    uint32_t* const own = words + 2 * cell;
    add_shared(own, own + 1, amount.high);
    if constexpr (kTwoLimbs) add_shared(own + 2 * cells, own + 2 * cells + 1, amount.low);
  }
  __syncthreads();
  for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
    const auto sum_of = [&](int at) { return shared_sum(words[2 * at], words[2 * at + 1]); };
    Amount amount;
    amount.high = sum_of(cell);
    if constexpr (kTwoLimbs) amount.low = sum_of(cells + cell);
    adder.add(cell, amount);
  }
  p.report(bad);
}

}  // namespace truncdet
