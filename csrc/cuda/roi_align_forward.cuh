// RoIAlign's forward with average pooling. A block takes one RoI and a group of channels, builds
// the two weight tables once in shared memory, and every output is a short double loop over them.
// kSensitive: output channel c of bin b reads input channel c * bins + b (ps_roi_align).
#pragma once

#include "../roi_align_host.h"
#include "launch.cuh"

namespace truncdet {

constexpr int kTableEntries = 1024;    // an axis; a RoI with more takes the slow path of the kernel
constexpr int kForwardChannels = 128;  // NCHW: channels of one block
constexpr int kForwardUnroll = 4;      // channels of one thread, which share the table look-ups
constexpr int64_t kForwardStageBytes = 48 << 10;

// Division by a number known at launch: n / d for 0 <= n < 2^31 (Granlund and Montgomery, "Division
// by invariant integers using multiplication", PLDI 1994, with a 33-bit multiplier's low part).
struct Divisor {
  uint32_t divisor, multiplier;
  int shift;

  explicit Divisor(uint32_t d) : divisor(d), multiplier(0), shift(0) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
  __device__ uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t(__umulhi(n, multiplier)) + n) >> shift);
  }
};

struct TableEntry {
  int cell;
  float weight;
};

// The non-zero cells of each bin of one axis: bin b owns entries [start[b], end[b]).
struct AxisTable {
  TableEntry* entries;
  int* start;
  int* end;
};

// Places an axis may need for one bin: its cells, but no more than two a sample.
template <class C>
__device__ int bin_capacity(const Axis<C>& axis, int bin) {
  int first, last;
  axis.range(bin, &first, &last);
  return first > last ? 0 : min(last - first + 1, 2 * axis.grid);
}

// One thread a bin. `scale` multiplies cells into offsets. Cells ascend with the samples, so a
// sample can only meet the last two entries.
__device__ inline void fill_bin(const Axis<float>& axis, int bin, float divisor, int scale,
                                const AxisTable& table) {
  TableEntry* const begin = table.entries + table.start[bin];
  TableEntry* end = begin;
  const auto add = [&](int cell, float weight) {
    TableEntry* e = end;
    while (e != begin && (e - 1)->cell > cell) --e;
    if (e != begin && (e - 1)->cell == cell) {
      (e - 1)->weight += weight;
    } else if (weight != 0.f) {
      *end++ = {cell, weight};
    }
  };
  for (int j = axis.first_at(bin, -1.f); j < axis.grid; ++j) {
    const Sample<float> s = axis.sample(bin, j);
    if (s.low < 0) break;
    add(s.low, s.low_weight);
    if (s.high != s.low) add(s.high, s.high_weight);
  }
  for (TableEntry* e = begin; e != end; ++e) {
    e->weight /= divisor;
    e->cell *= scale;
  }
  table.end[bin] = static_cast<int>(end - table.entries);
}

// Builds both tables; false if the RoI does not fit. All threads of the block take part.
__device__ inline bool build_tables(const Roi<float>& roi, int bins_y, int bins_x, int scale_y,
                                    int scale_x, const AxisTable& y, const AxisTable& x) {
  __shared__ bool fits;
  // Capacities go to `end` for a moment; one thread turns them into starts.
  for (int i = threadIdx.x; i < bins_y + bins_x; i += kThreads) {
    if (i < bins_y) {
      y.end[i] = bin_capacity(roi.y, i);
    } else {
      x.end[i - bins_y] = bin_capacity(roi.x, i - bins_y);
    }
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    const AxisTable& table = threadIdx.x == 0 ? y : x;
    const int bins = threadIdx.x == 0 ? bins_y : bins_x;
    int64_t total = 0;
    for (int i = 0; i < bins; ++i) {
      table.start[i] = static_cast<int>(total < kTableEntries ? total : kTableEntries);
      total += table.end[i];
    }
    const bool good = total <= kTableEntries;
    const unsigned both = __ballot_sync(3u, good);
    if (threadIdx.x == 0) fits = both == 3u;
  }
  __syncthreads();
  if (!fits) return false;
  for (int i = threadIdx.x; i < bins_y + bins_x; i += kThreads) {
    if (i < bins_y) {
      fill_bin(roi.y, i, 1.f, scale_y, y);
    } else {
      fill_bin(roi.x, i - bins_y, roi.count, scale_x, x);
    }
  }
  __syncthreads();
  return true;
}

// One bin of several channels, `step` elements apart: each table look-up serves all of them.
template <class T, int kNumber>
__device__ __forceinline__ void table_outputs(const T* __restrict__ plane, int64_t step,
                                              const AxisTable& y, const AxisTable& x, int p, int q,
                                              float (&sums)[kNumber]) {
#pragma unroll
  for (int c = 0; c < kNumber; ++c) sums[c] = 0.f;
  const int x_begin = x.start[q], x_end = x.end[q], y_end = y.end[p];
  for (int i = y.start[p]; i < y_end; ++i) {
    const TableEntry row = y.entries[i];
    const T* line = plane + row.cell;
    float parts[kNumber] = {};
#pragma unroll 2
    for (int j = x_begin; j < x_end; ++j) {
      const TableEntry column = x.entries[j];
      const T* at = line + column.cell;
#pragma unroll
      for (int c = 0; c < kNumber; ++c) parts[c] += column.weight * widen(at[c * step]);
    }
#pragma unroll
    for (int c = 0; c < kNumber; ++c) sums[c] += row.weight * parts[c];
  }
}

// One output, weights computed on the fly: any RoI, any type.
template <class T, class C>
__device__ C direct_output(const T* plane, const ImageStrides& stride, const Roi<C>& roi, int p,
                           int q) {
  int first_y, last_y, first_x, last_x;
  roi.y.range(p, &first_y, &last_y);
  roi.x.range(q, &first_x, &last_x);
  C sum = C(0);
  for (int y = first_y; y <= last_y; ++y) {
    const C wy = roi.y.weight(p, y);
    if (wy == C(0)) continue;
    C part = C(0);
    for (int x = first_x; x <= last_x; ++x) {
      const C wx = x_weight(roi, q, x);
      if (wx == C(0)) continue;
      part += wx * widen(plane[y * stride.row + x * stride.column]);
    }
    sum += wy * part;
  }
  return sum;
}

// Channels of the output. Between the planes of two of them lie as many as there are bins if every
// bin has one of its own.
template <bool kSensitive>
TRUNCDET_HD int64_t output_channels(const RoiAlignShape& shape) {
  return kSensitive ? shape.channels / shape.bins() : shape.channels;
}
template <bool kSensitive>
constexpr StickyBit kForwardBit = kSensitive ? kStickyPsRoiAlign : kStickyRoiAlign;

struct ForwardPlan {
  int groups;          // channel groups of a block
  int group_channels;  // channels of a group
  Divisor bins, pooled_width;
  bool tables;           // the bins fit the tables at all
  bool staged;           // channels_last: outputs go through shared memory
  int64_t shared_bytes;  // dynamic: starts and ends, then the stage
};

template <class T, bool kSensitive>
__global__ void __launch_bounds__(kThreads)
    roi_forward_kernel(const T* __restrict__ input, ImageStrides stride,
                       const float* __restrict__ boxes, RoiAlignShape shape, ForwardPlan plan,
                       T* __restrict__ out, unsigned* sticky) {
  extern __shared__ int dynamic[];
  __shared__ TableEntry entries[2][kTableEntries];
  const int64_t k = blockIdx.x / plan.groups;
  const int64_t channel = int64_t(blockIdx.x % plan.groups) * plan.group_channels;
  const int channels = static_cast<int>(
      min(int64_t(plan.group_channels), output_channels<kSensitive>(shape) - channel));
  const int bins_y = static_cast<int>(shape.pooled_height);
  const int bins_x = static_cast<int>(shape.pooled_width);
  const int bins = bins_y * bins_x;
  const Roi<float> roi = make_roi<float>(boxes + 5 * k, shape);
  if (roi.image < 0 && threadIdx.x == 0) set_sticky(sticky, kForwardBit<kSensitive>);
  const AxisTable y{entries[0], dynamic, dynamic + bins_y};
  const AxisTable x{entries[1], dynamic + 2 * bins_y, dynamic + 2 * bins_y + bins_x};
  const bool tables =
      plan.tables && build_tables(roi, bins_y, bins_x, static_cast<int>(stride.row), 1, y, x);
  const int64_t step = kSensitive ? bins * stride.channel : stride.channel;
  const T* base = input + max(roi.image, int64_t(0)) * stride.image + channel * step;
  T* target = out + (k * output_channels<kSensitive>(shape) + channel) * bins;
  // Thread i takes one bin of channels c, c + quarter, c + 2 quarter, ...
  const int quarter = (channels + kForwardUnroll - 1) / kForwardUnroll;
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(quarter * bins); i += kThreads) {
    const uint32_t c = plan.bins.divide(i), bin = i - c * bins;
    const uint32_t p = plan.pooled_width.divide(bin), q = bin - p * bins_x;
    const T* plane = base + c * step;
    if (kSensitive) plane += bin * stride.channel;
    float sums[kForwardUnroll];
    if (tables && channels % kForwardUnroll == 0) {
      table_outputs<T, kForwardUnroll>(plane, quarter * step, y, x, p, q, sums);
    } else {
      for (int j = 0; j < kForwardUnroll; ++j) {
        if (c + j * quarter >= static_cast<uint32_t>(channels)) break;
        const T* own = plane + j * quarter * step;
        if (tables) {
          float one[1];
          table_outputs<T, 1>(own, 0, y, x, p, q, one);
          sums[j] = one[0];
        } else {
          sums[j] = direct_output<T, float>(own, stride, roi, p, q);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kForwardUnroll; ++j) {
      if (c + j * quarter < static_cast<uint32_t>(channels)) {
        target[i + j * quarter * bins] = narrow<T>(sums[j]);
      }
    }
  }
}

// channels_last: a lane is a channel, a warp takes bins in turn.
template <class T>
__global__ void __launch_bounds__(kThreads)
    roi_forward_channels_last_kernel(const T* __restrict__ input, ImageStrides stride,
                                     const float* __restrict__ boxes, RoiAlignShape shape,
                                     ForwardPlan plan, T* __restrict__ out, unsigned* sticky) {
  extern __shared__ int dynamic[];
  __shared__ TableEntry entries[2][kTableEntries];
  const int64_t k = blockIdx.x / plan.groups;
  const int64_t channel = int64_t(blockIdx.x % plan.groups) * plan.group_channels;
  const int channels =
      static_cast<int>(min(int64_t(plan.group_channels), shape.channels - channel));
  const int bins_y = static_cast<int>(shape.pooled_height);
  const int bins_x = static_cast<int>(shape.pooled_width);
  const int bins = bins_y * bins_x;
  const Roi<float> roi = make_roi<float>(boxes + 5 * k, shape);
  if (roi.image < 0 && threadIdx.x == 0) set_sticky(sticky, kStickyRoiAlign);
  const AxisTable y{entries[0], dynamic, dynamic + bins_y};
  const AxisTable x{entries[1], dynamic + 2 * bins_y, dynamic + 2 * bins_y + bins_x};
  // The row stride (width * channels) may not fit an offset of 32 bits; cells of a plane do.
  const bool tables =
      plan.tables && build_tables(roi, bins_y, bins_x, static_cast<int>(shape.width), 1, y, x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stage_stride = bins | 1;
  T* stage = reinterpret_cast<T*>(dynamic + 2 * (bins_y + bins_x));
  const T* base = input + max(roi.image, int64_t(0)) * stride.image + channel;
  T* target = out + (k * shape.channels + channel) * bins;
  for (int c = lane; c < (channels + 31) / 32 * 32; c += 32) {
    const T* plane = base + min(c, channels - 1);
    for (uint32_t bin = warp; bin < static_cast<uint32_t>(bins); bin += kThreads / 32) {
      const uint32_t p = plan.pooled_width.divide(bin), q = bin - p * bins_x;
      float sum = 0.f;
      if (tables) {
        for (int i = y.start[p]; i < y.end[p]; ++i) {
          const TableEntry row = y.entries[i];
          float part = 0.f;
          for (int j = x.start[q]; j < x.end[q]; ++j) {
            const TableEntry column = x.entries[j];
            part += column.weight * widen(plane[int64_t(row.cell + column.cell) * shape.channels]);
          }
          sum += row.weight * part;
        }
      } else {
        sum = direct_output<T, float>(plane, stride, roi, p, q);
      }
      if (c < channels) {
        (plan.staged ? stage[c * stage_stride + bin] : target[int64_t(c) * bins + bin]) =
            narrow<T>(sum);
      }
    }
  }
  if (!plan.staged) return;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(channels * bins); i += kThreads) {
    const uint32_t c = plan.bins.divide(i);
    target[i] = stage[c * stage_stride + (i - c * bins)];
  }
}

// float64: one thread an output, no tables.
template <class T, class C, bool kSensitive>
__global__ void __launch_bounds__(kThreads)
    roi_forward_direct_kernel(const T* input, ImageStrides stride, const C* boxes,
                              RoiAlignShape shape, T* out, unsigned* sticky) {
  const int64_t channels = output_channels<kSensitive>(shape);
  const int64_t total = shape.rois * channels * shape.bins();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * kThreads) {
    // i = ((k * channels + c) * pooled_height + p) * pooled_width + q
    const int q = static_cast<int>(i % shape.pooled_width);
    const int p = static_cast<int>(i / shape.pooled_width % shape.pooled_height);
    const int64_t c = i / shape.bins() % channels, k = i / shape.bins() / channels;
    // i - k * channels * bins is the input channel if every bin has its own.
    const int64_t from = kSensitive ? i - k * channels * shape.bins() : c;
    const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
    if (roi.image < 0) set_sticky(sticky, kForwardBit<kSensitive>);
    const T* plane = input + max(roi.image, int64_t(0)) * stride.image + from * stride.channel;
    out[i] = narrow<T>(direct_output<T, C>(plane, stride, roi, p, q));
  }
}

// `channels_last` is not for kSensitive.
template <class T, bool kSensitive = false>
void launch_forward(const Tensor& input, const Tensor& boxes, const Tensor& out,
                    const RoiAlignShape& shape, bool channels_last, cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const ImageStrides stride = image_strides(shape, channels_last);
  const int64_t bins = shape.bins();
  const int64_t most = channels_last ? 32 : kForwardChannels;
  const int64_t channels = output_channels<kSensitive>(shape);
  const int64_t groups = (channels + most - 1) / most;
  // Offsets inside a group and the grid must fit 31 bits; nothing sensible is larger.
  const bool small = bins < (1 << 20) && shape.rois * groups < (int64_t(1) << 31);
  if (std::is_same_v<T, double> || !small) {
    roi_forward_direct_kernel<T, C, kSensitive>
        <<<blocks_for(shape.rois * channels * bins), kThreads, 0, stream>>>(
            const_data<T>(input), stride, const_data<C>(boxes), shape, mutable_data<T>(out),
            sticky_word());
    TRUNCDET_LAUNCH_CHECK();
    return;
  }
  if constexpr (!std::is_same_v<T, double>) {
    const int64_t ends = 2 * (shape.pooled_height + shape.pooled_width) * sizeof(int);
    const int64_t stage = most * (bins | 1) * sizeof(T);
    ForwardPlan plan{static_cast<int>(groups),
                     static_cast<int>(most),
                     Divisor(static_cast<uint32_t>(bins)),
                     Divisor(static_cast<uint32_t>(shape.pooled_width)),
                     shape.pooled_height <= kTableEntries && shape.pooled_width <= kTableEntries,
                     false,
                     0};
    plan.shared_bytes = plan.tables ? ends : 0;
    // Static tables and dynamic memory together stay below what needs no permission.
    const int64_t room = kForwardStageBytes - sizeof(TableEntry) * 2 * kTableEntries - 64;
    if (channels_last && plan.shared_bytes + stage <= room) {
      plan.staged = true;
      plan.shared_bytes = ends + stage;
    }
    auto* kernel = roi_forward_kernel<T, kSensitive>;
    if constexpr (!kSensitive) {
      if (channels_last) kernel = roi_forward_channels_last_kernel<T>;
    }
    kernel<<<static_cast<unsigned>(shape.rois * groups), kThreads, plan.shared_bytes, stream>>>(
        const_data<T>(input), stride, const_data<float>(boxes), shape, plan, mutable_data<T>(out),
        sticky_word());
    TRUNCDET_LAUNCH_CHECK();
  }
}

}  // namespace truncdet
