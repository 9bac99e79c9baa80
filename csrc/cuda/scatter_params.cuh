// What the kernels of scatter_add and its relatives share: which cell a contribution goes to, what
// it is worth in integers, and how it arrives there.
#pragma once

#include "prepare.cuh"

namespace truncdet {

// Elements form rows: element i of row r = o * count + k belongs to the cell [key, i] with
// key = o * cells + index[o, k, i]. All rows of one key have the same cells.
struct IndexMap {
  const int64_t* index;
  int64_t stride_outer, stride_count, stride_inner;  // of index, in elements; 0 where expanded
  int64_t outer, cells, count, width;
  Divider by_count, by_width;

  IndexMap(const int64_t* index, const int64_t (&strides)[3], int64_t outer, int64_t cells,
           int64_t count, int64_t width)
      : index(index),
        stride_outer(strides[0]),
        stride_count(strides[1]),
        stride_inner(strides[2]),
        outer(outer),
        cells(cells),
        count(count),
        width(width),
        by_count(count, outer * count),
        by_width(width, outer * count * width) {}

  __host__ __device__ int64_t rows() const { return outer * count; }
  __host__ __device__ int64_t keys() const { return outer * cells; }
  __host__ __device__ int64_t elements() const { return rows() * width; }

  // -1 for an index out of range.
  __device__ __forceinline__ int64_t key(int64_t row, int64_t column) const {
    const int64_t o = outer == 1 ? 0 : by_count.quotient(row);
    const int64_t k = row - o * count;
    const int64_t to = index[o * stride_outer + k * stride_count + column * stride_inner];
    return to < 0 || to >= cells ? -1 : o * cells + to;
  }
  // The key of a row whose index is in range, without a branch; for fewer than 2^31 rows and keys
  // and an index that `is_small`.
  __device__ __forceinline__ uint32_t small_key(uint32_t row) const {
    const uint32_t o = by_count.small_quotient(row);
    const uint64_t at = static_cast<uint64_t>(row) * static_cast<uint32_t>(stride_count);
    const int64_t jump = stride_outer - count * stride_count;
    const int64_t to = index[static_cast<int64_t>(at) + static_cast<int64_t>(o) * jump];
    return o * static_cast<uint32_t>(cells) + static_cast<uint32_t>(to);
  }
  bool is_small() const { return stride_inner == 0 && stride_count < (int64_t(1) << 31); }
};

template <class T>
struct AddParams {
  using C = typename Format<T>::Compute;
  using Word = typename Format<C>::Word;

  IndexMap map;
  const T* src;            // rows of map.width elements
  const int64_t* sources;  // [rows] the row of src that a row is, or null: its own
  int64_t source_rows;     // rows that src has
  const T* weights;        // [rows] factors, or null
  const Word* weight_amax;
  int headroom;
  Accumulator<C> sums;
  unsigned* sticky;
  unsigned bit;  // of the operator to blame for an index out of range; 0: nobody

  // -1 if `sources` is out of range.
  __device__ __forceinline__ int64_t source(int64_t row) const {
    if (sources == nullptr) return row;
    const int64_t from = sources[row];
    return from < 0 || from >= source_rows ? -1 : from;
  }
  __device__ __forceinline__ bool plain() const {
    return sources == nullptr && weights == nullptr && *sums.nonfinite == 0;
  }
  __device__ __forceinline__ void report(bool bad) const {
    if (bad && bit != 0) set_sticky(sticky, static_cast<StickyBit>(bit));
  }
};

// One or more contributions in integers.
struct Amount {
  int64_t high = 0, low = 0;

  __device__ __forceinline__ void operator+=(const Amount& other) {
    high += other.high;
    low += other.low;
  }
};

// What one thread needs to turn elements into amounts and to add those to cells. Plain: all
// elements are finite, and none has a weight.
template <class T, bool kTwoLimbs, bool kPlain>
class Adder {
 public:
  using C = typename Format<T>::Compute;

  __device__ __forceinline__ explicit Adder(const AddParams<T>& p)
      : sums_(p.sums),
        of_src_(Scale<C>(exponent_above<C>(*p.sums.amax), p.headroom)),
        of_weight_(Scale<C>(p.weights != nullptr ? exponent_above<C>(*p.weight_amax) : 0, 0)),
        weights_(p.weights),
        flagged_(*p.sums.nonfinite != 0) {}

  // The factor of a row, as it is.
  __device__ __forceinline__ C weight(int64_t row) const {
    return kPlain || weights_ == nullptr ? C(1) : widen(weights_[row]);
  }
  // The amount of an element; nothing if it is not finite, which is noted at its cell instead.
  __device__ __forceinline__ Amount amount(int64_t cell, T element, C weight) const {
    const C value = widen(element);
    Amount result;
    C contribution = of_src_.normalise(value);
    if constexpr (!kPlain) {
      if (flagged_ && !(is_finite(value) && is_finite(weight))) {
        note(cell, nonfinite_flag(value * weight));
        return result;
      }
      if (weights_ != nullptr) contribution *= of_weight_.normalise(weight);
    }
    result.high = of_src_.quantise(contribution);
    if constexpr (kTwoLimbs) result.low = of_src_.quantise_rest(contribution, result.high);
    return result;
  }
  __device__ __forceinline__ void add(int64_t cell, const Amount& amount) const {
    add_int64(sums_.high + cell, amount.high);
    if constexpr (kTwoLimbs) add_int64(sums_.low + cell, amount.low);
  }

 private:
  // The output is of T, or of what T is computed in.
  __device__ __forceinline__ void note(int64_t cell, uint32_t seen) const {
    if (sums_.flags.element == static_cast<int>(sizeof(T))) {
      sums_.flags.template add<T>(cell, seen);
    } else {
      sums_.flags.template add<C>(cell, seen);
    }
  }

  Accumulator<C> sums_;
  Quantiser<C> of_src_, of_weight_;
  const T* weights_;
  bool flagged_;
};

}  // namespace truncdet
