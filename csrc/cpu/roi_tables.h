// Weight tables and per-image statistics for the CPU kernels of RoIAlign.
#pragma once

#include <algorithm>
#include <vector>

#include "../accumulate.h"
#include "../roi_align_host.h"

namespace truncdet {

template <class C>
struct BinEntry {
  int bin;
  C weight;
};
template <class C>
struct CellEntry {
  int cell;
  C weight;
};

// The cells of each bin, ascending, weights not zero.
template <class C>
class BinTable {
 public:
  BinTable(const Axis<C>& axis, int64_t bins, C divisor) {
    offset_.push_back(0);
    for (int p = 0; p < bins; ++p) {
      int first, last;
      axis.range(p, &first, &last);
      for (int cell = first; cell <= last; ++cell) {
        const C weight = axis.weight(p, cell) / divisor;
        if (weight != C(0)) entries_.push_back({cell, weight});
      }
      offset_.push_back(entries_.size());
    }
  }
  const CellEntry<C>* begin(int64_t bin) const { return entries_.data() + offset_[bin]; }
  const CellEntry<C>* end(int64_t bin) const { return entries_.data() + offset_[bin + 1]; }

 private:
  std::vector<size_t> offset_;
  std::vector<CellEntry<C>> entries_;
};

// The bins of each cell, ascending, weights not zero; cells first..last, none if first > last.
template <class C>
class CellTable {
 public:
  int first = 1, last = 0;

  CellTable() = default;
  CellTable(const Axis<C>& axis, int64_t bins, C divisor) {
    const BinTable<C> table(axis, bins, divisor);
    for (int64_t p = 0; p < bins; ++p) {
      for (const auto* e = table.begin(p); e != table.end(p); ++e) {
        first = first > last ? e->cell : std::min(first, e->cell);
        last = std::max(last, e->cell);
      }
    }
    lists_.resize(first > last ? 0 : last - first + 1);
    for (int64_t p = 0; p < bins; ++p) {
      for (const auto* e = table.begin(p); e != table.end(p); ++e) {
        lists_[e->cell - first].push_back({static_cast<int>(p), e->weight});
      }
    }
  }
  const BinEntry<C>* begin(int cell) const { return lists_[cell - first].data(); }
  const BinEntry<C>* end(int cell) const { return begin(cell) + lists_[cell - first].size(); }

 private:
  std::vector<std::vector<BinEntry<C>>> lists_;
};

// Shapes and indices of other devices' tensors may be checked already; their data cannot be read.
inline void check_on_cpu(const Tensor& boxes, const char* op = "roi_align") {
  TRUNCDET_CHECK(boxes.is_cpu(), op, ": boxes must be on the device of the values, the CPU");
}

template <class C>
void check_batch_indices(const C* boxes, const RoiAlignShape& shape, const char* op = "roi_align") {
  for (int64_t k = 0; k < shape.rois; ++k) {
    TRUNCDET_CHECK(roi_image(boxes[5 * k], shape.images) >= 0, op,
                   ": the batch index of boxes must be in [0, ", shape.images, "), got ",
                   boxes[5 * k], " in row ", k);
  }
}

// Which RoIs an image has, and the scale of its gradient.
template <class C>
class GradientStatistics {
 public:
  std::vector<std::vector<int64_t>> rois_of_image;
  std::vector<uint8_t> nonfinite;  // the image has a NaN or an infinity

  template <class T>
  GradientStatistics(const T* grad, const C* boxes, const RoiAlignShape& shape)
      : GradientStatistics(grad, boxes, shape, shape.channels * shape.bins()) {}
  // `length`: values of one RoI.
  template <class T>
  GradientStatistics(const T* grad, const C* boxes, const RoiAlignShape& shape, int64_t length)
      : rois_of_image(shape.images), nonfinite(shape.images, 0), amax_(shape.images, 0) {
    using Word = typename Format<C>::Word;
    for (int64_t k = 0; k < shape.rois; ++k) {
      const int64_t image = roi_image(boxes[5 * k], shape.images);
      rois_of_image[image].push_back(k);
      for (int64_t i = 0; i < length; ++i) {
        const C value = widen(grad[k * length + i]);
        const Word word = magnitude_word<C>(value);
        if (word >= infinity_word<C>()) {
          nonfinite[image] = 1;
        } else {
          amax_[image] = std::max(amax_[image], word);
        }
      }
    }
  }

  Scale<C> scale(int64_t image, const RoiAlignShape& shape) const {
    return scale(image, shape.bins());
  }
  // `bins`: of one RoI, as many as a cell can receive from.
  Scale<C> scale(int64_t image, int64_t bins) const {
    return Scale<C>(exponent_above<C>(amax_[image]),
                    roi_headroom(static_cast<int64_t>(rois_of_image[image].size()), bins));
  }

 private:
  std::vector<typename Format<C>::Word> amax_;
};

}  // namespace truncdet
