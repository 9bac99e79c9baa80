// scatter_add and index_add on the CPU: the definition, read directly.
#include "../scatter.h"

#include <algorithm>
#include <vector>

namespace truncdet {
namespace {

// Fewest contributions worth a thread.
constexpr int64_t kGrain = 1 << 14;

template <class C>
struct Statistics {
  typename Format<C>::Word amax = 0;
  bool nonfinite = false;
};

template <class T, class C = typename Format<T>::Compute>
Statistics<C> statistics(const T* values, int64_t count) {
  Statistics<C> result;
  for (int64_t at = 0; at < count; ++at) {
    const auto word = magnitude_word<C>(widen(values[at]));
    if (word >= infinity_word<C>()) {
      result.nonfinite = true;
    } else {
      result.amax = std::max(result.amax, word);
    }
  }
  return result;
}

template <class T>
void accumulate(const T* input, const int64_t* index, const T* src, const ScatterShape& s,
                bool exact, T* out) {
  using C = typename Format<T>::Compute;
  const bool two_limbs = needs_two_limbs<C>(exact);
  const Statistics<C> found = statistics(src, s.contributions());
  const Scale<C> scale(exponent_above<C>(found.amax), headroom(s.count));
  std::vector<int64_t> high(s.total_cells(), 0), low(two_limbs ? s.total_cells() : 0, 0);
  std::vector<uint8_t> flags(found.nonfinite ? s.total_cells() : 0, 0);
  // Columns (o, i) share no cell, so threads that own columns need no atomics.
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, s.count));
  torch::stable::parallel_for(0, s.outer * s.inner, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin / s.inner; o * s.inner < end; ++o) {
      const int64_t first = std::max(begin - o * s.inner, int64_t(0));
      const int64_t last = std::min(end - o * s.inner, s.inner);
      for (int64_t k = 0; k < s.count; ++k) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t to = index[o * s.index_outer + k * s.index_count + i * s.index_inner];
          TRUNCDET_CHECK(to >= 0 && to < s.cells, "_accumulate: index must be in [0, ", s.cells,
                         "), got ", to);
          const int64_t cell = (o * s.cells + to) * s.inner + i;
          const C value = widen(src[(o * s.count + k) * s.inner + i]);
          if (const uint32_t seen = nonfinite_flag(value); seen != 0) {
            flags[cell] |= static_cast<uint8_t>(seen);
            continue;
          }
          const C contribution = scale.normalise(value);
          const int64_t rounded = scale.quantise(contribution);
          high[cell] += rounded;
          if (two_limbs) low[cell] += scale.quantise_rest(contribution, rounded);
        }
      }
    }
  });
  for (int64_t cell = 0; cell < s.total_cells(); ++cell) {
    out[cell] = finish_cell<T>(input[cell], high[cell], two_limbs ? low[cell] : 0, two_limbs,
                               found.nonfinite ? flags[cell] : 0u, scale);
  }
}

Tensor accumulate_cpu(Tensor input, Tensor index, Tensor src, bool exact, int64_t) {
  const ScatterShape shape = scatter_shape(input, index, src);
  input = torch::stable::contiguous(input);
  src = torch::stable::contiguous(src);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(input.scalar_type(), "_accumulate", [&] {
    accumulate<scalar_t>(const_data<scalar_t>(input), const_data<int64_t>(index),
                         const_data<scalar_t>(src), shape, exact, mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_accumulate", TORCH_BOX(&truncdet::accumulate_cpu));
}
