// scatter_add and index_add on the CPU: the definition, read directly.
#include "../scatter.h"
#include "sums.h"

namespace truncdet {
namespace {

// Fewest contributions worth a thread.
constexpr int64_t kGrain = 1 << 14;

template <class T, class C = typename Format<T>::Compute>
Sums<C> accumulate(const int64_t* index, const T* src, const ScatterShape& s, bool exact,
                   bool report) {
  const Statistics<C> found = statistics(src, s.contributions());
  const Scale<C> scale(found.exponent(), headroom(s.count));
  Sums<C> sums(s.total_cells(), scale, needs_two_limbs<C>(exact), found.nonfinite);
  // Columns (o, i) share no cell, so threads that own columns need no atomics.
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, s.count));
  torch::stable::parallel_for(0, s.outer * s.inner, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin / s.inner; o * s.inner < end; ++o) {
      const int64_t first = std::max(begin - o * s.inner, int64_t(0));
      const int64_t last = std::min(end - o * s.inner, s.inner);
      for (int64_t k = 0; k < s.count; ++k) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t to = index[o * s.index_outer + k * s.index_count + i * s.index_inner];
          const bool inside = to >= 0 && to < s.cells;
          TRUNCDET_CHECK(inside || !report, "_accumulate: index must be in [0, ", s.cells,
                         "), got ", to);
          if (!inside) continue;
          const int64_t cell = (o * s.cells + to) * s.inner + i;
          const C value = widen(src[(o * s.count + k) * s.inner + i]);
          if (const uint32_t seen = nonfinite_flag(value); seen != 0) {
            sums.flag(cell, seen);
          } else {
            sums.add(cell, scale.normalise(value));
          }
        }
      }
    }
  });
  return sums;
}

Tensor accumulate_cpu(Tensor input, Tensor index, Tensor src, bool exact, int64_t operator_bit) {
  const ScatterShape shape = scatter_shape(input, index, src);
  input = torch::stable::contiguous(input);
  src = torch::stable::contiguous(src);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(src.scalar_type(), "_accumulate", [&] {
    using compute_t = typename Format<scalar_t>::Compute;
    const auto sums = accumulate<scalar_t>(const_data<int64_t>(index), const_data<scalar_t>(src),
                                           shape, exact, operator_bit != 0);
    if (input.scalar_type() == src.scalar_type()) {
      sums.finish(const_data<scalar_t>(input), mutable_data<scalar_t>(out));
    } else {
      sums.finish(const_data<compute_t>(input), mutable_data<compute_t>(out));
    }
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_accumulate", TORCH_BOX(&truncdet::accumulate_cpu));
}
