// Which kernel adds the contributions of a call. Sizes alone decide, so every device and every run
// decides alike; the bits would be the same in any case.
#pragma once

#include "scatter_sorted.cuh"

namespace truncdet {

// Rows worth sorting: so wide, of so many elements, and so many for each key.
constexpr int64_t kSortWidth = 8;
constexpr int64_t kSortMaxWidth = 1 << 24;  // bytes of a row fit in 32 bits
constexpr int64_t kSortElements = 1 << 21;
constexpr int64_t kSortRowsPerKey = 2;

// Sorting needs a word of four bytes for a row and one for a key, for which there is room beside
// the sums only where rows are wide: all buffers together stay below 16 bytes a cell. The two limbs
// of float64 leave no room.
template <class T>
bool sorting_pays(const AddParams<T>& p) {
  constexpr int64_t kSmall = int64_t(1) << 31;
  const IndexMap& map = p.map;
  const int64_t rows = map.rows(), keys = map.keys();
  return !std::is_same_v<T, double> && map.is_small() && map.width >= kSortWidth &&
         map.elements() >= kSortElements && rows >= kSortRowsPerKey * keys &&
         rows + keys < kSmall && p.source_rows < kSmall && map.width <= kSortMaxWidth &&
         4 * (rows + keys + 2 * kSortedAhead) <= 7 * keys * map.width;
}

template <class T, bool kTwoLimbs>
void launch_sorted(const AddParams<T>& p, const Tensor& like, cudaStream_t stream) {
  const IndexMap& map = p.map;
  const int64_t padded = (map.rows() + kSortedAhead - 1) / kSortedAhead * kSortedAhead;
  const int64_t bytes = 4 * (padded + map.keys() + 1);
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             like.device(), std::nullopt, std::nullopt);
  uint32_t* order = mutable_data<uint32_t>(memory);
  uint32_t* cursor = order + padded;
  const OrderParams ordering{map, order, cursor, cursor + map.keys()};
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(cursor, 0, 4 * (map.keys() + 1), stream));
  count_rows_kernel<T><<<blocks_for(map.rows()), kThreads, 0, stream>>>(ordering, p);
  TRUNCDET_LAUNCH_CHECK();
  allocate_keys_kernel<<<blocks_for(map.keys()), kThreads, 0, stream>>>(ordering);
  TRUNCDET_LAUNCH_CHECK();
  place_rows_kernel<<<blocks_for(map.rows()), kThreads, 0, stream>>>(ordering);
  TRUNCDET_LAUNCH_CHECK();
  int lanes = 1;
  while (lanes < 32 && lanes * kSortedColumns < map.width) lanes *= 2;
  const int64_t tile = lanes * kSortedColumns;
  const int64_t tiles = (map.width + tile - 1) / tile;
  const int64_t chunks = (map.rows() + kSortedRows - 1) / kSortedRows;
  const SortedParams<T> params{
      p, order, ordering.placed, lanes, chunks, tiles, Divider(tiles, chunks * tiles)};
  const unsigned blocks = blocks_for(chunks * tiles * lanes);
  add_sorted_kernel<T, kTwoLimbs><<<blocks, kThreads, 0, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

// Few cells, so many elements for each of them that they would wait in line.
inline bool sharing_pays(const IndexMap& map, bool two_limbs) {
  const int64_t cells = map.keys() * map.width;
  return cells * (two_limbs ? 16 : 8) <= kSharedBytes && map.elements() >= kSharedPerCell * cells;
}

// A vector of elements and a vector of indices that can be read four at a time.
template <class T>
bool runs_fit(const AddParams<T>& p) {
  return p.map.width == 1 && p.map.outer == 1 && p.map.stride_count == 1 && p.sources == nullptr &&
         p.weights == nullptr && is_aligned(p.map.index, alignof(Pack<int64_t, kRun>)) &&
         is_aligned(p.src, alignof(Pack<T, kRun>));
}

template <class T, bool kTwoLimbs>
void launch_add_limbs(const AddParams<T>& p, const Tensor& like, cudaStream_t stream) {
  const int64_t elements = p.map.elements();
  if (sharing_pays(p.map, kTwoLimbs)) {
    const int64_t wanted = elements / (kThreads * kSharedPerThread);
    const int64_t blocks = wanted < 1 ? 1 : (wanted < kMaxSharedBlocks ? wanted : kMaxSharedBlocks);
    add_shared_kernel<T, kTwoLimbs><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    TRUNCDET_LAUNCH_CHECK();
    return;
  }
  if constexpr (!std::is_same_v<T, double>) {
    if (sorting_pays(p)) return launch_sorted<T, kTwoLimbs>(p, like, stream);
  }
  if (runs_fit(p)) {
    const unsigned blocks = blocks_for((elements + kRun - 1) / kRun);
    add_runs_kernel<T, kTwoLimbs><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    add_elements_kernel<T, kTwoLimbs><<<blocks_for(elements), kThreads, 0, stream>>>(p);
  }
  TRUNCDET_LAUNCH_CHECK();
}

template <class T>
void launch_add(const AddParams<T>& p, const Tensor& like, cudaStream_t stream) {
  if (p.map.elements() == 0 || p.map.keys() == 0 || p.source_rows == 0) return;
  if constexpr (std::is_same_v<T, double>) {
    launch_add_limbs<T, true>(p, like, stream);
  } else if (p.sums.low != nullptr) {
    launch_add_limbs<T, true>(p, like, stream);
  } else {
    launch_add_limbs<T, false>(p, like, stream);
  }
}

}  // namespace truncdet
