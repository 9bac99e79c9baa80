// RoIAlign of rotated boxes on the CPU: the definition, read directly.
#include <algorithm>
#include <vector>

#include "../accumulate.h"
#include "../roi_align_rotated_host.h"
#include "statistics.h"

namespace truncdet {
namespace {

// Calls f(bin, y, x) for every sample on the map, bins ascending, then rows of samples.
template <class C, class F>
void for_each_sample(const RotatedRoi<C>& roi, F f) {
  if (roi.empty()) return;
  IndexRange rows, columns;
  roi.samples_on_map(&rows, &columns);
  for (int p = 0; p < roi.y.bins; ++p) {
    const IndexRange of_y = roi.y.of_bin(rows, p);
    for (int q = 0; q < roi.x.bins; ++q) {
      const IndexRange of_x = roi.x.of_bin(columns, q);
      for (int i = of_y.first; i <= of_y.last; ++i) {
        const C along_y = roi.y.coordinate(p, i);
        for (int j = of_x.first; j <= of_x.last; ++j) {
          const C along_x = roi.x.coordinate(q, j);
          const Sample<C> y = roi.rows_of(along_y, along_x);
          const Sample<C> x = roi.columns_of(along_y, along_x);
          if (y.low >= 0 && x.low >= 0) f(p * roi.x.bins + q, y, x);
        }
      }
    }
  }
}

template <class C>
struct BinSample {
  int bin;
  Sample<C> y, x;
};

template <class T, class C = typename Format<T>::Compute>
void forward(const T* input, const ImageStrides& stride, const C* rois, const RotatedShape& shape,
             T* out) {
  torch::stable::parallel_for(0, shape.rois, 1, [&](int64_t begin, int64_t end) {
    std::vector<BinSample<C>> samples;
    std::vector<C> sums(shape.bins());
    for (int64_t k = begin; k < end; ++k) {
      const RotatedRoi<C> roi = make_rotated_roi<C>(rois + 6 * k, shape);
      samples.clear();
      for_each_sample(roi, [&](int bin, const Sample<C>& y, const Sample<C>& x) {
        samples.push_back({bin, y, x});
      });
      const T* image = input + std::max<int64_t>(roi.image, 0) * stride.image;
      for (int64_t c = 0; c < shape.channels; ++c) {
        std::fill(sums.begin(), sums.end(), C(0));
        const T* plane = image + c * stride.channel;
        for (const BinSample<C>& s : samples) {
          // A row of cells is `width` cells long in either memory order.
          sums[s.bin] += sample_value(s.y, s.x, roi.width, [&](int64_t cell) {
            return C(widen(plane[cell * stride.column]));
          });
        }
        T* target = out + (k * shape.channels + c) * shape.bins();
        for (int64_t bin = 0; bin < shape.bins(); ++bin) {
          target[bin] = narrow<T>(sums[bin] / roi.count);
        }
      }
    }
  });
}

// The matrix of one RoI: weights that are not zero by cell, and of a cell by bin, both ascending.
template <class C>
struct Entry {
  int cell, bin;
  C weight;
};

template <class C>
std::vector<Entry<C>> matrix(const RotatedRoi<C>& roi) {
  std::vector<Entry<C>> samples;
  for_each_sample(roi, [&](int bin, const Sample<C>& y, const Sample<C>& x) {
    const auto add = [&](int row, C row_weight, int column, C column_weight) {
      const C weight = row_weight * column_weight;
      if (weight != C(0)) samples.push_back({row * roi.width + column, bin, weight});
    };
    add(y.low, y.low_weight, x.low, x.low_weight);
    add(y.low, y.low_weight, x.high, x.high_weight);
    add(y.high, y.high_weight, x.low, x.low_weight);
    add(y.high, y.high_weight, x.high, x.high_weight);
  });
  // Stable: the samples of a bin keep their order.
  std::stable_sort(samples.begin(), samples.end(), [](const Entry<C>& a, const Entry<C>& b) {
    return a.cell < b.cell || (a.cell == b.cell && a.bin < b.bin);
  });
  std::vector<Entry<C>> entries;
  for (const Entry<C>& s : samples) {
    if (!entries.empty() && entries.back().cell == s.cell && entries.back().bin == s.bin) {
      entries.back().weight += s.weight;
    } else {
      entries.push_back(s);
    }
  }
  for (Entry<C>& e : entries) e.weight /= roi.count;
  return entries;
}

// Sums and flags of one plane.
template <class C>
struct Plane {
  std::vector<int64_t> high, low;  // low: second limb, float64 only
  std::vector<uint8_t> flags;
};

// Adds one RoI's contributions to a plane.
template <class C>
void accumulate(const std::vector<Entry<C>>& entries, const std::vector<C>& raw,
                const Scale<C>& scale, bool flagged, Plane<C>* plane) {
  for (size_t i = 0; i < entries.size();) {
    const int cell = entries[i].cell;
    C contribution = C(0);
    for (; i < entries.size() && entries[i].cell == cell; ++i) {
      const C g = raw[entries[i].bin];
      contribution += entries[i].weight * scale.normalise(g);
      if (flagged) plane->flags[cell] |= static_cast<uint8_t>(nonfinite_flag(g));
    }
    const int64_t high = scale.quantise(contribution);
    plane->high[cell] += high;
    if constexpr (std::is_same_v<C, double>) {
      plane->low[cell] += scale.quantise_rest(contribution, high);
    }
  }
}

template <class T, class C = typename Format<T>::Compute>
void backward(const T* grad, const C* rois, const RotatedShape& shape, const ImageStrides& stride,
              T* out) {
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const int64_t length = shape.channels * shape.bins();
  std::vector<std::vector<int64_t>> rois_of_image(shape.images);
  std::vector<ValueStatistics<C>> found(shape.images);
  std::vector<std::vector<Entry<C>>> matrices(shape.rois);
  for (int64_t k = 0; k < shape.rois; ++k) {
    const RotatedRoi<C> roi = make_rotated_roi<C>(rois + 6 * k, shape);
    rois_of_image[roi.image].push_back(k);
    const ValueStatistics<C> own = value_statistics(grad + k * length, length);
    found[roi.image].amax = std::max(found[roi.image].amax, own.amax);
    found[roi.image].nonfinite |= own.nonfinite;
    matrices[k] = matrix(roi);
  }
  torch::stable::parallel_for(0, shape.images * shape.channels, 1, [&](int64_t begin, int64_t end) {
    Plane<C> plane;
    std::vector<C> raw(shape.bins());
    for (int64_t index = begin; index < end; ++index) {
      const int64_t image = index / shape.channels, channel = index % shape.channels;
      const Scale<C> scale(
          exponent_above<C>(found[image].amax),
          roi_headroom(static_cast<int64_t>(rois_of_image[image].size()), shape.bins()));
      const bool flagged = found[image].nonfinite;
      plane.high.assign(shape.cells(), 0);
      plane.low.assign(kTwoLimbs ? shape.cells() : 0, 0);
      plane.flags.assign(flagged ? shape.cells() : 0, 0);
      for (const int64_t k : rois_of_image[image]) {
        const T* g = grad + (k * shape.channels + channel) * shape.bins();
        for (int64_t bin = 0; bin < shape.bins(); ++bin) raw[bin] = widen(g[bin]);
        accumulate(matrices[k], raw, scale, flagged, &plane);
      }
      T* target = out + image * stride.image + channel * stride.channel;
      for (int64_t cell = 0; cell < shape.cells(); ++cell) {
        target[cell * stride.column] =
            finish_cell<T>(T{}, plane.high[cell], kTwoLimbs ? plane.low[cell] : 0, kTwoLimbs,
                           flagged ? plane.flags[cell] : 0u, scale);
      }
    }
  });
}

template <class C>
void check_indices(const C* rois, const RotatedShape& shape) {
  for (int64_t k = 0; k < shape.rois; ++k) {
    TRUNCDET_CHECK(make_rotated_roi<C>(rois + 6 * k, shape).image >= 0,
                   "roi_align_rotated: the batch index of rois must be in [0, ", shape.images,
                   "), got ", rois[6 * k], " in row ", k);
  }
}

// Shapes of other devices' tensors may be checked already; their data cannot be read.
void check_on_cpu(const Tensor& rois) {
  TRUNCDET_CHECK(rois.is_cpu(),
                 "roi_align_rotated: rois must be on the device of the values, the CPU");
}

Tensor forward_cpu(Tensor input, Tensor rois, int64_t pooled_height, int64_t pooled_width,
                   double spatial_scale, int64_t sampling_ratio, bool aligned, bool clockwise) {
  const RotatedShape shape = rotated_forward_shape(
      input, rois, pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, clockwise);
  check_on_cpu(rois);
  rois = torch::stable::contiguous(rois);
  const bool channels_last = is_channels_last(input) && !input.is_contiguous();
  if (!channels_last) input = torch::stable::contiguous(input);
  const int64_t sizes[4] = {shape.rois, shape.channels, pooled_height, pooled_width};
  Tensor out = torch::stable::new_empty(input, {sizes, 4});
  TRUNCDET_DISPATCH(input.scalar_type(), "roi_align_rotated", [&] {
    using C = Format<scalar_t>::Compute;
    check_indices(const_data<C>(rois), shape);
    forward<scalar_t>(const_data<scalar_t>(input), image_strides(shape, channels_last),
                      const_data<C>(rois), shape, mutable_data<scalar_t>(out));
  });
  return out;
}

Tensor backward_cpu(Tensor grad, Tensor rois, int64_t images, int64_t channels, int64_t height,
                    int64_t width, int64_t pooled_height, int64_t pooled_width,
                    double spatial_scale, int64_t sampling_ratio, bool aligned, bool clockwise,
                    bool channels_last) {
  const RotatedShape shape =
      rotated_backward_shape(grad, rois, images, channels, height, width, pooled_height,
                             pooled_width, spatial_scale, sampling_ratio, aligned, clockwise);
  check_on_cpu(rois);
  rois = torch::stable::contiguous(rois);
  grad = torch::stable::contiguous(grad);
  Tensor out = empty_image(grad, shape, channels_last);
  if (shape.rois == 0) return torch::stable::zero_(out);
  TRUNCDET_DISPATCH(grad.scalar_type(), "roi_align_rotated_backward", [&] {
    using C = Format<scalar_t>::Compute;
    check_indices(const_data<C>(rois), shape);
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<C>(rois), shape,
                       image_strides(shape, channels_last), mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("roi_align_rotated", TORCH_BOX(&truncdet::forward_cpu));
  m.impl("roi_align_rotated_backward", TORCH_BOX(&truncdet::backward_cpu));
}
