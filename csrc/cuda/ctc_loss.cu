// ctc_loss on CUDA: a block takes an item through time, a thread a state.
#include "ctc_loss.cuh"

#include <array>
#include <tuple>

namespace truncdet {
namespace {

template <class T>
struct ForwardParams {
  CtcParams<T> given;
  double* alpha;       // [items, times, states]
  double* likelihood;  // [items]
  T* loss;             // [items]
  unsigned* sticky;
  unsigned bit;
};

template <class T>
__global__ void __launch_bounds__(kCtcThreads) alpha_kernel(ForwardParams<T> p) {
  const CtcShape& s = p.given.shape;
  const int64_t states = s.states();
  bool bad = false;
  for (int64_t n = blockIdx.x; n < s.items; n += gridDim.x) {
    const CtcItem<T> item = p.given.item(n, &bad);
    for (int64_t k = threadIdx.x; k < item.states / 2; k += blockDim.x) bad |= !item.is_label(k);
    double* rows = p.alpha + n * s.times * states;
    const double* before = rows;  // not read at the first time
    for (int64_t t = 0; t < s.times; ++t) {
      double* row = rows + t * states;
      for (int64_t state = threadIdx.x; state < states; state += blockDim.x) {
        row[state] = item.alpha(t, state, before);
      }
      before = row;
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      const double found = item.likelihood(rows);
      p.likelihood[n] = found;
      p.loss[n] = ctc_loss_of<T>(found, s.zero_infinity);
    }
  }
  if (bad) set_sticky(p.sticky, static_cast<StickyBit>(p.bit));
}

std::tuple<Tensor, Tensor, Tensor> forward_cuda(Tensor log_probs, Tensor targets,
                                                Tensor input_lengths, Tensor target_lengths,
                                                int64_t blank, bool zero_infinity) {
  const CtcShape s =
      ctc_shape(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  const DeviceGuard guard(log_probs.get_device_index());
  for (Tensor* tensor : {&targets, &input_lengths, &target_lengths}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  const std::array<int64_t, 3> rows{s.items, s.times, s.states()};
  Tensor loss = torch::stable::new_empty(log_probs, {rows.data(), 1});
  Tensor likelihood = torch::stable::new_empty(log_probs, {rows.data(), 1}, ScalarType::Double);
  Tensor alpha = torch::stable::new_empty(log_probs, rows, ScalarType::Double);
  if (s.items == 0) return {loss, likelihood, alpha};
  TRUNCDET_DISPATCH(log_probs.scalar_type(), "ctc_loss", [&] {
    const ForwardParams<scalar_t> params{
        {s, const_data<scalar_t>(log_probs), const_data<int64_t>(targets),
         const_data<int64_t>(input_lengths), const_data<int64_t>(target_lengths)},
        mutable_data<double>(alpha),
        mutable_data<double>(likelihood),
        mutable_data<scalar_t>(loss),
        sticky_word(),
        kStickyCtcLoss};
    alpha_kernel<scalar_t>
        <<<blocks_of(s.items), threads_for(s.states()), 0, current_stream(log_probs)>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return {loss, likelihood, alpha};
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_ctc_loss", TORCH_BOX(&truncdet::forward_cuda));
}
