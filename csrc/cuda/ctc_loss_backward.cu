// The gradient of ctc_loss on CUDA, without atomics: a block takes an item back through time, a
// thread a state; then a warp collects the states of one time, each class in ascending order of
// them.
#include "ctc_loss.cuh"

namespace truncdet {
namespace {

template <class T>
struct BackwardParams {
  CtcParams<T> given;
  const T* grad;             // [items]
  const double* alpha;       // [items, times, states]
  const double* likelihood;  // [items]
  double* share;             // [items, times, states] of all paths, those in a state at a time
  double* rows;              // [items, 2, states] of beta
  int32_t* next;             // [items, labels] the next label of the same class, or -1
  uint8_t* first;            // [items, labels] whether none of the same class comes before
  T* out;                    // [times, items, classes]

  // Whether the item has a gradient to be computed; if not, it is `fill`.
  __device__ __forceinline__ bool computes(int64_t n, T* fill) const {
    const double found = likelihood[n];
    const bool skipped = given.shape.zero_infinity && found == minus_infinite();
    *fill = skipped ? round_double<T>(0.0) : canonical_nan<T>();
    return is_finite(found);
  }
};

template <class T>
__global__ void __launch_bounds__(kCtcThreads) beta_kernel(BackwardParams<T> p) {
  const CtcShape& s = p.given.shape;
  const int64_t states = s.states();
  for (int64_t n = blockIdx.x; n < s.items; n += gridDim.x) {
    T fill;
    bool bad = false;  // the forward has reported it
    if (!p.computes(n, &fill)) continue;
    const CtcItem<T> item = p.given.item(n, &bad);
    for (int64_t k = threadIdx.x; k < item.states / 2; k += blockDim.x) {
      int64_t after = k + 1, before = k - 1;
      while (after < item.states / 2 && item.label(after) != item.label(k)) ++after;
      while (before >= 0 && item.label(before) != item.label(k)) --before;
      p.next[n * s.labels + k] = after < item.states / 2 ? static_cast<int32_t>(after) : -1;
      p.first[n * s.labels + k] = before < 0 ? 1 : 0;
    }
    const double* alpha = p.alpha + n * s.times * states;
    double* share = p.share + n * s.times * states;
    double* rows = p.rows + n * 2 * states;
    for (int64_t t = item.times - 1; t >= 0; --t) {
      double* row = rows + (t % 2) * states;
      const double* after = rows + ((t + 1) % 2) * states;
      for (int64_t state = threadIdx.x; state < item.states; state += blockDim.x) {
        const double onward = item.beta(t, state, after);
        const double path = (alpha[t * states + state] + onward) - p.likelihood[n];
        share[t * states + state] = exp_fixed(path);
        row[state] = onward + item.log_prob(t, item.class_of(state));
      }
      __syncthreads();
    }
  }
}

// A warp for each item and time.
template <class T>
__global__ void collect_kernel(BackwardParams<T> p) {
  const CtcShape& s = p.given.shape;
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
       at < s.items * s.times; at += warps) {
    // at = t * items + n
    const int64_t t = at / s.items, n = at - t * s.items;
    T* out = p.out + at * s.classes;
    T fill;
    bool bad = false;
    const CtcItem<T> item = p.given.item(n, &bad);
    const bool computes = p.computes(n, &fill);
    if (t >= item.times) fill = round_double<T>(0.0);
    if (t >= item.times || !computes) {
      for (int64_t c = lane; c < s.classes; c += 32) out[c] = fill;
      continue;
    }
    const double grad = to_double(widen(p.grad[n]));
    const double* share = p.share + (n * s.times + t) * s.states();
    for (int64_t c = lane; c < s.classes; c += 32) {
      out[c] = ctc_gradient<T>(item.log_prob(t, c), 0.0, grad);
    }
    __syncwarp();  // what follows overwrites cells that other lanes have written
    if (lane == 0) {
      double sum = 0.0;
      for (int64_t state = 0; state < item.states; ++state) {
        if (item.class_of(state) == s.blank) sum = sum + share[state];
      }
      out[s.blank] = ctc_gradient<T>(item.log_prob(t, s.blank), sum, grad);
    }
    for (int64_t k = 31 - lane; k < item.states / 2; k += 32) {
      const int64_t c = item.label(k);
      if (p.first[n * s.labels + k] == 0 || c == s.blank) continue;
      double sum = 0.0;
      for (int64_t j = k; j >= 0; j = p.next[n * s.labels + j]) sum = sum + share[2 * j + 1];
      out[c] = ctc_gradient<T>(item.log_prob(t, c), sum, grad);
    }
  }
}

// One allocation for all that the backward needs besides: float64 first, then smaller words.
struct Scratch {
  Tensor memory;
  double *share, *rows;
  int32_t* next;
  uint8_t* first;

  Scratch(const Tensor& like, const CtcShape& s) {
    const int64_t states = s.items * s.states(), labels = s.items * s.labels;
    const int64_t bytes = 8 * (s.times + 2) * states + 5 * labels;
    memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt, like.device(),
                                  std::nullopt, std::nullopt);
    share = mutable_data<double>(memory);
    rows = share + s.times * states;
    next = reinterpret_cast<int32_t*>(rows + 2 * states);
    first = reinterpret_cast<uint8_t*>(next + labels);
  }
};

Tensor backward_cuda(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths,
                     Tensor target_lengths, Tensor likelihood, Tensor alpha, int64_t blank,
                     bool zero_infinity) {
  const CtcShape s =
      ctc_shape(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  check_ctc_backward(s, log_probs, grad, likelihood, alpha);
  const DeviceGuard guard(log_probs.get_device_index());
  for (Tensor* tensor : {&grad, &targets, &input_lengths, &target_lengths, &likelihood, &alpha}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  Tensor out = torch::stable::new_empty(log_probs, log_probs.sizes());
  if (out.numel() == 0) return out;
  const Scratch scratch(log_probs, s);
  const cudaStream_t stream = current_stream(log_probs);
  TRUNCDET_DISPATCH(log_probs.scalar_type(), "ctc_loss", [&] {
    const BackwardParams<scalar_t> params{
        {s, const_data<scalar_t>(log_probs), const_data<int64_t>(targets),
         const_data<int64_t>(input_lengths), const_data<int64_t>(target_lengths)},
        const_data<scalar_t>(grad),
        const_data<double>(alpha),
        const_data<double>(likelihood),
        scratch.share,
        scratch.rows,
        scratch.next,
        scratch.first,
        mutable_data<scalar_t>(out)};
    beta_kernel<scalar_t><<<blocks_of(s.items), threads_for(s.states()), 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
    collect_kernel<scalar_t><<<blocks_for(32 * s.items * s.times), kThreads, 0, stream>>>(params);
    TRUNCDET_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("ctc_loss_backward", TORCH_BOX(&truncdet::backward_cuda));
}
