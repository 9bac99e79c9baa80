// Terms of nll_loss and their gradient on the CPU.
#include "../nll_loss.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace truncdet {
namespace {

// Fewest places, and fewest images' worth of classes, that are worth a thread.
constexpr int64_t kGrain = 1 << 14;

template <class T, class C = typename Format<T>::Compute>
void terms(const Tensor& input, const int64_t* target, const T* weight, const NllShape& s,
           bool report, C* term, C* factor) {
  const T* values = const_data<T>(input);
  const auto stride = input.strides();
  torch::stable::parallel_for(0, s.targets(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t n = at / s.places, l = at - n * s.places;
      bool bad = false;
      const int64_t c = s.used_class(target[at], &bad);
      TRUNCDET_CHECK(!bad || !report, "nll_loss: target must be in [0, ", s.classes, "), got ",
                     target[at]);
      term[at] = factor[at] = C(0);
      if (c < 0) continue;
      const C value = widen(values[n * stride[0] + c * stride[1] + l * stride[2]]);
      const C own = weight != nullptr ? widen(weight[c]) : C(1);
      term[at] = nll_term(value, weight != nullptr ? &own : nullptr);
      factor[at] = narrow<C>(own);
    }
  });
}

std::tuple<Tensor, Tensor> terms_cpu(Tensor input, Tensor target, std::optional<Tensor> weight,
                                     int64_t ignore_index, int64_t operator_bit) {
  const NllShape shape = nll_terms_shape(input, target, weight, ignore_index);
  target = torch::stable::contiguous(target);
  if (weight.has_value()) weight = torch::stable::contiguous(*weight);
  const ScalarType kind = compute_type(input.scalar_type());
  Tensor term = torch::stable::new_empty(input, target.sizes(), kind);
  Tensor factor = torch::stable::new_empty(input, target.sizes(), kind);
  TRUNCDET_DISPATCH(input.scalar_type(), "nll_loss", [&] {
    using C = typename Format<scalar_t>::Compute;
    terms<scalar_t>(input, const_data<int64_t>(target),
                    weight.has_value() ? const_data<scalar_t>(*weight) : nullptr, shape,
                    operator_bit != 0, mutable_data<C>(term), mutable_data<C>(factor));
  });
  return {term, factor};
}

template <class T, class C = typename Format<T>::Compute>
void spread(const C* grad, const int64_t* target, const T* weight, const NllShape& s, T* out) {
  const int64_t image = s.classes * s.places;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, image));
  torch::stable::parallel_for(0, s.images, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      std::fill(out + n * image, out + (n + 1) * image, bit_copy<T>(typename Format<T>::Word(0)));
      for (int64_t l = 0; l < s.places; ++l) {
        bool bad = false;
        const int64_t c = s.used_class(target[n * s.places + l], &bad);
        if (c < 0) continue;
        const C own = weight != nullptr ? widen(weight[c]) : C(1);
        const C term = nll_term(grad[n * s.places + l], weight != nullptr ? &own : nullptr);
        out[n * image + c * s.places + l] = narrow<T>(term);
      }
    }
  });
}

Tensor spread_cpu(Tensor grad, Tensor target, std::optional<Tensor> weight, int64_t classes,
                  int64_t ignore_index, ScalarType dtype) {
  const NllShape shape = nll_spread_shape(grad, target, weight, classes, ignore_index, dtype);
  grad = torch::stable::contiguous(grad);
  target = torch::stable::contiguous(target);
  if (weight.has_value()) weight = torch::stable::contiguous(*weight);
  const std::array<int64_t, 3> size{shape.images, shape.classes, shape.places};
  Tensor out = torch::stable::new_empty(grad, size, dtype);
  TRUNCDET_DISPATCH(dtype, "nll_loss", [&] {
    using C = typename Format<scalar_t>::Compute;
    spread<scalar_t>(const_data<C>(grad), const_data<int64_t>(target),
                     weight.has_value() ? const_data<scalar_t>(*weight) : nullptr, shape,
                     mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_nll_terms", TORCH_BOX(&truncdet::terms_cpu));
  m.impl("_nll_spread", TORCH_BOX(&truncdet::spread_cpu));
}
