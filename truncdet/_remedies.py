"""What to do about a cause that `compare` or `audit` found: one sentence for each known one."""

from __future__ import annotations

import re

from truncdet._strict_table import TABLE

_CUBLAS = (
    "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the program starts "
    "(truncdet.enable() does)"
)
_CUDNN = (
    "set torch.backends.cudnn.deterministic = True and torch.backends.cudnn.benchmark = False "
    "(truncdet.enable() does): cuDNN chose an algorithm that adds in no fixed order"
)
_SEED = "seed the generators before the model is made: truncdet.enable(seed=0)"
_DATA = (
    "seed the sampler and the workers: DataLoader(generator=truncdet.generator(0)), "
    "and augment from generators that are seeded in the workers"
)
_NCCL = "fix the order of the reduction: NCCL_ALGO=Ring and a fixed number of channels"

# Patterns of operator and node names, in lower case without underscores, in order.
_BY_NAME = (
    (r"conv|cudnn", _CUDNN),
    (r"random ?state|dropout|bernoulli|rand", _SEED),
    (r"initial ?parameter", _SEED),
    (r"batch$", _DATA),
    (r"nccl|allreduce|c10d", _NCCL),
    (r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear)|(mm|linear|matmul)backward\d*$", _CUBLAS),
)
# Nodes of the graph, by the operator whose backward they are.
_BY_NODE = (
    (r"roialign", "_roi_align_backward"),
    (r"roipool", "_roi_pool_backward"),
    (r"psroialign", "_ps_roi_align_backward"),
    (r"psroipool", "_ps_roi_pool_backward"),
    (r"deformconv", "_deform_conv2d_backward"),
)


def remedy(op: str) -> str | None:
    """What helps against an operator or node whose bits move, or None where nothing is known.

    Args:
        op: name of a dispatcher operator ('aten::index_add_'), of a node of the graph
            ('ConvolutionBackward0'), or of what `record` observes ('batch').
    """
    plain = re.sub(r"_", "", op.lower())
    for pattern, name in _BY_NODE:
        entry = TABLE.get(f"torchvision::{name}")
        if entry is not None and re.search(pattern, plain):
            return entry.fix
    for name, entry in TABLE.items():
        bare = re.sub(r"_", "", name.partition("::")[2])
        if plain in (f"{name.partition('::')[0]}::{bare}", f"{bare}0", f"{bare}1"):
            return entry.fix
        if plain.rstrip("0123456789") == bare:
            return entry.fix
    return next((fix for pattern, fix in _BY_NAME if re.search(pattern, plain)), None)
