"""ctc_loss in plain tensor operations: log probabilities of paths, forwards and backwards in time.

A target of n labels becomes the 2 n + 1 states blank, label, blank, ..., label, blank. With
p(t, s) the log probability of the class of state s at time t, and log-sum-exp written as a sum,

    alpha(t, s) = (alpha(t-1, s) + alpha(t-1, s-1) + alpha(t-1, s-2)) * p(t, s)
    beta(t, s)  = p(t+1, s) beta(t+1, s) + p(t+1, s+1) beta(t+1, s+1) + p(t+1, s+2) beta(t+1, s+2)
    Z           = alpha(T-1, last) + alpha(T-1, last - 1)
    loss        = -Z
    gradient    = (exp(p(t, c)) - sum over s of class c of alpha(t, s) beta(t, s) / Z) * g

where the term of s-2 (s+2) exists between different labels only. All of it is float64, rounded once
at the end; the sum over s is taken in ascending order. exp and log are series of + - * / (their
twins are in csrc/elementary.h), because those of libraries differ between processors.

Graves et al., "Connectionist temporal classification: labelling unsegmented sequence data with
recurrent neural networks", ICML 2006, equations (6) to (16).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._sticky import CTC_LOSS

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_EXP_MAX, _EXP_MIN = 709.0, -708.0
_SQRT2 = 1.4142135623730951
_BITS = fp.FORMATS[torch.float64].fraction_bits


def exp_fixed(x: Tensor) -> Tensor:
    """exp of float64; 0 below the normal numbers, and NaN canonical."""
    inside = x.clamp(_EXP_MIN, _EXP_MAX).nan_to_num(0.0)
    k = torch.round(inside * _LOG2_E)
    r = (inside - k * _LN2_HIGH) - k * _LN2_LOW
    total = torch.full_like(x, 1.0 / math.factorial(13))
    for n in range(12, -1, -1):
        total = total * r + 1.0 / math.factorial(n)
    result = total * fp.power_of_two(k)
    result = torch.where(x > _EXP_MAX, torch.inf, torch.where(x < _EXP_MIN, 0.0, result))
    return result.masked_fill(x.isnan(), torch.nan)


def log_fixed(x: Tensor) -> Tensor:
    """log of normal positive float64."""
    word = x.contiguous().view(torch.int64)
    k = (word >> _BITS) - fp.FORMATS[torch.float64].max_exponent
    one = fp.FORMATS[torch.float64].max_exponent << _BITS
    m = ((word & ((1 << _BITS) - 1)) | one).view(torch.float64)
    large = m > _SQRT2
    m, k = torch.where(large, m * 0.5, m), (k + large.to(torch.int64)).to(torch.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    total = torch.full_like(x, 1.0 / 21.0)
    for n in range(19, 2, -2):
        total = total * z + 1.0 / n
    twice = s + s
    return k * _LN2_HIGH + (twice + (twice * z * total + k * _LN2_LOW))


def log_sum(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """log(exp(a) + exp(b) + exp(c)); minus infinity stands for a probability of zero."""
    largest = torch.where(b > a, b, a)
    largest = torch.where(c > largest, c, largest)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    total = (exp_fixed(a - largest) + exp_fixed(b - largest)) + exp_fixed(c - largest)
    logs = log_fixed(torch.where(total > 0, total, 1.0)) + largest
    logs = torch.where(total > 0, logs, torch.nan)
    return torch.where(total == 0, -torch.inf, logs)


def round_double(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 rounded once; zero has no sign and NaN is canonical."""
    if dtype == torch.float64:
        rounded = torch.where(x == 0, 0.0, x)
    else:
        rounded = fp._narrow_odd(torch.where(x.isfinite(), x, 0.0), dtype)
        rounded = torch.where(x.isinf(), x.to(dtype), rounded)
    return rounded.masked_fill(x.isnan(), torch.nan)


def to_double(x: Tensor) -> Tensor:
    """A number of any storage type as it is, subnormal numbers included."""
    if x.dtype == torch.float64:
        return x
    return torch.where(x.isfinite(), fp._exact_double(x), x.to(torch.float64))


class Items:
    """Lengths and labels of a call, made safe: what is out of range is reported on a GPU."""

    def __init__(
        self, log_probs: Tensor, targets: Tensor, lengths: tuple[Tensor, Tensor], blank: int
    ) -> None:
        times, _, classes = log_probs.shape
        labels = targets.size(1)
        self.times = lengths[0].clamp(0, times)
        self.states = 2 * lengths[1].clamp(0, labels) + 1
        used = torch.arange(labels, device=targets.device) < lengths[1].unsqueeze(1)
        outside = (targets < 0) | (targets >= classes)
        self.bad = (outside & used).any() | (lengths[0] < 0).any() | (lengths[0] > times).any()
        self.bad = self.bad | (lengths[1] < 0).any() | (lengths[1] > labels).any()
        safe = targets.masked_fill(outside, blank)
        blanks = torch.full_like(safe, blank)
        last = targets.new_full((len(safe), 1), blank)
        self.classes = torch.cat([torch.stack([blanks, safe], 2).flatten(1), last], 1)
        # Over the blank before it, from a label that is another one.
        self.skips = torch.zeros_like(self.classes, dtype=torch.bool)
        self.skips[:, 3::2] = safe[:, 1:] != safe[:, :-1]
        self.state = torch.arange(2 * labels + 1, device=targets.device)
        wide = to_double(log_probs).transpose(0, 1)
        self.own = wide.gather(2, self.classes.unsqueeze(1).expand(-1, times, -1))
        self.log_probs = wide


def shifted(row: Tensor, steps: int) -> Tensor:
    """The value of the state so many steps before (after, if negative); none is minus infinity."""
    none = row.new_full((row.size(0), min(abs(steps), row.size(1))), -torch.inf)
    if steps > 0:
        return torch.cat([none, row[:, : row.size(1) - none.size(1)]], 1)
    return torch.cat([row[:, none.size(1) :], none], 1)


def forward(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and log likelihoods [N] and alpha [N, T, 2 S + 1] for targets [N, S]."""
    items = Items(log_probs, targets, (input_lengths, target_lengths), blank)
    if not log_probs.is_cpu:
        _sticky.note_out_of_range(CTC_LOSS, items.bad)
    rows: list[Tensor] = []
    for t in range(log_probs.size(0)):
        if t == 0:
            row = torch.where(items.state < 2, items.own[:, 0], -torch.inf)
        else:
            skip = torch.where(items.skips, shifted(rows[-1], 2), -torch.inf)
            row = log_sum(rows[-1], shifted(rows[-1], 1), skip) + items.own[:, t]
        none = (items.state >= items.states.unsqueeze(1)) | (t >= items.times.unsqueeze(1))
        rows.append(row.masked_fill(row.isnan(), torch.nan).masked_fill(none, -torch.inf))
    alpha = torch.stack(rows, 1)
    last = (items.times - 1).clamp(min=0).reshape(-1, 1, 1).expand(-1, 1, alpha.size(2))
    last_row = alpha.gather(1, last).squeeze(1)
    final = last_row.gather(1, (items.states - 1).unsqueeze(1)).squeeze(1)
    before = last_row.gather(1, (items.states - 2).clamp(min=0).unsqueeze(1)).squeeze(1)
    nothing = torch.full_like(final, -torch.inf)
    likelihood = log_sum(final, torch.where(items.states > 1, before, nothing), nothing)
    empty = torch.where(items.states == 1, 0.0, nothing)
    likelihood = torch.where(items.times == 0, empty, likelihood)
    loss = 0.0 - likelihood
    if zero_infinity:
        loss = loss.masked_fill(likelihood == -torch.inf, 0.0)
    return round_double(loss, log_probs.dtype), likelihood, alpha


def backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    likelihood: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of log_probs, [T, N, C]."""
    items = Items(log_probs, targets, (input_lengths, target_lengths), blank)
    shares = torch.zeros_like(alpha)
    end = items.states.unsqueeze(1)
    row = torch.full_like(alpha[:, 0], -torch.inf)
    for t in range(log_probs.size(0) - 1, -1, -1):
        skip = torch.where(shifted(items.skips.to(row.dtype), -2) > 0, shifted(row, -2), -torch.inf)
        onward = log_sum(row, shifted(row, -1), skip)
        final = torch.where(items.state >= end - 2, 0.0, -torch.inf)
        onward = torch.where((items.times - 1).eq(t).unsqueeze(1), final, onward)
        unused = (items.state >= end) | (t >= items.times.unsqueeze(1))
        onward = onward.masked_fill(unused, -torch.inf)
        shares[:, t] = exp_fixed((alpha[:, t] + onward) - likelihood.unsqueeze(1))
        shares[:, t] = shares[:, t].masked_fill(unused, 0.0)
        row = (onward + items.own[:, t]).masked_fill(unused, -torch.inf)
    totals = torch.zeros_like(items.log_probs)
    for s in range(alpha.size(2)):
        where = items.classes[:, s].reshape(-1, 1, 1).expand(-1, alpha.size(1), 1)
        totals = totals.scatter_add(2, where, shares[:, :, s : s + 1])
    out = (exp_fixed(items.log_probs) - totals) * to_double(grad).reshape(-1, 1, 1)
    out = out.masked_fill(~likelihood.isfinite().reshape(-1, 1, 1), torch.nan)
    later = torch.arange(log_probs.size(0), device=grad.device) >= items.times.unsqueeze(1)
    if zero_infinity:
        later = later | torch.isneginf(likelihood).unsqueeze(1)
    out = out.masked_fill(later.unsqueeze(2), 0.0)
    return round_double(out, log_probs.dtype).transpose(0, 1).contiguous()
