// The forward of pooling over whole cells. A block takes one RoI and a group of channels, and
// computes the cells of its bins once.
#pragma once

#include "../roi_align_host.h"
#include "../roi_pool.h"
#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {

constexpr int kRangeBins = 256;     // an axis; ranges of a RoI with more are computed when needed
constexpr int kPoolChannels = 128;  // output channels of a block, channels first
constexpr int kPoolLastChannels = 32;  // channels last: one a lane
constexpr int64_t kPoolStageBytes = 40 << 10;

template <class C>
struct PoolForwardParams {
  ImageStrides stride;
  const C* boxes;
  RoiAlignShape shape;
  PoolRule rule;
  int64_t channels, groups;  // of the output
  int group_channels;
  Divider by_bins, by_width;
  unsigned* sticky;
  StickyBit bit;
};

// The RoI of a block and the cells of its bins.
template <class C, bool kMean>
struct BlockRoi {
  PoolRoi<C> roi;
  CellRange* ranges;  // [kRangeBins] rows, then columns
  bool table;

  // All threads of the block take part.
  __device__ BlockRoi(const PoolForwardParams<C>& p, int64_t k, CellRange* shared)
      : roi(make_pool_roi(p.boxes + 5 * k, p.shape, p.rule)), ranges(shared) {
    const int rows = static_cast<int>(p.shape.pooled_height);
    const int columns = static_cast<int>(p.shape.pooled_width);
    table = rows <= kRangeBins && columns <= kRangeBins;
    if (roi.image < 0 && threadIdx.x == 0) set_sticky(p.sticky, p.bit);
    if (table) {
      for (int i = threadIdx.x; i < rows; i += kThreads) ranges[i] = cells(roi.y, i);
      for (int i = threadIdx.x; i < columns; i += kThreads) {
        ranges[kRangeBins + i] = cells(roi.x, i);
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ CellRange rows(int p) const {
    return table ? ranges[p] : cells(roi.y, p);
  }
  __device__ __forceinline__ CellRange columns(int q) const {
    return table ? ranges[kRangeBins + q] : cells(roi.x, q);
  }

 private:
  static __device__ __forceinline__ CellRange cells(const PoolAxis<C>& axis, int bin) {
    return kMean ? mean_cells(axis, bin) : axis.cells(bin);
  }
};

// A thread takes one output. With kMean every bin has an input channel of its own.
template <class T, class C, bool kMean>
__global__ void __launch_bounds__(kThreads)
    roi_pool_kernel(const T* __restrict__ input, PoolForwardParams<C> p, T* __restrict__ out,
                    int32_t* __restrict__ argmax) {
  __shared__ CellRange ranges[2 * kRangeBins];
  const int64_t k = blockIdx.x / p.groups;
  const int64_t channel = (blockIdx.x - k * p.groups) * p.group_channels;
  const BlockRoi<C, kMean> roi(p, k, ranges);
  const int64_t bins = p.shape.bins();
  const int64_t number = min(int64_t(p.group_channels), p.channels - channel) * bins;
  const int64_t first = (k * p.channels + channel) * bins;
  const int width = static_cast<int>(p.shape.width);
  const T* base = input + max(roi.roi.image, int64_t(0)) * p.stride.image +
                  (kMean ? channel * bins : channel) * p.stride.channel;
  for (int64_t i = threadIdx.x; i < number; i += kThreads) {
    // i = (c * pooled_height + bin_y) * pooled_width + bin_x
    const int64_t c = p.by_bins.quotient(i), bin = i - c * bins;
    const int64_t line = p.by_width.quotient(bin);
    const CellRange rows = roi.rows(static_cast<int>(line));
    const CellRange columns = roi.columns(static_cast<int>(bin - line * p.shape.pooled_width));
    const T* plane = base + (kMean ? i : c) * p.stride.channel;
    const auto load = [&](int y, int x) {
      return widen(plane[y * p.stride.row + x * p.stride.column]);
    };
    if constexpr (kMean) {
      out[first + i] = narrow<T>(mean_cell<C>(rows, columns, load));
    } else {
      const MaxCell<C> best = max_cell<C>(rows, columns, width, load);
      out[first + i] = narrow<T>(best.value);
      argmax[first + i] = best.cell;
    }
  }
}

// Channels last: a lane is a channel, a warp takes bins in turn. Outputs go through shared memory
// where they fit.
template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    roi_pool_channels_last_kernel(const T* __restrict__ input, PoolForwardParams<C> p, bool staged,
                                  T* __restrict__ out, int32_t* __restrict__ argmax) {
  extern __shared__ uint4 pool_memory[];
  __shared__ CellRange ranges[2 * kRangeBins];
  const int64_t k = blockIdx.x / p.groups;
  const int64_t channel = (blockIdx.x - k * p.groups) * p.group_channels;
  const BlockRoi<C, false> roi(p, k, ranges);
  const int64_t bins = p.shape.bins();
  const int channels = static_cast<int>(min(int64_t(p.group_channels), p.channels - channel));
  const int64_t first = (k * p.channels + channel) * bins;
  const int width = static_cast<int>(p.shape.width);
  const int lane = threadIdx.x % 32;
  // Lanes of one bin then meet in no bank.
  const int stage_stride = staged ? static_cast<int>(bins) | 1 : 0;
  int32_t* const stage_cells = reinterpret_cast<int32_t*>(pool_memory);
  T* const stage_values = reinterpret_cast<T*>(stage_cells + kPoolLastChannels * stage_stride);
  const T* plane = input + max(roi.roi.image, int64_t(0)) * p.stride.image +
                   (channel + min(lane, channels - 1)) * p.stride.channel;
  for (int64_t bin = threadIdx.x / 32; bin < bins; bin += kThreads / 32) {
    const int64_t line = p.by_width.quotient(bin);
    const MaxCell<C> best = max_cell<C>(
        roi.rows(static_cast<int>(line)),
        roi.columns(static_cast<int>(bin - line * p.shape.pooled_width)), width,
        [&](int y, int x) { return widen(plane[y * p.stride.row + x * p.stride.column]); });
    if (lane >= channels) continue;
    if (staged) {
      stage_values[lane * stage_stride + bin] = narrow<T>(best.value);
      stage_cells[lane * stage_stride + bin] = best.cell;
    } else {
      out[first + lane * bins + bin] = narrow<T>(best.value);
      argmax[first + lane * bins + bin] = best.cell;
    }
  }
  if (!staged) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < channels * bins; i += kThreads) {
    const int64_t c = p.by_bins.quotient(i);
    out[first + i] = stage_values[c * stage_stride + i - c * bins];
    argmax[first + i] = stage_cells[c * stage_stride + i - c * bins];
  }
}

// kMean: `argmax` is null and the input's channels come first.
template <class T, bool kMean>
void launch_pool_forward(const Tensor& input, const Tensor& boxes, const RoiAlignShape& shape,
                         PoolRule rule, bool channels_last, StickyBit bit, T* out, int32_t* argmax,
                         cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const int64_t bins = shape.bins(), channels = kMean ? shape.channels / bins : shape.channels;
  const int group = channels_last ? kPoolLastChannels : kPoolChannels;
  const int64_t groups = (channels + group - 1) / group, blocks = shape.rois * groups;
  TRUNCDET_CHECK(blocks < (int64_t(1) << 31),
                 "RoI operators: RoIs times channels must be below 2^31 * ", group);
  const PoolForwardParams<C> params{image_strides(shape, channels_last),
                                    const_data<C>(boxes),
                                    shape,
                                    rule,
                                    channels,
                                    groups,
                                    group,
                                    Divider(bins, group * bins),
                                    Divider(shape.pooled_width, bins),
                                    sticky_word(),
                                    bit};
  const T* features = const_data<T>(input);
  if constexpr (!kMean) {
    if (channels_last) {
      const int64_t bytes = kPoolLastChannels * (bins | 1) * (sizeof(T) + sizeof(int32_t));
      const bool staged = bytes <= kPoolStageBytes;
      roi_pool_channels_last_kernel<T>
          <<<static_cast<unsigned>(blocks), kThreads, staged ? bytes : 0, stream>>>(
              features, params, staged, out, argmax);
      TRUNCDET_LAUNCH_CHECK();
      return;
    }
  }
  roi_pool_kernel<T, C, kMean>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(features, params, out, argmax);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
