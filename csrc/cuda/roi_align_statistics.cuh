// What the backward kernels need to know before they can add: each image's scale, its list of RoIs,
// and the cells each RoI can touch. Everything stays on the device; memory is O(RoIs + images).
#pragma once

#include <climits>

#include "../roi_align_host.h"
#include "accumulate.cuh"

namespace truncdet {

// Which bins touch a cell: first << 16 | number.
struct BinRun {
  unsigned word;

  TRUNCDET_HD BinRun() : word(0) {}
  TRUNCDET_HD BinRun(int first, int number)
      : word(static_cast<unsigned>(first) << 16 | static_cast<unsigned>(number)) {}
  TRUNCDET_HD int first() const { return static_cast<int>(word >> 16); }
  TRUNCDET_HD int number() const { return static_cast<int>(word & 0xffffu); }
};

// Weights are stored and read four at a time, padded with zeros.
TRUNCDET_HD int padded_bins(int bins) { return (bins + 3) / 4 * 4; }

// Weights of one RoI by cell, so that a tile does not compute them again for every 32 channels. A
// constant amount a RoI; one that needs more has its weights computed by the tiles.
constexpr int kTableCells = kThreads / 2;
constexpr int kTableWeights = 512;
struct alignas(16) RoiTable {
  float weights[2][kTableWeights];  // y then x: `stride` weights a cell, from the first cell on
  BinRun runs[2][kTableCells];
};

// One RoI as the tiles see it.
struct alignas(16) RoiBounds {
  int first_y, last_y, first_x, last_x;  // cells; first > last: touches nothing
  int roi;                               // its number
  int stride_y, stride_x;                // of its table, 0 without one
  int image;                             // -1: none
};

// First bin whose weight on `cell` is not zero, and how many there are up to the last such bin.
template <class C>
__device__ BinRun find_run(const Axis<C>& axis, int cell, int bins) {
  int first, last;
  axis.bins_near(cell, bins, &first, &last);
  while (first <= last && axis.weight(first, cell) == C(0)) ++first;
  while (last > first && axis.weight(last, cell) == C(0)) --last;
  return first <= last ? BinRun(first, last - first + 1) : BinRun();
}

// What a block of the gather needs to know of its image, one load.
template <class C>
struct alignas(16) ImageStatistics {
  typename Format<C>::Word amax;  // largest finite magnitude word
  int count;                      // RoIs of the image
  int offset;                     // where they start in `list`, if there is one
  int unused;

  __device__ Scale<C> scale(int64_t bins) const {
    return Scale<C>(exponent_above<C>(amax), roi_headroom(count, bins));
  }
};

// Views into one scratch allocation.
template <class C>
struct RoiStatistics {
  using Word = typename Format<C>::Word;
  Roi<C>* rois;                  // [rois], where bins are made of samples
  RoiBounds* bounds;             // [rois]
  RoiTable* tables;              // [rois], float32 RoIAlign only
  ImageStatistics<C>* images;    // [images]
  unsigned long long* finished;  // blocks of the statistics kernel that are done
  unsigned* nonfinite;           // [images + 1] image has a NaN or infinity; last: any image has
  int* cursor;                   // [images]
  RoiBounds* list;  // [rois] bounds grouped by image, in no particular order; may be null
};

// The cells RoI `k` touches and, with kTables, its weights by cell. All threads of the block take
// part.
template <bool kTables, class C>
__device__ void describe_roi(int k, const Roi<C>& roi, const RoiAlignShape& shape,
                             RoiBounds* bounds, RoiTable* table) {
  __shared__ int first_cell[2], last_cell[2], most_bins[2];
  const int bins[2] = {static_cast<int>(shape.pooled_height), static_cast<int>(shape.pooled_width)};
  if (threadIdx.x < 2) {
    first_cell[threadIdx.x] = INT_MAX;
    last_cell[threadIdx.x] = -1;
    most_bins[threadIdx.x] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bins[0] + bins[1]; i += kThreads) {
    const int which = i < bins[0] ? 0 : 1;
    const Axis<C>& axis = which == 0 ? roi.y : roi.x;
    int first, last;
    axis.range(i - which * bins[0], &first, &last);
    if (first > last) continue;
    atomicMin(&first_cell[which], first);
    atomicMax(&last_cell[which], last);
  }
  __syncthreads();
  const bool empty = last_cell[0] < 0 || last_cell[1] < 0;
  int stride[2] = {0, 0};
  if constexpr (kTables) {
    // Half of the threads for either axis, one a cell.
    const int which = threadIdx.x / kTableCells, cell = threadIdx.x % kTableCells;
    const int cells = empty ? 0 : last_cell[which] - first_cell[which] + 1;
    const Axis<C>& axis = which == 0 ? roi.y : roi.x;
    const bool small = cells <= kTableCells && bins[which] < (1 << 15);
    const bool mine = cell < cells && small;
    const BinRun run = mine ? find_run(axis, first_cell[which] + cell, bins[which]) : BinRun();
    if (mine) atomicMax(&most_bins[which], padded_bins(run.number()));
    if (!small) most_bins[which] = kTableWeights + 1;
    __syncthreads();
    const int spans[2] = {last_cell[0] - first_cell[0] + 1, last_cell[1] - first_cell[1] + 1};
    const bool fits = !empty && most_bins[0] <= kTableWeights && most_bins[1] <= kTableWeights &&
                      most_bins[0] * spans[0] <= kTableWeights &&
                      most_bins[1] * spans[1] <= kTableWeights;
    if (fits) {
      stride[0] = most_bins[0];
      stride[1] = most_bins[1];
      if (mine) {
        table->runs[which][cell] = run;
        float* out = table->weights[which] + cell * stride[which];
        for (int i = 0; i < stride[which]; ++i) {
          const C weight =
              i < run.number() ? axis.weight(run.first() + i, first_cell[which] + cell) : C(0);
          out[i] = which == 0 ? weight : weight / roi.count;
        }
      }
    }
  }
  if (threadIdx.x == 0) {
    const int image = static_cast<int>(roi.image);
    *bounds = empty ? RoiBounds{1, 0, 1, 0, k, 0, 0, image}
                    : RoiBounds{first_cell[0], last_cell[0], first_cell[1], last_cell[1], k,
                                stride[0],     stride[1],    image};
  }
}

// RoIs whose bins are made of samples, as an operator describes them to its backward. The gather of
// RoIAlign reads weights from tables.
template <class C, bool kWithTables>
struct SampledRois {
  static constexpr bool kKept = true;
  static constexpr bool kTables = kWithTables && std::is_same_v<C, float>;

  __device__ void describe(int k, const C* box, const RoiAlignShape& shape,
                           const RoiStatistics<C>& statistics) const {
    const Roi<C> roi = make_roi<C>(box, shape);
    if (threadIdx.x == 0) statistics.rois[k] = roi;
    describe_roi<kTables>(k, roi, shape, statistics.bounds + k, statistics.tables + k);
  }
};

// Inclusive sum over the threads of a block of kThreads. All threads must call it.
__device__ inline int block_sum_up_to(int value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += before;
  }
  if (lane == 31) of_warp[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; ++i) value += of_warp[i];
  __syncthreads();  // of_warp may be written again
  return value;
}

// Every image learns where its list starts, then every RoI takes a place in its image's. One block;
// it reads past its own cache what other blocks have written.
template <class C>
__device__ void build_lists(const RoiAlignShape& shape, const RoiStatistics<C>& statistics) {
  __shared__ int total;
  int carry = 0;
  for (int64_t base = 0; base < shape.images; base += kThreads) {
    const int64_t image = base + threadIdx.x;
    const int own = image < shape.images ? __ldcg(&statistics.images[image].count) : 0;
    const int end = carry + block_sum_up_to(own);
    if (image < shape.images) {
      statistics.images[image].offset = statistics.cursor[image] = end - own;
    }
    if (threadIdx.x == kThreads - 1) total = end;
    __syncthreads();
    carry = total;
    __syncthreads();
  }
  for (int64_t k = threadIdx.x; k < shape.rois; k += kThreads) {
    const int image = __ldcg(&statistics.bounds[k].image);
    if (image < 0) continue;
    const int4* source = reinterpret_cast<const int4*>(&statistics.bounds[k]);
    int4* target =
        reinterpret_cast<int4*>(&statistics.list[atomicAdd(&statistics.cursor[image], 1)]);
    target[0] = __ldcg(source);
    target[1] = __ldcg(source + 1);
  }
}

constexpr int kStatisticsChunk = 1 << 14;  // gradient values one block reads, at most

// Largest magnitude and non-finite values of one chunk of RoI `k`'s gradient.
template <class T, class C>
__device__ void look_at_chunk(const T* grad, int64_t length, int64_t k, int64_t image,
                              int64_t images, const RoiStatistics<C>& statistics) {
  using Word = typename Format<C>::Word;
  const T* values = grad + k * length;
  Word largest = 0;
  bool bad = false;
  const auto look = [&](T value) {
    const Word word = magnitude_word<C>(widen(value));
    if (word < infinity_word<C>()) {
      largest = word > largest ? word : largest;
    } else {
      bad = true;
    }
  };
  constexpr int kPack = 16 / sizeof(T);  // 16-byte loads where the addresses allow
  // Equal chunks, a multiple of what a 16-byte load holds.
  const int64_t chunks = gridDim.y - 1;
  const int64_t chunk = ((length + chunks - 1) / chunks + kPack - 1) / kPack * kPack;
  const int64_t begin = min(length, int64_t(blockIdx.y - 1) * chunk);
  const int64_t end = min(length, begin + chunk);
  if (length % kPack == 0 && reinterpret_cast<uintptr_t>(grad) % 16 == 0) {
    const uint4* packs = reinterpret_cast<const uint4*>(values + begin);
    const int number = static_cast<int>(end - begin) / kPack;
#pragma unroll 4
    for (int i = threadIdx.x; i < number; i += kThreads) {
      const uint4 raw = packs[i];
      T pack[kPack];
      memcpy(pack, &raw, 16);
#pragma unroll
      for (int j = 0; j < kPack; ++j) look(pack[j]);
    }
  } else {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) look(values[i]);
  }
  merge_statistics(largest, bad, &statistics.images[image].amax, statistics.nonfinite + image);
  if (bad) statistics.nonfinite[images] = 1u;
}

// Grid: RoIs; along y one row of blocks that describe the RoIs (first, since they take longest),
// then the chunks of a RoI's gradient, `length` values. The block that finishes last builds the
// lists.
template <class T, class C, class Rois>
__global__ void __launch_bounds__(kThreads)
    roi_statistics_kernel(const T* grad, int64_t length, const C* boxes, RoiAlignShape shape,
                          Rois rois, RoiStatistics<C> statistics, unsigned* sticky, StickyBit bit) {
  const int64_t k = blockIdx.x;
  const int64_t image = roi_image(boxes[5 * k], shape.images);
  if (blockIdx.y == 0) {
    if (threadIdx.x == 0) {
      if (image < 0) {
        set_sticky(sticky, bit);
      } else {
        atomicAdd(&statistics.images[image].count, 1);
      }
    }
    rois.describe(static_cast<int>(k), boxes + 5 * k, shape, statistics);
  } else if (image >= 0) {
    look_at_chunk<T, C>(grad, length, k, image, shape.images, statistics);
  }
  if (statistics.list == nullptr) return;
  // What this block wrote must be visible before it counts as finished.
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(statistics.finished, 1ull) + 1 == uint64_t(gridDim.x) * gridDim.y;
  }
  __syncthreads();
  if (is_last) {
    __threadfence();
    build_lists(shape, statistics);
  }
}

// With one image, or this few RoIs, a block of the gather rather looks at all of them than waits
// for lists to be built.
constexpr int64_t kFewRois = 2 * kThreads;

// Allocates the scratch and fills it. The tensor owns the memory the returned views point into.
template <class T, class C = typename Format<T>::Compute, class Rois = SampledRois<C, true>>
RoiStatistics<C> roi_statistics(const Tensor& grad, const Tensor& boxes, const RoiAlignShape& shape,
                                cudaStream_t stream, Tensor* scratch,
                                StickyBit bit = kStickyRoiAlign, const Rois& described = {}) {
  const int64_t n = shape.images;
  // Zeroed part first, each array on a 16-byte boundary.
  int64_t bytes = 0;
  const auto place = [&](int64_t size) {
    const int64_t at = bytes;
    bytes += (size + 15) / 16 * 16;
    return at;
  };
  const int64_t images = place(n * sizeof(ImageStatistics<C>));
  const int64_t nonfinite = place((n + 1) * sizeof(unsigned));
  const int64_t finished = place(sizeof(unsigned long long));
  const int64_t zeroed = bytes;
  const int64_t cursor = place(n * sizeof(int));
  const int64_t rois = place(Rois::kKept ? shape.rois * sizeof(Roi<C>) : int64_t(0));
  const int64_t bounds = place(shape.rois * sizeof(RoiBounds));
  const bool grouped = n > 1 && shape.rois > kFewRois;
  const int64_t list = place(grouped ? shape.rois * sizeof(RoiBounds) : int64_t(0));
  const int64_t tables = place(Rois::kTables ? shape.rois * sizeof(RoiTable) : int64_t(0));
  *scratch = torch::stable::new_empty(grad, {&bytes, 1}, ScalarType::Byte);
  char* memory = mutable_data<char>(*scratch);
  RoiStatistics<C> s;
  s.images = reinterpret_cast<ImageStatistics<C>*>(memory + images);
  s.nonfinite = reinterpret_cast<unsigned*>(memory + nonfinite);
  s.finished = reinterpret_cast<unsigned long long*>(memory + finished);
  s.cursor = reinterpret_cast<int*>(memory + cursor);
  s.rois = reinterpret_cast<Roi<C>*>(memory + rois);
  s.bounds = reinterpret_cast<RoiBounds*>(memory + bounds);
  s.list = grouped ? reinterpret_cast<RoiBounds*>(memory + list) : nullptr;
  s.tables = reinterpret_cast<RoiTable*>(memory + tables);
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(memory, 0, zeroed, stream));
  if (shape.rois == 0) return s;
  const int64_t length = grad.numel() / shape.rois;
  const int64_t chunks = (length + kStatisticsChunk - 1) / kStatisticsChunk;
  TRUNCDET_CHECK(n < (int64_t(1) << 31) && shape.rois < (int64_t(1) << 31),
                 "RoI operators: at most 2^31 - 1 images and RoIs are possible");
  TRUNCDET_CHECK(chunks < 65535, "RoI operators: channels * bins must be at most ",
                 int64_t(65535) * kStatisticsChunk, ", got ", length);
  const dim3 grid(static_cast<unsigned>(shape.rois), static_cast<unsigned>(chunks + 1));
  roi_statistics_kernel<T, C><<<grid, kThreads, 0, stream>>>(
      const_data<T>(grad), length, const_data<C>(boxes), shape, described, s, sticky_word(), bit);
  TRUNCDET_LAUNCH_CHECK();
  return s;
}

}  // namespace truncdet
