// Quotients of sums and counts on the CPU.
#include "../divide.h"

namespace truncdet {
namespace {

template <class From, class To>
void divide(const Tensor& values, const int64_t* counts, const DivideShape& shape, Tensor& out) {
  if constexpr (computed_alike<From, To>()) {
    const From* from = const_data<From>(values);
    To* to = mutable_data<To>(out);
    for (int64_t at = 0; at < shape.values; ++at) {
      const int64_t count = counts != nullptr ? counts[at / shape.inner] : 1;
      to[at] = divide_and_round<To>(widen(from[at]), count);
    }
  }
}

Tensor divide_cpu(Tensor values, std::optional<Tensor> counts, ScalarType dtype) {
  const DivideShape shape = divide_shape(values, counts, dtype);
  values = torch::stable::contiguous(values);
  if (counts.has_value()) counts = torch::stable::contiguous(*counts);
  const int64_t* n = counts.has_value() ? const_data<int64_t>(*counts) : nullptr;
  Tensor out = torch::stable::new_empty(values, values.sizes(), dtype);
  TRUNCDET_DISPATCH(values.scalar_type(), "_divide", [&] {
    using from_t = scalar_t;
    TRUNCDET_DISPATCH(dtype, "_divide", [&] { divide<from_t, scalar_t>(values, n, shape, out); });
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) { m.impl("_divide", TORCH_BOX(&truncdet::divide_cpu)); }
