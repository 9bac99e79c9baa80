// The backward of rotated RoIAlign through int64 atomics into a buffer: the schedule for float64
// and for outputs too large for the gather. Same contributions, same bits.
#pragma once

#include "roi_align_atomic.cuh"
#include "roi_rotated_statistics.cuh"

namespace truncdet {

// A block takes one RoI, its warps take cells in turn, lanes are channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotated_atomic_kernel(AtomicParams<T> p,
                          const RotatedRoi<typename Format<T>::Compute>* __restrict__ boxes) {
  using C = typename Format<T>::Compute;
  const int64_t k = blockIdx.x;
  const RotatedRoi<C> roi = boxes[k];
  const RoiBounds bounds = p.statistics.bounds[k];
  if (roi.image < 0 || bounds.first_y > bounds.last_y) return;
  const Scale<C> scale = p.statistics.images[roi.image].scale(p.shape.bins());
  const bool flagged = p.statistics.nonfinite[roi.image] != 0;
  const int columns = bounds.last_x - bounds.first_x + 1;
  const int64_t cells = int64_t(bounds.last_y - bounds.first_y + 1) * columns;
  for (int64_t i = threadIdx.x / 32 + int64_t(blockIdx.y) * (kThreads / 32); i < cells;
       i += int64_t(gridDim.y) * (kThreads / 32)) {
    const int y = bounds.first_y + static_cast<int>(i / columns);
    const int x = bounds.first_x + static_cast<int>(i % columns);
    for (int64_t c = threadIdx.x % 32; c < p.shape.channels; c += 32) {
      const T* g = p.grad + (k * p.shape.channels + c) * p.shape.bins();
      C contribution = C(0);
      unsigned seen = 0;
      bool any = false;
      for_each_weight(roi, y, x, [&](int bin, C weight) {
        const C raw = widen(g[bin]);
        contribution += weight * scale.normalise(raw);
        seen |= nonfinite_flag(raw);
        any = true;
      });
      if (!any) break;  // as for all other channels
      const int64_t cell = roi.image * p.stride.image + c * p.stride.channel + y * p.stride.row +
                           x * p.stride.column;
      p.sums.add(cell, scale, contribution);
      if (flagged && seen != 0) p.sums.flags.template add<T>(cell, seen);
    }
  }
}

template <class T>
void launch_rotated_atomic(const Tensor& grad, const Tensor& out, const RotatedShape& shape,
                           const RotatedStatistics<typename Format<T>::Compute>& statistics,
                           bool channels_last, cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const bool two_limbs = std::is_same_v<C, double>;
  const int64_t cells = out.numel();
  const int64_t sums = Accumulator<C>::bytes(cells, shape.images, two_limbs);
  const int64_t bytes = sums + 4 * shape.images;
  Tensor scratch = torch::stable::new_empty(grad, {&bytes, 1}, ScalarType::Byte);
  char* memory = mutable_data<char>(scratch);
  const AtomicParams<T> params{const_data<T>(grad),
                               nullptr,
                               shape,
                               statistics,
                               image_strides(shape, channels_last),
                               Accumulator<C>(memory, cells, shape.images, two_limbs, out),
                               reinterpret_cast<int32_t*>(memory + sums),
                               cells};
  const Zeros zeros{memory, Accumulator<C>::sum_bytes(cells, two_limbs)};
  roi_scale_kernel<T><<<zeros.blocks(), kThreads, 0, stream>>>(params, zeros);
  TRUNCDET_LAUNCH_CHECK();
  if (shape.rois > 0) {
    const dim3 grid(static_cast<unsigned>(shape.rois), kAtomicBlocks);
    rotated_atomic_kernel<T><<<grid, kThreads, 0, stream>>>(params, statistics.boxes);
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
