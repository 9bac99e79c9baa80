// Weighted rows added to rows on the CPU: the definition, read directly.
#include "../accumulate_rows.h"
#include "sums.h"

namespace truncdet {
namespace {

template <class T, class C = typename Format<T>::Compute>
Sums<C> accumulate_rows(const int64_t* index, const T* src, const int64_t* rows, const T* weights,
                        const RowsShape& s) {
  const Statistics<C> of_src = statistics(src, s.sources * s.columns);
  const Statistics<C> of_weights = statistics(weights, weights != nullptr ? s.count : 0);
  // Each factor is normalised by its own scale; the sum has the product of both.
  const Scale<C> src_scale(of_src.exponent(), 0), weight_scale(of_weights.exponent(), 0);
  const Scale<C> scale(src_scale.exponent + weight_scale.exponent, headroom(s.count));
  Sums<C> sums(s.cells * s.columns, scale, needs_two_limbs<C>(false),
               of_src.nonfinite || of_weights.nonfinite);
  for (int64_t k = 0; k < s.count; ++k) {
    if (index[k] < 0 || index[k] >= s.cells || rows[k] < 0 || rows[k] >= s.sources) continue;
    const C weight = weights != nullptr ? widen(weights[k]) : C(1);
    const C factor = weights != nullptr ? weight_scale.normalise(weight) : C(1);
    for (int64_t i = 0; i < s.columns; ++i) {
      const int64_t cell = index[k] * s.columns + i;
      const C value = widen(src[rows[k] * s.columns + i]);
      if (!is_finite(value) || !is_finite(weight)) {
        sums.flag(cell, nonfinite_flag(value * weight));
      } else {
        sums.add(cell, src_scale.normalise(value) * factor);
      }
    }
  }
  return sums;
}

Tensor accumulate_rows_cpu(Tensor input, Tensor index, Tensor src, Tensor rows,
                           std::optional<Tensor> weights) {
  const RowsShape shape = rows_shape(input, index, src, rows, weights);
  for (Tensor* tensor : {&input, &index, &src, &rows}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  if (weights.has_value()) weights = torch::stable::contiguous(*weights);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(src.scalar_type(), "_accumulate_rows", [&] {
    using compute_t = typename Format<scalar_t>::Compute;
    const scalar_t* factors = weights.has_value() ? const_data<scalar_t>(*weights) : nullptr;
    const auto sums =
        accumulate_rows<scalar_t>(const_data<int64_t>(index), const_data<scalar_t>(src),
                                  const_data<int64_t>(rows), factors, shape);
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
  m.impl("_accumulate_rows", TORCH_BOX(&truncdet::accumulate_rows_cpu));
}
