// The gradient of a RoI operator on the CPU: a thread owns one channel of one image, adds what its
// RoIs send there and writes it.
#pragma once

#include <vector>

#include "roi_tables.h"

namespace truncdet {

// The sums of one plane.
template <class C>
class PlaneSums {
 public:
  void start(int64_t cells, const Scale<C>& scale) {
    unit_ = &scale;
    high_.assign(cells, 0);
    low_.assign(kTwoLimbs ? cells : 0, 0);
    flags_.assign(cells, 0);
  }

  C normalise(C raw) const { return unit_->normalise(raw); }

  // `contribution` is of normalise(raw), with a weight that is not zero.
  void add(int64_t cell, C contribution, C raw) {
    const int64_t rounded = unit_->quantise(contribution);
    high_[cell] += rounded;
    if (kTwoLimbs) low_[cell] += unit_->quantise_rest(contribution, rounded);
    flags_[cell] |= static_cast<uint8_t>(nonfinite_flag(raw));
  }

  template <class T>
  void write(const RoiAlignShape& shape, const ImageStrides& stride, T* plane) const {
    for (int64_t cell = 0; cell < shape.cells(); ++cell) {
      plane[cell / shape.width * stride.row + cell % shape.width * stride.column] = finish_cell<T>(
          T{}, high_[cell], kTwoLimbs ? low_[cell] : 0, kTwoLimbs, flags_[cell], *unit_);
    }
  }

 private:
  static constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const Scale<C>* unit_ = nullptr;
  std::vector<int64_t> high_, low_;
  std::vector<uint8_t> flags_;
};

// fill(k, channel, plane) adds RoI k's contributions to one channel; `bins` are those of one RoI
// that can reach one cell.
template <class T, class C, class Fill>
void add_planes(const GradientStatistics<C>& statistics, const RoiAlignShape& shape, int64_t bins,
                const ImageStrides& stride, T* out, const Fill& fill) {
  torch::stable::parallel_for(0, shape.images * shape.channels, 1, [&](int64_t begin, int64_t end) {
    PlaneSums<C> plane;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t image = index / shape.channels, channel = index % shape.channels;
      const Scale<C> scale = statistics.scale(image, bins);
      plane.start(shape.cells(), scale);
      for (const int64_t k : statistics.rois_of_image[image]) fill(k, channel, plane);
      plane.write(shape, stride, out + image * stride.image + channel * stride.channel);
    }
  });
}

}  // namespace truncdet
