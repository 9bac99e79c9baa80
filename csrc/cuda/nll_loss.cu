// Terms of nll_loss and their gradient on CUDA: one gathers and the other writes every cell once,
// so neither has atomics.
#include "../nll_loss.h"

#include <array>
#include <tuple>

#include "launch.cuh"
#include "vector.cuh"

namespace truncdet {
namespace {

// Classes of a place that one thread writes: its target is read once for all of them.
constexpr int kClasses = 8;

template <class T>
struct TermsParams {
  using C = typename Format<T>::Compute;
  NllShape shape;
  Divider by_places;
  const T* input;
  int64_t stride[3];  // of input, in elements
  const int64_t* target;
  const T* weight;  // or null
  C *term, *factor;
  unsigned* sticky;
  unsigned bit;  // of the operator to blame for a target out of range; 0: nobody
};

template <class T>
__global__ void terms_kernel(TermsParams<T> p) {
  using C = typename Format<T>::Compute;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = p.shape.images * p.shape.places;
  bool bad = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    // at = n * places + l
    const int64_t n = p.by_places.quotient(at), l = at - n * p.shape.places;
    const int64_t c = p.shape.used_class(p.target[at], &bad);
    C term(0), factor(0);
    if (c >= 0) {
      const C value = widen(p.input[n * p.stride[0] + c * p.stride[1] + l * p.stride[2]]);
      const C own = p.weight != nullptr ? widen(p.weight[c]) : C(1);
      term = nll_term(value, p.weight != nullptr ? &own : nullptr);
      factor = narrow<C>(own);
    }
    p.term[at] = term;
    p.factor[at] = factor;
  }
  if (bad && p.bit != 0) set_sticky(p.sticky, static_cast<StickyBit>(p.bit));
}

std::tuple<Tensor, Tensor> terms_cuda(Tensor input, Tensor target, std::optional<Tensor> weight,
                                      int64_t ignore_index, int64_t bit) {
  const NllShape shape = nll_terms_shape(input, target, weight, ignore_index);
  const DeviceGuard guard(input.get_device_index());
  target = torch::stable::contiguous(target);
  if (weight.has_value()) weight = torch::stable::contiguous(*weight);
  const ScalarType kind = compute_type(input.scalar_type());
  Tensor term = torch::stable::new_empty(input, target.sizes(), kind);
  Tensor factor = torch::stable::new_empty(input, target.sizes(), kind);
  const int64_t total = shape.targets();
  if (total == 0) return {term, factor};
  const auto stride = input.strides();
  TRUNCDET_DISPATCH(input.scalar_type(), "nll_loss", [&] {
    using C = typename Format<scalar_t>::Compute;
    const TermsParams<scalar_t> params{shape,
                                       Divider(shape.places, total),
                                       const_data<scalar_t>(input),
                                       {stride[0], stride[1], stride[2]},
                                       const_data<int64_t>(target),
                                       weight.has_value() ? const_data<scalar_t>(*weight) : nullptr,
                                       mutable_data<C>(term),
                                       mutable_data<C>(factor),
                                       sticky_word(),
                                       static_cast<unsigned>(bit)};
    terms_kernel<scalar_t><<<blocks_for(total), kThreads, 0, current_stream(input)>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return {term, factor};
}

template <class T>
struct SpreadParams {
  using C = typename Format<T>::Compute;
  NllShape shape;
  int64_t parts;  // of kClasses classes
  Divider by_places, by_parts;
  const C* grad;
  const int64_t* target;
  const T* weight;  // or null
  T* out;           // [images, classes, places]
};

template <class T>
__global__ void spread_kernel(SpreadParams<T> p) {
  using C = typename Format<T>::Compute;
  const NllShape& s = p.shape;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = s.images * p.parts * s.places;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    // at = (n * parts + part) * places + l
    const int64_t rest = p.by_places.quotient(at), l = at - rest * s.places;
    const int64_t n = p.by_parts.quotient(rest), first = (rest - n * p.parts) * kClasses;
    const int64_t place = n * s.places + l;
    bool bad = false;
    const int64_t used = s.used_class(p.target[place], &bad);
    T value = bit_copy<T>(typename Format<T>::Word(0));
    if (used >= first && used < first + kClasses) {
      const C own = p.weight != nullptr ? widen(p.weight[used]) : C(1);
      value = narrow<T>(nll_term(p.grad[place], p.weight != nullptr ? &own : nullptr));
    }
    T* out = p.out + (n * s.classes + first) * s.places + l;
#pragma unroll
    for (int j = 0; j < kClasses; ++j) {
      if (first + j >= s.classes) break;
      out[j * s.places] = first + j == used ? value : bit_copy<T>(typename Format<T>::Word(0));
    }
  }
}

Tensor spread_cuda(Tensor grad, Tensor target, std::optional<Tensor> weight, int64_t classes,
                   int64_t ignore_index, ScalarType dtype) {
  const NllShape shape = nll_spread_shape(grad, target, weight, classes, ignore_index, dtype);
  const DeviceGuard guard(grad.get_device_index());
  grad = torch::stable::contiguous(grad);
  target = torch::stable::contiguous(target);
  if (weight.has_value()) weight = torch::stable::contiguous(*weight);
  const std::array<int64_t, 3> size{shape.images, shape.classes, shape.places};
  Tensor out = torch::stable::new_empty(grad, size, dtype);
  if (out.numel() == 0) return out;
  const int64_t parts = (shape.classes + kClasses - 1) / kClasses;
  const int64_t total = shape.images * parts * shape.places;
  TRUNCDET_DISPATCH(dtype, "nll_loss", [&] {
    using C = typename Format<scalar_t>::Compute;
    const SpreadParams<scalar_t> params{
        shape,
        parts,
        Divider(shape.places, total),
        Divider(parts, shape.images * parts),
        const_data<C>(grad),
        const_data<int64_t>(target),
        weight.has_value() ? const_data<scalar_t>(*weight) : nullptr,
        mutable_data<scalar_t>(out)};
    spread_kernel<scalar_t><<<blocks_for(total), kThreads, 0, current_stream(grad)>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_nll_terms", TORCH_BOX(&truncdet::terms_cuda));
  m.impl("_nll_spread", TORCH_BOX(&truncdet::spread_cuda));
}
