"""Calls of the operators built on scatter_add whose bits are committed (see digest_cases)."""

import torch

import truncdet


def whole(call, *inputs):
    """The outputs of a call and the gradients it sends back for its own outputs."""
    leaves = [x.requires_grad_() for x in inputs]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


def cases(dtype, name, values, index):
    """name: function of a device; `values` and `index` are digest_cases' formulas."""

    def mean(include_self):
        def run(device):
            input, src = values((37, 3), 11, dtype, device), values((900, 3), 12, dtype, device)
            where = index(2700, 36, 13, device).reshape(900, 3)
            return whole(
                lambda x, y: truncdet.scatter_reduce(
                    x, 0, where, y, "mean", include_self=include_self
                ),
                input,
                src,
            )

        return run

    def index_put(device):
        input, src = values((7, 9, 4), 14, dtype, device), values((800, 1), 15, dtype, device)
        where = (index(800, 7, 16, device), index(800, 9, 17, device) - 9)
        return whole(lambda x, y: truncdet.index_put(x, where, y, True), input, src)

    def bags(device):
        table, samples = values((31, 5), 18, dtype, device), values((600,), 19, dtype, device)
        where, starts = index(600, 31, 20, device), torch.arange(0, 600, 12, device=device)
        grad = values((50, 5), 21, dtype, device)
        table.requires_grad_()
        sums = truncdet.embedding_bag(
            where, table, starts, mode="sum", per_sample_weights=samples, padding_idx=3
        )
        means = truncdet.embedding_bag(where, table, starts, scale_grad_by_freq=True)
        # The forward is PyTorch's, and each device adds in its own way there.
        return [torch.autograd.grad(out, table, grad)[0] for out in (sums, means)]

    def voxels(device):
        feats = values((700, 4), 22, dtype, device).requires_grad_()
        coors = index(2100, 6, 23, device).reshape(700, 3) - 1
        results = []
        for reduce in ("sum", "mean", "max"):
            out, places = truncdet.dynamic_scatter(feats, coors, reduce)
            results += [out.detach(), places, *torch.autograd.grad(out, feats, out.detach())]
        return results

    def segments(device):
        data = values((900, 3), 24, dtype, device)
        lengths = torch.tensor([0, 300, 1, 599, 0], device=device)
        return whole(
            lambda x: truncdet.segment_reduce(x, "mean", lengths=lengths, initial=0.5), data
        )

    def histogram(device):
        x = values((3000,), 25, dtype, device)
        sums = truncdet.bincount(index(3000, 17, 26, device), x)
        return [truncdet.histc(x, 50, -1, 1), sums]

    found = {"mean": mean(True), "mean_without_self": mean(False), "index_put": index_put}
    found |= {"embedding_bag": bags, "dynamic_scatter": voxels, "segment_mean": segments}
    found |= {"histogram": histogram}
    return {f"scatter_group/{case}/{name}": run for case, run in found.items()}
