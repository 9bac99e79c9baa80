// The recursions of connectionist temporal classification, shared by the CPU and the CUDA host
// functions. A target of n labels becomes 2 n + 1 states: blank, label, blank, ..., label, blank.
// Everything is computed in float64, whatever the storage type, with exp and log of our own.
//
// Graves et al., "Connectionist temporal classification", ICML 2006: alpha is equations (6) to (8),
// beta (10) and (11), here without the probability at the time itself, the gradient (16).
#pragma once

#include "checks.h"
#include "elementary.h"

namespace truncdet {

struct CtcShape {
  int64_t times, items, classes;         // log_probs: [times, items, classes]
  int64_t labels;                        // targets: [items, labels]
  int64_t stride_t, stride_n, stride_c;  // of log_probs, in elements
  int64_t blank;
  bool zero_infinity;

  TRUNCDET_HD int64_t states() const { return 2 * labels + 1; }
};

TRUNCDET_HD double minus_infinite() { return -bit_copy<double>(infinity_word<double>()); }

// One item: its lengths and labels, made safe. What was out of range is noted in `bad`: a label
// counts as blank, a length as the nearest one that is possible.
template <class T>
struct CtcItem {
  const CtcShape& s;
  const T* log_probs;  // of the item
  const int64_t* targets;
  int64_t times, states;

  TRUNCDET_HD CtcItem(const CtcShape& shape, const T* probs, const int64_t* labels,
                      const int64_t* input_lengths, const int64_t* target_lengths, int64_t n,
                      bool* bad)
      : s(shape), log_probs(probs + n * shape.stride_n), targets(labels + n * shape.labels) {
    times = clamp(input_lengths[n], shape.times, bad);
    states = 2 * clamp(target_lengths[n], shape.labels, bad) + 1;
  }
  TRUNCDET_HD static int64_t clamp(int64_t value, int64_t most, bool* bad) {
    *bad |= value < 0 || value > most;
    return value < 0 ? 0 : (value > most ? most : value);
  }

  TRUNCDET_HD bool is_label(int64_t k) const { return targets[k] >= 0 && targets[k] < s.classes; }
  TRUNCDET_HD int64_t label(int64_t k) const { return is_label(k) ? targets[k] : s.blank; }
  TRUNCDET_HD int64_t class_of(int64_t state) const {
    return state % 2 == 0 ? s.blank : label(state / 2);
  }
  TRUNCDET_HD double log_prob(int64_t t, int64_t c) const {
    return to_double(widen(log_probs[t * s.stride_t + c * s.stride_c]));
  }
  // Whether a path may come to `state` from two states before: over a blank between two different
  // labels.
  TRUNCDET_HD bool skips_to(int64_t state) const {
    return state % 2 == 1 && state > 1 && label(state / 2) != label(state / 2 - 1);
  }

  // Of all paths that are in `state` at time t; `before` is the row of t - 1.
  TRUNCDET_HD double alpha(int64_t t, int64_t state, const double* before) const {
    if (t >= times || state >= states) return minus_infinite();
    const double own = log_prob(t, class_of(state));
    if (t == 0) return state < 2 ? narrow<double>(own) : minus_infinite();
    const double stay = before[state];
    const double step = state > 0 ? before[state - 1] : minus_infinite();
    const double skip = skips_to(state) ? before[state - 2] : minus_infinite();
    return narrow<double>(log_sum_fixed(stay, step, skip) + own);
  }
  // Of all ways to go on from `state` at time t; `after` is the row of t + 1, where the
  // probabilities at t + 1 are in it already.
  TRUNCDET_HD double beta(int64_t t, int64_t state, const double* after) const {
    if (t == times - 1) return state >= states - 2 ? 0.0 : minus_infinite();
    const double stay = after[state];
    const double step = state + 1 < states ? after[state + 1] : minus_infinite();
    const bool may_skip = state + 2 < states && skips_to(state + 2);
    const double skip = may_skip ? after[state + 2] : minus_infinite();
    return log_sum_fixed(stay, step, skip);
  }
  // Of the whole target, from the item's rows of alpha.
  TRUNCDET_HD double likelihood(const double* alphas) const {
    if (times == 0) return states == 1 ? 0.0 : minus_infinite();
    const double* last = alphas + (times - 1) * s.states();
    const double without_blank = states > 1 ? last[states - 2] : minus_infinite();
    return log_sum_fixed(last[states - 1], without_blank, minus_infinite());
  }
};

template <class T>
TRUNCDET_HD T ctc_loss_of(double likelihood, bool zero_infinity) {
  const bool infinite = likelihood == minus_infinite();
  return round_double<T>(zero_infinity && infinite ? 0.0 : 0.0 - likelihood);
}

// The cell of a class with log probability `own`, of which `share` of all paths' weight makes use.
template <class T>
TRUNCDET_HD T ctc_gradient(double own, double share, double grad) {
  return round_double<T>((exp_fixed(own) - share) * grad);
}

inline CtcShape ctc_shape(const Tensor& log_probs, const Tensor& targets,
                          const Tensor& input_lengths, const Tensor& target_lengths, int64_t blank,
                          bool zero_infinity) {
  TRUNCDET_CHECK(log_probs.dim() == 3 && targets.dim() == 2,
                 "ctc_loss: log_probs must be [T, N, C] and targets [N, S]");
  const int64_t items = log_probs.size(1), classes = log_probs.size(2);
  TRUNCDET_CHECK(targets.size(0) == items, "ctc_loss: targets must have ", items, " rows");
  TRUNCDET_CHECK(blank >= 0 && blank < classes, "ctc_loss: blank must be in [0, ", classes, ")");
  for (const Tensor* lengths : {&input_lengths, &target_lengths}) {
    TRUNCDET_CHECK(lengths->dim() == 1 && lengths->size(0) == items,
                   "ctc_loss: lengths must be vectors of ", items, " elements");
  }
  for (const Tensor* other : {&targets, &input_lengths, &target_lengths}) {
    TRUNCDET_CHECK(other->scalar_type() == ScalarType::Long,
                   "ctc_loss: targets and lengths must be int64");
    TRUNCDET_CHECK(other->is_cuda() == log_probs.is_cuda() &&
                       other->get_device_index() == log_probs.get_device_index(),
                   "ctc_loss: targets and lengths must be on log_probs' device");
  }
  TRUNCDET_CHECK(targets.size(1) < (int64_t(1) << 30),
                 "ctc_loss: a target must have fewer than 2^30 labels, got ", targets.size(1));
  const auto stride = log_probs.strides();
  return {log_probs.size(0), items,     classes, targets.size(1), stride[0],
          stride[1],         stride[2], blank,   zero_infinity};
}

// What the backward has besides.
inline void check_ctc_backward(const CtcShape& s, const Tensor& log_probs, const Tensor& grad,
                               const Tensor& likelihood, const Tensor& alpha) {
  TRUNCDET_CHECK(
      grad.dim() == 1 && grad.size(0) == s.items && grad.scalar_type() == log_probs.scalar_type(),
      "ctc_loss: grad must have one element for each item, of log_probs' dtype");
  TRUNCDET_CHECK(likelihood.dim() == 1 && likelihood.size(0) == s.items && alpha.dim() == 3 &&
                     alpha.size(0) == s.items && alpha.size(1) == s.times &&
                     alpha.size(2) == s.states(),
                 "ctc_loss: likelihood and alpha must be those of the forward");
  for (const Tensor* other : {&likelihood, &alpha}) {
    TRUNCDET_CHECK(other->scalar_type() == ScalarType::Double,
                   "ctc_loss: likelihood and alpha must be float64");
  }
  for (const Tensor* other : {&grad, &likelihood, &alpha}) {
    TRUNCDET_CHECK(other->is_cuda() == log_probs.is_cuda() &&
                       other->get_device_index() == log_probs.get_device_index(),
                   "ctc_loss: grad, likelihood and alpha must be on log_probs' device");
  }
}

}  // namespace truncdet
