// Quotients of sums and counts on CUDA.
#include "../divide.h"

#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {
namespace {

template <class From, class To>
struct DivideParams {
  const From* values;
  const int64_t* counts;  // one for `inner` values, or null: one
  To* out;
  int64_t total;
  Divider by_inner;
};

template <class From, class To>
__global__ void divide_kernel(DivideParams<From, To> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < p.total;
       at += stride) {
    const int64_t count = p.counts != nullptr ? p.counts[p.by_inner.quotient(at)] : 1;
    p.out[at] = divide_and_round<To>(widen(p.values[at]), count);
  }
}

template <class From, class To>
void divide(const Tensor& values, const int64_t* counts, const DivideShape& shape,
            const Tensor& out) {
  if constexpr (computed_alike<From, To>()) {
    const DivideParams<From, To> params{const_data<From>(values), counts, mutable_data<To>(out),
                                        shape.values, Divider(shape.inner, shape.values)};
    divide_kernel<<<blocks_for(shape.values), kThreads, 0, current_stream(values)>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  }
}

Tensor divide_cuda(Tensor values, std::optional<Tensor> counts, ScalarType dtype) {
  const DivideShape shape = divide_shape(values, counts, dtype);
  const DeviceGuard guard(values.get_device_index());
  values = torch::stable::contiguous(values);
  if (counts.has_value()) counts = torch::stable::contiguous(*counts);
  const int64_t* n = counts.has_value() ? const_data<int64_t>(*counts) : nullptr;
  Tensor out = torch::stable::new_empty(values, values.sizes(), dtype);
  if (shape.values == 0) return out;
  TRUNCDET_DISPATCH(values.scalar_type(), "_divide", [&] {
    using from_t = scalar_t;
    TRUNCDET_DISPATCH(dtype, "_divide", [&] { divide<from_t, scalar_t>(values, n, shape, out); });
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_divide", TORCH_BOX(&truncdet::divide_cuda));
}
