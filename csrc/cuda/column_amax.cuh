// The largest magnitude of each image of columns, which lie between those of other images.
#pragma once

#include "../deform_sample.h"
#include "prepare.cuh"

namespace truncdet {

template <class T>
struct ColumnAmaxParams {
  using Word = typename Format<typename Format<T>::Compute>::Word;
  DeformShape shape;
  Divider by_places;
  const T* columns;
  Word* amax;           // [images], zeroed
  uint32_t* nonfinite;  // [images], zeroed
};

// As amax_kernel, for images that lie between each other.
template <class T>
__global__ void column_amax_kernel(ColumnAmaxParams<T> p) {
  using C = typename Format<T>::Compute;
  const DeformShape& s = p.shape;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t count = s.channels * s.taps() * s.places();
  for (int64_t image = blockIdx.y; image < s.images; image += gridDim.y) {
    typename Format<T>::Word largest = 0;
    bool nonfinite = false;
    for (int64_t i = start; i < count; i += kAmaxUnroll * stride) {
      T loaded[kAmaxUnroll];
#pragma unroll
      for (int j = 0; j < kAmaxUnroll; ++j) {
        // Past the end the first element is seen again, which changes nothing.
        const int64_t at = i + j * stride < count ? i + j * stride : i;
        const int64_t row = p.by_places.quotient(at);
        loaded[j] = p.columns[s.row(0, row, image) + at - row * s.places()];
      }
#pragma unroll
      for (int j = 0; j < kAmaxUnroll; ++j) {
        const auto word = magnitude_word<T>(loaded[j]);
        const bool finite = word < infinity_word<T>();
        nonfinite |= !finite;
        largest = finite && word > largest ? word : largest;
      }
    }
    merge_statistics(magnitude_word<C>(widen(bit_copy<T>(largest))), nonfinite, p.amax + image,
                     p.nonfinite + image);
  }
}

template <class T>
void launch_column_amax(const T* columns, const DeformShape& s,
                        const Accumulator<typename Format<T>::Compute>& sums, cudaStream_t stream) {
  const int64_t count = s.channels * s.taps() * s.places();
  const ColumnAmaxParams<T> params{s, Divider(s.places(), count), columns, sums.amax,
                                   sums.nonfinite};
  const dim3 grid = segment_grid(s.images, count, kAmaxUnroll);
  column_amax_kernel<T><<<grid, kThreads, 0, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
