// The gradient of ms_deform_attn's values for few queries, which leave most of them untouched: no
// sums in memory that become zero, are added to by atomics and are read again. The taps of a row of
// channels (of one cell and head) are linked into lists instead, and a thread that owns some of the
// row's channels adds up in registers what the lists hold. They hold it in no particular order, on
// which sums of integers do not depend.
#pragma once

#include "../ms_deform_attn_host.h"
#include "prepare.cuh"

namespace truncdet {

// Lists of a row: a thread follows them side by side, so that it waits for all of them at once.
constexpr int kTapLists = 4;

// Tap number i is tap i % 4 of sample i / 4. Lists link numbers plus one; 0 is the end.
template <class C>
struct TapLists {
  struct alignas(2 * sizeof(C)) Tap {  // in one load
    C weight;                          // of its cell in the sample
    uint32_t next;
  };
  uint32_t* first;  // [images, values, heads, kTapLists], zeroed
  Tap* taps;        // [images, queries, heads, levels, points, 4]

  static int64_t first_bytes(const MsDeformShape& s) {
    return s.images * s.values * s.heads * kTapLists * int64_t(sizeof(uint32_t));
  }
  static int64_t bytes(const MsDeformShape& s) {
    return first_bytes(s) + 4 * s.rows() * s.samples() * int64_t(sizeof(Tap));
  }
  // `memory`: `bytes` bytes, aligned to 16.
  static TapLists in(void* memory, const MsDeformShape& s) {
    char* const at = static_cast<char*>(memory);
    return {reinterpret_cast<uint32_t*>(at), reinterpret_cast<Tap*>(at + first_bytes(s))};
  }

  // Puts tap `number` % 4 of a sample before the others of its row, in one of the row's lists, and
  // returns what to store as the tap; of weight zero if there is nothing to add.
  __device__ __forceinline__ Tap link(const LevelSample<C>& sample, const Level& level,
                                      int64_t first_row, int64_t heads, int64_t list,
                                      int64_t number) const {
    const auto &x = sample.axis[0], &y = sample.axis[1];
    const bool right = number % 2 != 0, lower = number % 4 / 2 != 0;
    const int64_t column = right ? x.index[1] : x.index[0], line = lower ? y.index[1] : y.index[0];
    if (column < 0 || line < 0) return {};
    Tap tap{(lower ? y.weight[1] : y.weight[0]) * (right ? x.weight[1] : x.weight[0]), 0};
    if (tap.weight == C(0)) return {};
    const int64_t row = first_row + (line * level.size[0] + column) * heads;
    tap.next =
        atomicExch(first + row * kTapLists + list % kTapLists, static_cast<uint32_t>(number + 1));
    return tap;
  }
};

// Few taps for each row, and few even if every sample meets in one row, whose lists one thread has
// to follow; and no more memory than sums would take.
template <class T>
bool few_taps(const MsDeformShape& s, const T* grad) {
  constexpr int64_t kTapsPerRow = 4, kMostSamples = 1 << 14, kChannels = 8;
  const int64_t taps = 4 * s.rows() * s.samples();
  return taps <= kTapsPerRow * s.images * s.values * s.heads && taps < (int64_t(1) << 31) &&
         s.queries * s.samples() <= kMostSamples && s.channels >= kChannels &&
         s.channels % kFinishCells<T> == 0 && is_aligned(grad, kPackBytes);
}

template <class T, class W>
struct TapGatherParams {
  using C = typename Format<T>::Compute;
  TapLists<C> lists;
  const T* grad;     // [images, queries, heads, channels]
  const W* weights;  // [images, queries, heads, levels, points]
  ScaleSource<C> scale;
  const uint32_t* nonfinite;  // [images]
  T* out;                     // [images, values, heads, channels]
  int64_t items, channels;
  Divider by_row, by_image, by_samples;  // items of a row, rows of an image, samples of a query
};

// An item is as many channels of a row as one store takes.
template <class T, class W>
__global__ void __launch_bounds__(kThreads) tap_gather_kernel(TapGatherParams<T, W> p) {
  using C = typename Format<T>::Compute;
  using Tap = typename TapLists<C>::Tap;
  constexpr int kCells = kFinishCells<T>;
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  for (int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x; item < p.items;
       item += int64_t(gridDim.x) * kThreads) {
    const int64_t row = p.by_row.quotient(item);
    const T* const grad = p.grad + item * kCells - row * p.channels;
    Pack<uint32_t, kTapLists> at = load_pack<uint32_t, kTapLists>(p.lists.first + row * kTapLists);
    const auto any = [&] { return (at.at[0] | at.at[1] | at.at[2] | at.at[3]) != 0; };
    Pack<T, kCells> result{};
    if (any()) {
      const int64_t image = p.by_image.quotient(row);
      const int bits = p.scale.headroom;
      const Quantiser<C> of_grad(Scale<C>(exponent_above<C>(p.scale.amax[image]), bits));
      const Quantiser<C> of_weight(Scale<C>(exponent_above<C>(p.scale.second_amax[image]), bits));
      const bool flagged = p.nonfinite[image] != 0;
      int64_t high[kCells] = {}, low[kCells] = {};
      uint32_t flags = 0;  // four bits a cell
      do {
        Tap taps[kTapLists] = {};
        C weights[kTapLists] = {};
        Pack<T, kCells> grads[kTapLists] = {};
#pragma unroll
        for (int k = 0; k < kTapLists; ++k) {
          if (at.at[k] == 0) continue;
          const uint32_t tap = at.at[k] - 1;
          taps[k] = p.lists.taps[tap];
          weights[k] = C(widen(p.weights[tap / 4]));
          grads[k] = load_pack<T, kCells>(grad + p.by_samples.small_quotient(tap / 4) * p.channels);
        }
#pragma unroll
        for (int k = 0; k < kTapLists; ++k) {
          if (at.at[k] == 0) continue;
          at.at[k] = taps[k].next;
          const C normal_weight = of_weight.normalise(weights[k]);
#pragma unroll
          for (int j = 0; j < kCells; ++j) {
            const C g = C(widen(grads[k].at[j]));
            if (flagged) {
              const uint32_t seen = product_flag(weights[k], g);
              flags |= seen << 4 * j;
              if (seen != 0) continue;
            }
            const C sum = taps[k].weight * (normal_weight * of_grad.normalise(g));
            const int64_t rounded = of_grad.quantise(sum);
            high[j] += rounded;
            if constexpr (kTwoLimbs) low[j] += of_grad.quantise_rest(sum, rounded);
          }
        }
      } while (any());
      const Scale<C> scale = p.scale(image);
#pragma unroll
      for (int j = 0; j < kCells; ++j) {
        result.at[j] = finish_cell<T>(T{}, high[j], low[j], kTwoLimbs, flags >> 4 * j & 7u, scale);
      }
    }
    *reinterpret_cast<Pack<T, kCells>*>(p.out + item * kCells) = result;
  }
}

// Sums and rounds every value's gradient.
template <class T, class W>
void launch_tap_gather(const TapLists<typename Format<T>::Compute>& lists, const MsDeformShape& s,
                       const T* grad, const W* weights,
                       const ScaleSource<typename Format<T>::Compute>& scale,
                       const uint32_t* nonfinite, T* out, cudaStream_t stream) {
  const int64_t in_row = s.channels / kFinishCells<T>, rows = s.images * s.values * s.heads;
  if (rows == 0) return;
  tap_gather_kernel<T, W><<<blocks_for(rows * in_row), kThreads, 0, stream>>>(
      {lists, grad, weights, scale, nonfinite, out, rows * in_row, s.channels,
       Divider(in_row, rows * in_row), Divider(s.values * s.heads, rows),
       Divider(s.samples(), s.rows() * s.samples())});
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
