// The forward of rotated RoIAlign: a block takes one RoI and a group of channels. Where its samples
// lie is worked out once in shared memory, for as many bins at a time as fit, and then serves all
// channels.
#pragma once

#include "../roi_align_rotated_host.h"
#include "launch.cuh"

namespace truncdet {

constexpr int kRotatedSamples = 1024;  // of a table; a bin with more takes the slow path
constexpr int kRotatedChannels = 128;  // of a block
constexpr int kRotatedUnroll = 4;      // channels of one thread, which share the look-ups

template <class T>
struct RotatedForwardParams {
  using C = typename Format<T>::Compute;
  const T* input;
  const C* rois;  // [rois, 6]
  RotatedShape shape;
  ImageStrides stride;
  bool channels_last;
  int64_t groups;
  T* out;
  unsigned* sticky;
};

// The first of a sample's four corners (-1: none, the sample lies outside) and all weights. Corners
// of weight zero may not be there.
template <class C>
struct SampleTable {
  int cell[kRotatedSamples];
  C weights[kRotatedSamples][4];
};

template <class C>
__device__ __forceinline__ void fill_table(const RotatedRoi<C>& roi, int first_bin, int bins,
                                           SampleTable<C>* table) {
  const int per_bin = roi.y.grid * roi.x.grid;
  for (int s = threadIdx.x; s < bins * per_bin; s += kThreads) {
    const int bin = first_bin + s / per_bin, i = s % per_bin;
    const C along_y = roi.y.coordinate(bin / roi.x.bins, i / roi.x.grid);
    const C along_x = roi.x.coordinate(bin % roi.x.bins, i % roi.x.grid);
    const Sample<C> y = roi.rows_of(along_y, along_x), x = roi.columns_of(along_y, along_x);
    table->cell[s] = y.low < 0 || x.low < 0 ? -1 : y.low * roi.width + x.low;
    table->weights[s][0] = y.low_weight * x.low_weight;
    table->weights[s][1] = y.low_weight * x.high_weight;
    table->weights[s][2] = y.high_weight * x.low_weight;
    table->weights[s][3] = y.high_weight * x.high_weight;
  }
}

// sample_value with the weights at hand.
template <class C, class T>
__device__ __forceinline__ C table_value(const T* at, const C (&weights)[4], int64_t right,
                                         int64_t down) {
  C value = weights[0] * widen(at[0]);
  if (weights[1] != C(0)) value += weights[1] * widen(at[right]);
  if (weights[2] != C(0)) value += weights[2] * widen(at[down]);
  if (weights[3] != C(0)) value += weights[3] * widen(at[down + right]);
  return value;
}

// One bin of one channel, samples worked out on the way.
template <class C, class T>
static __device__ __noinline__ C slow_output(const RotatedRoi<C>& roi, const T* plane,
                                             int64_t column, int bin) {
  const int p = bin / roi.x.bins, q = bin % roi.x.bins;
  IndexRange rows, columns;
  roi.samples_on_map(&rows, &columns);
  rows = roi.y.of_bin(rows, p);
  columns = roi.x.of_bin(columns, q);
  C sum = C(0);
  for (int i = rows.first; i <= rows.last; ++i) {
    const C along_y = roi.y.coordinate(p, i);
    for (int j = columns.first; j <= columns.last; ++j) {
      const C along_x = roi.x.coordinate(q, j);
      const Sample<C> y = roi.rows_of(along_y, along_x), x = roi.columns_of(along_y, along_x);
      if (y.low < 0 || x.low < 0) continue;
      sum += sample_value(y, x, roi.width,
                          [&](int64_t cell) { return C(widen(plane[cell * column])); });
    }
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads, std::is_same_v<T, double> ? 1 : 3)
    rotated_forward_kernel(RotatedForwardParams<T> p) {
  using C = typename Format<T>::Compute;
  __shared__ SampleTable<C> table;
  __shared__ RotatedRoi<C> roi;
  const int bins = static_cast<int>(p.shape.bins());
  for (int64_t work = blockIdx.x; work < p.shape.rois * p.groups; work += gridDim.x) {
    // work = RoI * groups + group
    const int64_t k = work / p.groups, channel = work % p.groups * kRotatedChannels;
    const int channels =
        static_cast<int>(min(int64_t(kRotatedChannels), p.shape.channels - channel));
    __syncthreads();  // the RoI before may still be read
    if (threadIdx.x == 0) {
      roi = make_rotated_roi<C>(p.rois + 6 * k, p.shape);
      if (roi.image < 0) set_sticky(p.sticky, kStickyRoiAlignRotated);
    }
    __syncthreads();
    const T* planes =
        p.input + max(roi.image, int64_t(0)) * p.stride.image + channel * p.stride.channel;
    T* target = p.out + (k * p.shape.channels + channel) * bins;
    const int per_bin = roi.y.grid * roi.x.grid;
    // Bins of a round.
    const int fit = per_bin == 0 ? bins : kRotatedSamples / per_bin;
    const int round = fit == 0 ? bins : min(bins, fit);
    // Thread i takes one bin of channels c, c + quarter, c + 2 quarter, ...
    const int quarter = (channels + kRotatedUnroll - 1) / kRotatedUnroll;
    for (int first = 0; first < bins; first += round) {
      const int here = min(round, bins - first);
      __syncthreads();  // the table of the round before may still be read
      if (fit != 0) fill_table(roi, first, here, &table);
      __syncthreads();
      for (int64_t i = threadIdx.x; i < int64_t(quarter) * here; i += kThreads) {
        // Neighbouring lanes read, and without channels_last also write, neighbouring elements.
        const int c = static_cast<int>(p.channels_last ? i % quarter : i / here);
        const int b = static_cast<int>(p.channels_last ? i / quarter : i % here);
        const T* plane = planes + c * p.stride.channel;
        const int64_t step = quarter * p.stride.channel;
        C sums[kRotatedUnroll] = {};
        if (fit == 0) {
          for (int j = 0; j < kRotatedUnroll && c + j * quarter < channels; ++j) {
            sums[j] = slow_output(roi, plane + j * step, p.stride.column, first + b);
          }
        } else {
          for (int s = b * per_bin; s < (b + 1) * per_bin; ++s) {
            const int cell = table.cell[s];
            if (cell < 0) continue;
            const T* at = plane + cell * p.stride.column;
#pragma unroll
            for (int j = 0; j < kRotatedUnroll; ++j) {
              if (c + j * quarter < channels) {
                sums[j] +=
                    table_value(at + j * step, table.weights[s], p.stride.column, p.stride.row);
              }
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kRotatedUnroll; ++j) {
          if (c + j * quarter < channels) {
            target[int64_t(c + j * quarter) * bins + first + b] = narrow<T>(sums[j] / roi.count);
          }
        }
      }
    }
  }
}

template <class T>
void launch_rotated_forward(const Tensor& input, const Tensor& rois, const Tensor& out,
                            const RotatedShape& shape, bool channels_last, cudaStream_t stream) {
  const int64_t groups = (shape.channels + kRotatedChannels - 1) / kRotatedChannels;
  const RotatedForwardParams<T> params{const_data<T>(input),
                                       const_data<typename Format<T>::Compute>(rois),
                                       shape,
                                       image_strides(shape, channels_last),
                                       channels_last,
                                       groups,
                                       mutable_data<T>(out),
                                       sticky_word()};
  rotated_forward_kernel<T><<<blocks_for(shape.rois * groups, 1), kThreads, 0, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
