// ctc_loss and its gradient on the CPU: the recursions, read directly.
#include "../ctc_loss.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

namespace truncdet {
namespace {

struct Lengths {
  const int64_t *targets, *input_lengths, *target_lengths;
};

std::tuple<Tensor, Tensor, Tensor> forward_cpu(Tensor log_probs, Tensor targets,
                                               Tensor input_lengths, Tensor target_lengths,
                                               int64_t blank, bool zero_infinity) {
  const CtcShape s =
      ctc_shape(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  for (Tensor* tensor : {&targets, &input_lengths, &target_lengths}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  const std::array<int64_t, 3> rows{s.items, s.times, s.states()};
  Tensor loss = torch::stable::new_empty(log_probs, {rows.data(), 1});
  Tensor likelihood = torch::stable::new_empty(log_probs, {rows.data(), 1}, ScalarType::Double);
  Tensor alpha = torch::stable::new_empty(log_probs, rows, ScalarType::Double);
  double *of_item = mutable_data<double>(likelihood), *alphas = mutable_data<double>(alpha);
  const Lengths given{const_data<int64_t>(targets), const_data<int64_t>(input_lengths),
                      const_data<int64_t>(target_lengths)};
  TRUNCDET_DISPATCH(log_probs.scalar_type(), "ctc_loss", [&] {
    const scalar_t* probs = const_data<scalar_t>(log_probs);
    scalar_t* out = mutable_data<scalar_t>(loss);
    torch::stable::parallel_for(0, s.items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        bool bad = false;
        const CtcItem<scalar_t> item(s, probs, given.targets, given.input_lengths,
                                     given.target_lengths, n, &bad);
        double* rows = alphas + n * s.times * s.states();
        const double* before = rows;  // not read at the first time
        for (int64_t t = 0; t < s.times; ++t) {
          double* row = rows + t * s.states();
          for (int64_t state = 0; state < s.states(); ++state) {
            row[state] = item.alpha(t, state, before);
          }
          before = row;
        }
        of_item[n] = item.likelihood(rows);
        out[n] = ctc_loss_of<scalar_t>(of_item[n], zero_infinity);
      }
    });
  });
  return {loss, likelihood, alpha};
}

// The gradient of one item, [times, classes] with rows `out_stride` apart.
template <class T>
void backward(const CtcItem<T>& item, double grad, double likelihood, const double* alpha, T* out,
              int64_t out_stride) {
  const CtcShape& s = item.s;
  const auto fill = [&](int64_t t, T value) {
    std::fill(out + t * out_stride, out + t * out_stride + s.classes, value);
  };
  const bool skipped = s.zero_infinity && likelihood == minus_infinite();
  for (int64_t t = skipped ? 0 : item.times; t < s.times; ++t) fill(t, round_double<T>(0.0));
  if (skipped) return;
  if (!is_finite(likelihood)) {
    for (int64_t t = 0; t < item.times; ++t) fill(t, canonical_nan<T>());
    return;
  }
  std::vector<double> row(item.states), after(item.states), share(s.classes);
  for (int64_t t = item.times - 1; t >= 0; --t) {
    std::fill(share.begin(), share.end(), 0.0);
    for (int64_t state = 0; state < item.states; ++state) {
      const int64_t c = item.class_of(state);
      const double onward = item.beta(t, state, after.data());
      const double path = (alpha[t * s.states() + state] + onward) - likelihood;
      share[c] = share[c] + exp_fixed(path);
      row[state] = onward + item.log_prob(t, c);
    }
    after.swap(row);
    for (int64_t c = 0; c < s.classes; ++c) {
      out[t * out_stride + c] = ctc_gradient<T>(item.log_prob(t, c), share[c], grad);
    }
  }
}

Tensor backward_cpu(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths,
                    Tensor target_lengths, Tensor likelihood, Tensor alpha, int64_t blank,
                    bool zero_infinity) {
  const CtcShape s =
      ctc_shape(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  check_ctc_backward(s, log_probs, grad, likelihood, alpha);
  for (Tensor* tensor : {&grad, &targets, &input_lengths, &target_lengths, &likelihood, &alpha}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  Tensor out = torch::stable::new_empty(log_probs, log_probs.sizes());
  const Lengths given{const_data<int64_t>(targets), const_data<int64_t>(input_lengths),
                      const_data<int64_t>(target_lengths)};
  TRUNCDET_DISPATCH(log_probs.scalar_type(), "ctc_loss", [&] {
    const scalar_t *probs = const_data<scalar_t>(log_probs), *g = const_data<scalar_t>(grad);
    scalar_t* to = mutable_data<scalar_t>(out);
    torch::stable::parallel_for(0, s.items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        bool bad = false;
        const CtcItem<scalar_t> item(s, probs, given.targets, given.input_lengths,
                                     given.target_lengths, n, &bad);
        backward(item, to_double(widen(g[n])), const_data<double>(likelihood)[n],
                 const_data<double>(alpha) + n * s.times * s.states(), to + n * s.classes,
                 s.items * s.classes);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_ctc_loss", TORCH_BOX(&truncdet::forward_cpu));
  m.impl("ctc_loss_backward", TORCH_BOX(&truncdet::backward_cpu));
}
