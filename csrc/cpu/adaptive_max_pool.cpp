// The gradient of adaptive max pooling on the CPU: a thread owns a plane and walks over its
// outputs.
#include "../adaptive_max_pool.h"

#include <vector>

namespace truncdet {
namespace {

template <class T>
void backward(const T* grad, const int64_t* indices, const MaxPoolShape& s, T* out) {
  using C = typename Format<T>::Compute;
  torch::stable::parallel_for(0, s.planes, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> sums;
    for (int64_t plane = begin; plane < end; ++plane) {
      sums.assign(s.cells(), C(0));
      for (int64_t o = 0; o < s.outputs(); ++o) {
        const int64_t cell = indices[plane * s.outputs() + o];
        if (cell < 0 || cell >= s.cells()) continue;
        const auto rows = s.outputs_of(0, static_cast<int32_t>(cell / s.in[1]));
        const auto columns = s.outputs_of(1, static_cast<int32_t>(cell % s.in[1]));
        if (!contains(rows, static_cast<int32_t>(o / s.out[1])) ||
            !contains(columns, static_cast<int32_t>(o % s.out[1]))) {
          continue;
        }
        sums[cell] = sums[cell] + widen(grad[plane * s.outputs() + o]);
      }
      for (int64_t cell = 0; cell < s.cells(); ++cell) {
        out[plane * s.cells() + cell] = narrow<T>(sums[cell]);
      }
    }
  });
}

Tensor max_pool_backward_cpu(Tensor grad, Tensor indices, int64_t height, int64_t width) {
  const MaxPoolShape shape = max_pool_shape(grad, indices, height, width);
  Tensor out = empty_planes(grad, shape);
  TRUNCDET_DISPATCH(grad.scalar_type(), "_max_pool_backward", [&] {
    backward<scalar_t>(const_data<scalar_t>(grad), const_data<int64_t>(indices), shape,
                       mutable_data<scalar_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_max_pool_backward", TORCH_BOX(&truncdet::max_pool_backward_cpu));
}
