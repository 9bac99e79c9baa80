// RoIAlign's backward through int64 atomics into a buffer: the schedule for float64, for outputs
// too large for the gather, and for max pooling. Same contributions, same bits.
#pragma once

#include "../roi_align_max.h"
#include "prepare.cuh"
#include "roi_align_statistics.cuh"

namespace truncdet {

template <class T>
struct AtomicParams {
  using C = typename Format<T>::Compute;
  const T* grad;          // [rois, channels, bins]
  const int32_t* argmax;  // [rois, channels, bins], max pooling only
  RoiAlignShape shape;
  RoiStatistics<C> statistics;
  ImageStrides stride;  // of the gradient image, and so of the accumulators
  Accumulator<C> sums;
  int32_t* headrooms;  // [images]
  int64_t cells;
};

// The scales as the final rounding wants them, zero sums, and no flags if there will be any.
template <class T>
__global__ void __launch_bounds__(kThreads) roi_scale_kernel(AtomicParams<T> p, Zeros zeros) {
  zeros(blockIdx.x, gridDim.x);
  if (p.statistics.nonfinite[p.shape.images] != 0) {
    zero_bytes(p.sums.flags.output, p.cells * p.sums.flags.element,
               int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
  }
  if (blockIdx.x != 0) return;
  for (int64_t i = threadIdx.x; i < p.shape.images; i += kThreads) {
    p.sums.amax[i] = p.statistics.images[i].amax;
    p.sums.nonfinite[i] = p.statistics.nonfinite[i];
    p.headrooms[i] = roi_headroom(p.statistics.images[i].count, p.shape.bins());
  }
}

// A block takes one RoI, its warps take cells in turn, lanes are channels.
template <class T>
__global__ void __launch_bounds__(kThreads) roi_atomic_kernel(AtomicParams<T> p) {
  using C = typename Format<T>::Compute;
  const int64_t k = blockIdx.x;
  const Roi<C> roi = p.statistics.rois[k];
  const RoiBounds bounds = p.statistics.bounds[k];
  if (roi.image < 0 || bounds.first_y > bounds.last_y) return;
  const Scale<C> scale = p.statistics.images[roi.image].scale(p.shape.bins());
  const bool flagged = p.statistics.nonfinite[roi.image] != 0;
  const int columns = bounds.last_x - bounds.first_x + 1;
  const int64_t cells = int64_t(bounds.last_y - bounds.first_y + 1) * columns;
  const int bins_y = static_cast<int>(p.shape.pooled_height);
  const int bins_x = static_cast<int>(p.shape.pooled_width);
  for (int64_t i = threadIdx.x / 32 + int64_t(blockIdx.y) * (kThreads / 32); i < cells;
       i += int64_t(gridDim.y) * (kThreads / 32)) {
    const int y = bounds.first_y + static_cast<int>(i / columns);
    const int x = bounds.first_x + static_cast<int>(i % columns);
    int first_p, last_p, first_q, last_q;
    roi.y.bins_near(y, bins_y, &first_p, &last_p);
    roi.x.bins_near(x, bins_x, &first_q, &last_q);
    for (int64_t c = threadIdx.x % 32; c < p.shape.channels; c += 32) {
      const T* g = p.grad + (k * p.shape.channels + c) * p.shape.bins();
      C contribution = C(0);
      unsigned seen = 0;
      for (int bin_y = first_p; bin_y <= last_p; ++bin_y) {
        const C wy = roi.y.weight(bin_y, y);
        if (wy == C(0)) continue;
        for (int bin_x = first_q; bin_x <= last_q; ++bin_x) {
          const C wx = x_weight(roi, bin_x, x);
          if (wx == C(0)) continue;
          const C raw = widen(g[int64_t(bin_y) * bins_x + bin_x]);
          contribution += (wy * wx) * scale.normalise(raw);
          seen |= nonfinite_flag(raw);
        }
      }
      const int64_t cell = roi.image * p.stride.image + c * p.stride.channel + y * p.stride.row +
                           x * p.stride.column;
      p.sums.add(cell, scale, contribution);
      if (flagged && seen != 0) p.sums.flags.template add<T>(cell, seen);
    }
  }
}

// Max pooling: one thread a bin.
template <class T>
__global__ void __launch_bounds__(kThreads) roi_max_backward_kernel(AtomicParams<T> p) {
  using C = typename Format<T>::Compute;
  const int64_t total = p.shape.rois * p.shape.channels * p.shape.bins();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * kThreads) {
    // i = ((k * channels + c) * pooled_height + bin_y) * pooled_width + bin_x
    const int bin_x = static_cast<int>(i % p.shape.pooled_width);
    const int bin_y = static_cast<int>(i / p.shape.pooled_width % p.shape.pooled_height);
    const int64_t c = i / p.shape.bins() % p.shape.channels;
    const Roi<C> roi = p.statistics.rois[i / p.shape.bins() / p.shape.channels];
    if (roi.image < 0) continue;
    const Scale<C> scale = p.statistics.images[roi.image].scale(p.shape.bins());
    const C raw = widen(p.grad[i]), value = scale.normalise(raw);
    const unsigned seen = nonfinite_flag(raw);
    visit_chosen(roi, bin_y, bin_x, p.argmax[i], [&](int y, int x, C weight) {
      const int64_t cell = roi.image * p.stride.image + c * p.stride.channel + y * p.stride.row +
                           x * p.stride.column;
      p.sums.add(cell, scale, weight * value);
      if (seen != 0) p.sums.flags.template add<T>(cell, seen);
    });
  }
}

constexpr int kAtomicBlocks = 16;  // blocks that share the cells of one RoI

template <class T>
void launch_atomic(const Tensor& grad, const Tensor* argmax, const Tensor& out,
                   const RoiAlignShape& shape,
                   const RoiStatistics<typename Format<T>::Compute>& statistics, bool channels_last,
                   cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const bool two_limbs = std::is_same_v<C, double>;
  const int64_t cells = out.numel();
  const int64_t sums = Accumulator<C>::bytes(cells, shape.images, two_limbs);
  const int64_t bytes = sums + 4 * shape.images;
  Tensor scratch = torch::stable::new_empty(grad, {&bytes, 1}, ScalarType::Byte);
  char* memory = mutable_data<char>(scratch);
  const AtomicParams<T> params{const_data<T>(grad),
                               argmax == nullptr ? nullptr : const_data<int32_t>(*argmax),
                               shape,
                               statistics,
                               image_strides(shape, channels_last),
                               Accumulator<C>(memory, cells, shape.images, two_limbs, out),
                               reinterpret_cast<int32_t*>(memory + sums),
                               cells};
  const Zeros zeros{memory, Accumulator<C>::sum_bytes(cells, two_limbs)};
  roi_scale_kernel<T><<<zeros.blocks(), kThreads, 0, stream>>>(params, zeros);
  TRUNCDET_LAUNCH_CHECK();
  if (shape.rois > 0 && argmax != nullptr) {
    roi_max_backward_kernel<T><<<blocks_for(grad.numel()), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  } else if (shape.rois > 0) {
    const dim3 grid(static_cast<unsigned>(shape.rois), kAtomicBlocks);
    roi_atomic_kernel<T><<<grid, kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  }
  launch_finish<T>({params.sums,
                    {params.sums.amax, 0, params.headrooms},
                    nullptr,
                    mutable_data<T>(out),
                    shape.images,
                    cells / shape.images},
                   stream);
}

}  // namespace truncdet
