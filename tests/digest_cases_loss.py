"""The digest cases of the losses and of nms and topk."""

import torch
from digest_cases_scatter import whole
from exact_arithmetic import FLOATS
from roi_cases import values

import truncdet


def loss_cases(named, short, index):
    """Registers the cases with `named`; `short` names a dtype, `index` draws integers."""
    for number, dtype in enumerate(FLOATS):
        _add_nll_loss(named, f"nll_loss/{short(dtype)}", index, dtype)
        _add_ctc_loss(named, f"ctc_loss/{short(dtype)}", index, dtype)
        _add_order(named, f"order/{short(dtype)}", index, dtype, 40 + number)


def _add_nll_loss(named, name, index, dtype):
    @named(name)
    def run(device):
        input, weight = values((3, 7, 50), 31, dtype, device), values((7,), 32, dtype, device)
        target = index(150, 7, 33, device).reshape(3, 50)
        target[:, ::9] = -100
        results = []
        for reduction in ("none", "mean", "sum"):
            for own in (None, weight):
                results += whole(
                    lambda x, w=own, r=reduction: truncdet.nll_loss(x, target, w, reduction=r),
                    input.clone(),
                )
        return results


def _add_ctc_loss(named, name, index, dtype):
    @named(name)
    def run(device):
        # Not normalised, which takes a logarithm; the recursions do not mind.
        probs = -2 * values((60, 5, 9), 34, dtype, device, spread=3).abs() - 1
        targets = index(5 * 20, 8, 35, device).reshape(5, 20) + 1
        lengths = (torch.tensor([60, 60, 31, 7, 0]), torch.tensor([20, 0, 11, 20, 3]))
        results = []
        for zero_infinity in (False, True):
            results += whole(
                lambda x, zero=zero_infinity: truncdet.ctc_loss(
                    x, targets, *lengths, 0, "none", zero
                ),
                probs.clone(),
            )
        usual = (targets, (60, 60, 31), (20, 0, 11), 0, "mean")
        return results + whole(
            lambda x: truncdet.ctc_loss(x, usual[0][:3], *usual[1:]), probs[:, :3]
        )


def _add_order(named, name, index, dtype, seed):
    @named(name)
    def run(device):
        corners = 40 * values((600, 2), seed, torch.float64, device, spread=1)
        size = 1 + 20 * values((600, 2), seed + 10, torch.float64, device).abs()
        boxes = torch.cat([corners, corners + size], 1).to(dtype)
        scores = values((600,), seed + 20, dtype, device, spread=2).mul(16).round()  # with ties
        kept = [truncdet.nms(boxes, scores, threshold) for threshold in (0.3, 0.5, 0.7)]
        kept.append(truncdet.batched_nms(boxes, scores, index(600, 5, 36, device), 0.5))
        return kept + list(truncdet.topk(scores, 100)) + list(truncdet.topk(boxes, 9, 0, False))
