// Wide rows that meet often: rows are put in the order of their keys first, so that a thread adds
// up those of one key in registers and needs one atomic where there were many.
//
// The order among the rows of one key is left to the atomics that hand out the places, and so is
// the order of the keys: the sums are integers, to which neither matters.
#pragma once

#include "scatter_direct.cuh"

namespace truncdet {

constexpr int kSortedColumns = 4;  // columns a thread sums
constexpr int kSortedRows = 32;    // rows a thread sums, at most
constexpr int kSortedAhead = 4;    // rows under way at once
constexpr int kSortedBlocks = 3;   // blocks for which a multiprocessor must have registers
constexpr uint32_t kNoKey = ~0u;
static_assert(kSortedRows % kSortedAhead == 0, "a load of the order must not cross two threads'");

struct OrderParams {
  IndexMap map;
  uint32_t* order;   // [rows, rounded up to kSortedAhead] rows in the order of their keys
  uint32_t* cursor;  // [keys] zeroed; rows of the key, then its next place in `order`
  uint32_t* placed;  // zeroed; rows that have a place: those with an index in range
};

// Rows of a warp that have the same key, as lanes; every thread of the warp must call it.
struct Peers {
  unsigned mask;
  unsigned lane = threadIdx.x % 32;

  __device__ __forceinline__ explicit Peers(int64_t key)
      : mask(__match_any_sync(kWarp, static_cast<unsigned long long>(key))) {}
  __device__ __forceinline__ int leader() const { return __ffs(mask) - 1; }
  __device__ __forceinline__ bool leads() const { return lane == static_cast<unsigned>(leader()); }
  __device__ __forceinline__ unsigned size() const { return __popc(mask); }
  __device__ __forceinline__ unsigned rank() const { return __popc(mask & ((1u << lane) - 1u)); }
};

template <class T>
__global__ void count_rows_kernel(OrderParams p, AddParams<T> to_report) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const unsigned lane = threadIdx.x % 32;
  bool bad = false;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x - lane;
       base < p.map.rows(); base += stride) {
    const bool inside = base + lane < p.map.rows();
    const int64_t key = inside ? p.map.key(base + lane, 0) : -1;
    bad |= inside && key < 0;
    const Peers peers(key);
    if (key >= 0 && peers.leads()) atomicAdd(p.cursor + key, peers.size());
  }
  to_report.report(bad);
}

// Gives every key a stretch of `order`: a scan inside the block, and one atomic for the block.
static __global__ void allocate_keys_kernel(OrderParams p) {
  __shared__ uint32_t of_warp[32];
  __shared__ uint32_t start;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x; base < p.map.keys();
       base += stride) {
    const int64_t key = base + threadIdx.x;
    const uint32_t rows = key < p.map.keys() ? p.cursor[key] : 0;
    uint32_t through = rows;  // rows of this and of all lower lanes
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
      const uint32_t lower = __shfl_up_sync(kWarp, through, step);
      if (lane >= step) through += lower;
    }
    if (lane == 31) of_warp[warp] = through;
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (unsigned other = 0; other < blockDim.x / 32; ++other) {
      before += other < warp ? of_warp[other] : 0;
      all += of_warp[other];
    }
    if (threadIdx.x == 0) start = atomicAdd(p.placed, all);
    __syncthreads();
    if (key < p.map.keys()) p.cursor[key] = start + before + through - rows;
  }
}

static __global__ void place_rows_kernel(OrderParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const unsigned lane = threadIdx.x % 32;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x - lane;
       base < p.map.rows(); base += stride) {
    const int64_t row = base + lane;
    const int64_t key = row < p.map.rows() ? p.map.key(row, 0) : -1;
    const Peers peers(key);
    uint32_t place = 0;
    if (key >= 0 && peers.leads()) place = atomicAdd(p.cursor + key, peers.size());
    place = __shfl_sync(kWarp, place, peers.leader());
    if (key >= 0) p.order[place + peers.rank()] = static_cast<uint32_t>(row);
  }
}

template <class T>
struct SortedParams {
  AddParams<T> add;
  const uint32_t* order;
  const uint32_t* placed;
  int lanes;       // threads side by side on one row, a power of two
  int64_t chunks;  // of kSortedRows places
  int64_t tiles;   // of lanes * kSortedColumns columns
  Divider by_tiles;
};

// A thread's columns are `lanes` apart, so that loads and atomics of a row stay in one piece. Rows,
// keys and columns have 32 bits here (see sorting_pays): addresses are half of the work.
template <class T, bool kTwoLimbs, bool kPlain>
__device__ __forceinline__ void add_sorted(const SortedParams<T>& p) {
  using C = typename Format<T>::Compute;
  const Adder<T, kTwoLimbs, kPlain> adder(p.add);
  const IndexMap& map = p.add.map;
  const uint32_t width = static_cast<uint32_t>(map.width);
  const int64_t placed = *p.placed;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x / p.lanes;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint32_t lane = threadIdx.x % p.lanes;
  for (int64_t group = thread / p.lanes; group < p.chunks * p.tiles; group += stride) {
    // group = chunk * tiles + tile
    const int64_t chunk = p.by_tiles.quotient(group), tile = group - chunk * p.tiles;
    const int64_t first = chunk * kSortedRows;
    const int64_t last = first + kSortedRows < placed ? first + kSortedRows : placed;
    uint32_t columns[kSortedColumns], offsets[kSortedColumns];
    bool used[kSortedColumns];
#pragma unroll
    for (int q = 0; q < kSortedColumns; ++q) {
      const uint32_t column = (static_cast<uint32_t>(tile) * kSortedColumns + q) * p.lanes + lane;
      used[q] = column < width;
      columns[q] = used[q] ? column : width - 1;  // summed all the same, and thrown away
      offsets[q] = columns[q] * sizeof(T);
    }
    Amount sums[kSortedColumns];
    int64_t cells = -1;  // where the cells of the present key begin
    uint32_t current = kNoKey;
    const auto flush = [&] {
#pragma unroll
      for (int q = 0; q < kSortedColumns; ++q) {
        if (used[q]) adder.add(cells + columns[q], sums[q]);
        sums[q] = Amount();
      }
    };
    for (int64_t at = first; at < last; at += kSortedAhead) {
      // Past `last` lies, inside the buffer, what must not be used: the first row stands in, so
      // that no load waits for a branch.
      const Pack<uint32_t, kSortedAhead> rows = load_pack<uint32_t, kSortedAhead>(p.order + at);
      uint32_t keys[kSortedAhead];
      int64_t from[kSortedAhead];
      C weights[kSortedAhead];
      T elements[kSortedAhead][kSortedColumns];
#pragma unroll
      for (int j = 0; j < kSortedAhead; ++j) {
        const uint32_t row = at + j < last ? rows.at[j] : rows.at[0];
        keys[j] = map.small_key(row);
        from[j] = kPlain ? row : p.add.source(row);
        weights[j] = adder.weight(row);
        const uint32_t known = from[j] < 0 ? 0 : static_cast<uint32_t>(from[j]);
        const T* elements_of_row = p.add.src + static_cast<uint64_t>(known) * width;
#pragma unroll
        for (int q = 0; q < kSortedColumns; ++q) {
          const char* address = reinterpret_cast<const char*>(elements_of_row) + offsets[q];
          elements[j][q] = *reinterpret_cast<const T*>(address);
        }
      }
#pragma unroll
      for (int j = 0; j < kSortedAhead; ++j) {
        if ((j > 0 && at + j >= last) || from[j] < 0) continue;
        if (keys[j] != current) {
          if (current != kNoKey) flush();
          current = keys[j];
          cells = static_cast<uint64_t>(current) * width;
        }
#pragma unroll
        for (int q = 0; q < kSortedColumns; ++q) {
          sums[q] += adder.amount(cells + columns[q], elements[j][q], weights[j]);
        }
      }
    }
    if (current != kNoKey) flush();
  }
}

// The usual case has a loop of its own: what it need not ask would cost it half its speed.
template <class T, bool kTwoLimbs>
__global__ void __launch_bounds__(kThreads, kSortedBlocks) add_sorted_kernel(SortedParams<T> p) {
  if (p.add.plain()) {
    add_sorted<T, kTwoLimbs, true>(p);
  } else {
    add_sorted<T, kTwoLimbs, false>(p);
  }
}

}  // namespace truncdet
