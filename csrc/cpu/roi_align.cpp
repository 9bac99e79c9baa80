// RoIAlign with average pooling on the CPU.
#include <algorithm>
#include <vector>

#include "../roi_align_host.h"
#include "roi_tables.h"

namespace truncdet {
namespace {

// One RoI, one channel: the definition, read directly.
template <class T, class C>
void forward_channel(const T* plane, const ImageStrides& stride, const BinTable<C>& rows,
                     const BinTable<C>& columns, const RoiAlignShape& shape, T* out) {
  for (int64_t p = 0; p < shape.pooled_height; ++p) {
    for (int64_t q = 0; q < shape.pooled_width; ++q) {
      C sum = C(0);
      for (const auto* y = rows.begin(p); y != rows.end(p); ++y) {
        C line = C(0);
        for (const auto* x = columns.begin(q); x != columns.end(q); ++x) {
          line += x->weight * widen(plane[y->cell * stride.row + x->cell * stride.column]);
        }
        sum += y->weight * line;
      }
      *out++ = narrow<T>(sum);
    }
  }
}

template <class T>
void forward(const T* input, const ImageStrides& stride, const typename Format<T>::Compute* boxes,
             const RoiAlignShape& shape, T* out) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
      const BinTable<C> rows(roi.y, shape.pooled_height, C(1));
      const BinTable<C> columns(roi.x, shape.pooled_width, roi.count);
      for (int64_t c = 0; c < shape.channels; ++c) {
        const T* plane =
            input + std::max<int64_t>(roi.image, 0) * stride.image + c * stride.channel;
        forward_channel<T, C>(plane, stride, rows, columns, shape,
                              out + (k * shape.channels + c) * shape.bins());
      }
    }
  });
}

// Accumulators of one plane.
template <class C>
struct Plane {
  std::vector<int64_t> high, low;  // low: second limb, float64 only
  std::vector<uint8_t> flags;      // empty while every value is finite
};

// Adds one RoI's contributions; `g` are its bins, normalised, with non-finite values as zero.
template <class C>
void accumulate(const CellTable<C>& rows, const CellTable<C>& columns, const Scale<C>& scale,
                const RoiAlignShape& shape, const C* g, Plane<C>* plane) {
  for (int y = rows.first; y <= rows.last; ++y) {
    for (int x = columns.first; x <= columns.last; ++x) {
      C contribution = C(0);
      for (const auto* p = rows.begin(y); p != rows.end(y); ++p) {
        for (const auto* q = columns.begin(x); q != columns.end(x); ++q) {
          contribution += (p->weight * q->weight) * g[p->bin * shape.pooled_width + q->bin];
        }
      }
      const int64_t cell = y * shape.width + x;
      const int64_t high = scale.quantise(contribution);
      plane->high[cell] += high;
      if constexpr (std::is_same_v<C, double>) {
        plane->low[cell] += scale.quantise_rest(contribution, high);
      }
    }
  }
}

template <class C>
void collect_flags(const CellTable<C>& rows, const CellTable<C>& columns,
                   const RoiAlignShape& shape, const C* raw, Plane<C>* plane) {
  for (int y = rows.first; y <= rows.last; ++y) {
    for (int x = columns.first; x <= columns.last; ++x) {
      for (const auto* p = rows.begin(y); p != rows.end(y); ++p) {
        for (const auto* q = columns.begin(x); q != columns.end(x); ++q) {
          plane->flags[y * shape.width + x] |=
              static_cast<uint8_t>(nonfinite_flag(raw[p->bin * shape.pooled_width + q->bin]));
        }
      }
    }
  }
}

template <class T>
void backward(const T* grad, const typename Format<T>::Compute* boxes, const RoiAlignShape& shape,
              const ImageStrides& stride, T* out) {
  using C = typename Format<T>::Compute;
  const GradientStatistics<C> statistics(grad, boxes, shape);
  std::vector<CellTable<C>> rows(shape.rois), columns(shape.rois);
  torch::stable::parallel_for(0, shape.rois, 16, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const Roi<C> roi = make_roi<C>(boxes + 5 * k, shape);
      rows[k] = CellTable<C>(roi.y, shape.pooled_height, C(1));
      columns[k] = CellTable<C>(roi.x, shape.pooled_width, roi.count);
    }
  });
  torch::stable::parallel_for(0, shape.images * shape.channels, 1, [&](int64_t begin, int64_t end) {
    Plane<C> plane;
    std::vector<C> raw(shape.bins()), values(shape.bins());
    for (int64_t index = begin; index < end; ++index) {
      const int64_t image = index / shape.channels, channel = index % shape.channels;
      const Scale<C> scale = statistics.scale(image, shape);
      const bool flagged = statistics.nonfinite[image] != 0;
      plane.high.assign(shape.cells(), 0);
      if (std::is_same_v<C, double>) plane.low.assign(shape.cells(), 0);
      if (flagged) plane.flags.assign(shape.cells(), 0);
      for (const int64_t k : statistics.rois_of_image[image]) {
        const T* g = grad + (k * shape.channels + channel) * shape.bins();
        for (int64_t i = 0; i < shape.bins(); ++i) {
          raw[i] = widen(g[i]);
          values[i] = scale.normalise(raw[i]);
        }
        accumulate(rows[k], columns[k], scale, shape, values.data(), &plane);
        if (flagged) collect_flags(rows[k], columns[k], shape, raw.data(), &plane);
      }
      T* target = out + image * stride.image + channel * stride.channel;
      for (int64_t cell = 0; cell < shape.cells(); ++cell) {
        T* place =
            target + (cell / shape.width) * stride.row + (cell % shape.width) * stride.column;
        constexpr bool kTwoLimbs = std::is_same_v<C, double>;
        *place = finish_cell<T>(T{}, plane.high[cell], kTwoLimbs ? plane.low[cell] : 0, kTwoLimbs,
                                flagged ? plane.flags[cell] : 0u, scale);
      }
    }
  });
}

}  // namespace

Tensor roi_align_cpu(Tensor input, Tensor boxes, int64_t pooled_height, int64_t pooled_width,
                     double spatial_scale, int64_t sampling_ratio, bool aligned) {
  const RoiAlignShape shape = forward_shape(input, boxes, pooled_height, pooled_width,
                                            spatial_scale, sampling_ratio, aligned);
  check_on_cpu(boxes);
  boxes = torch::stable::contiguous(boxes);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align", [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape);
    forward<scalar_t>(const_data<scalar_t>(input), image_strides(shape, channels_last),
                      const_data<C>(boxes), shape, mutable_data<scalar_t>(out));
  });
  return out;
}

Tensor roi_align_backward_cpu(Tensor grad, Tensor boxes, int64_t images, int64_t channels,
                              int64_t height, int64_t width, int64_t pooled_height,
                              int64_t pooled_width, double spatial_scale, int64_t sampling_ratio,
                              bool aligned, bool channels_last) {
  const RoiAlignShape shape =
      backward_shape(grad, boxes, images, channels, height, width, pooled_height, pooled_width,
                     spatial_scale, sampling_ratio, aligned);
  check_on_cpu(boxes);
  boxes = torch::stable::contiguous(boxes);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (shape.rois == 0) return torch::stable::zero_(out);
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_backward", [&] {
    using C = Format<scalar_t>::Compute;
    check_batch_indices(const_data<C>(boxes), shape);
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<C>(boxes), shape,
                       image_strides(shape, channels_last), mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("roi_align", TORCH_BOX(&truncdet::roi_align_cpu));
  m.impl("roi_align_backward", TORCH_BOX(&truncdet::roi_align_backward_cpu));
}
