// What the backward kernels of rotated RoIAlign need to know before they can add: what RoIAlign's
// own need, and in float32 each RoI's matrix of weights.
#pragma once

#include "roi_rotated_matrix.cuh"

namespace truncdet {

template <class C>
struct RotatedStatistics : RoiStatistics<C> {
  RotatedRoi<C>* boxes;  // [rois]
  RotatedBox* tiled;     // [rois], float32 only
  unsigned* incomplete;  // [images + 1] a RoI of the image has no matrix; last: of any image
  WeightPool pool;
};

// The grid and the roles of its blocks are those of roi_statistics_kernel.
template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    rotated_statistics_kernel(const T* grad, const C* rois, RotatedShape shape,
                              RotatedStatistics<C> statistics, unsigned* sticky) {
  const int64_t k = blockIdx.x;
  if (blockIdx.y == 0) {
    const RotatedRoi<C> roi = make_rotated_roi<C>(rois + 6 * k, shape);
    IndexRange rows, columns;
    roi.cells(&rows, &columns);
    const bool empty = rows.first > rows.last || columns.first > columns.last;
    if (threadIdx.x == 0) {
      if (roi.image < 0) {
        set_sticky(sticky, kStickyRoiAlignRotated);
      } else {
        atomicAdd(&statistics.images[roi.image].count, 1);
      }
      statistics.boxes[k] = roi;
      const int number = static_cast<int>(k), image = static_cast<int>(roi.image);
      statistics.bounds[k] =
          empty
              ? RoiBounds{1, 0, 1, 0, number, 0, 0, image}
              : RoiBounds{rows.first, rows.last, columns.first, columns.last, number, 0, 0, image};
    }
    if constexpr (std::is_same_v<C, float>) {
      int runs_at, pairs_at;
      build_matrix(roi, rows, columns, statistics.pool, &runs_at, &pairs_at);
      if (threadIdx.x == 0 && !empty) {
        if (pairs_at < 0)
          statistics.incomplete[roi.image] = statistics.incomplete[shape.images] = 1;
        statistics.tiled[k] = {roi.center_y,
                               roi.center_x,
                               roi.cosine,
                               roi.sine,
                               roi.y.extent() + roi.slack,
                               roi.x.extent() + roi.slack,
                               runs_at,
                               pairs_at};
      }
    }
  } else {
    const int64_t image = make_rotated_roi<C>(rois + 6 * k, shape).image;
    if (image >= 0)
      look_at_chunk<T, C>(grad, shape.channels * shape.bins(), k, image, shape.images, statistics);
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
    build_lists<C>(shape, statistics);
  }
}

// Allocates the scratch and fills it. The tensor owns the memory the returned views point into.
template <class T>
RotatedStatistics<typename Format<T>::Compute> rotated_statistics(
    const Tensor& grad, const Tensor& rois, const RotatedShape& shape, bool matrices,
    cudaStream_t stream, Tensor* scratch) {
  using C = typename Format<T>::Compute;
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
  const int64_t incomplete = place((n + 1) * sizeof(unsigned));
  const int64_t counters = place(2 * sizeof(unsigned long long));
  const int64_t zeroed = bytes;
  const int64_t cursor = place(n * sizeof(int));
  const int64_t boxes = place(shape.rois * sizeof(RotatedRoi<C>));
  const int64_t bounds = place(shape.rois * sizeof(RoiBounds));
  const bool grouped = n > 1 && shape.rois > kFewRois;
  const int64_t list = place(grouped ? shape.rois * sizeof(RoiBounds) : int64_t(0));
  const int64_t tiled =
      place(std::is_same_v<C, float> ? shape.rois * sizeof(RotatedBox) : int64_t(0));
  const int64_t wanted = std::min(kPoolBytesPerRoi * shape.rois,
                                  kPoolBytesPerCell * n * shape.channels * shape.cells());
  const int64_t capacity = matrices ? std::min(wanted / 16, kMaxPoolBlocks) : 0;
  const int64_t pool = place(capacity * sizeof(WeightPair));
  *scratch = torch::stable::new_empty(grad, {&bytes, 1}, ScalarType::Byte);
  char* memory = mutable_data<char>(*scratch);
  RotatedStatistics<C> s;
  s.images = reinterpret_cast<ImageStatistics<C>*>(memory + images);
  s.nonfinite = reinterpret_cast<unsigned*>(memory + nonfinite);
  s.finished = reinterpret_cast<unsigned long long*>(memory + counters);
  s.cursor = reinterpret_cast<int*>(memory + cursor);
  s.rois = nullptr;
  s.tables = nullptr;
  s.bounds = reinterpret_cast<RoiBounds*>(memory + bounds);
  s.list = grouped ? reinterpret_cast<RoiBounds*>(memory + list) : nullptr;
  s.boxes = reinterpret_cast<RotatedRoi<C>*>(memory + boxes);
  s.tiled = reinterpret_cast<RotatedBox*>(memory + tiled);
  s.incomplete = reinterpret_cast<unsigned*>(memory + incomplete);
  s.pool = {reinterpret_cast<WeightPair*>(memory + pool), capacity, s.finished + 1};
  TRUNCDET_CUDA_CHECK(cudaMemsetAsync(memory, 0, zeroed, stream));
  if (shape.rois == 0) return s;
  const int64_t length = shape.channels * shape.bins();
  const int64_t chunks = (length + kStatisticsChunk - 1) / kStatisticsChunk;
  TRUNCDET_CHECK(n < (int64_t(1) << 31) && shape.rois < (int64_t(1) << 31),
                 "roi_align_rotated_backward: at most 2^31 - 1 images and RoIs are possible");
  TRUNCDET_CHECK(chunks < 65535, "roi_align_rotated_backward: channels * bins must be at most ",
                 int64_t(65535) * kStatisticsChunk, ", got ", length);
  const dim3 grid(static_cast<unsigned>(shape.rois), static_cast<unsigned>(chunks + 1));
  rotated_statistics_kernel<T, C><<<grid, kThreads, 0, stream>>>(
      const_data<T>(grad), const_data<C>(rois), shape, s, sticky_word());
  TRUNCDET_LAUNCH_CHECK();
  return s;
}

}  // namespace truncdet
