"""embedding and embedding_bag: torch's values, and gradients of the table without an order."""

import pytest
import torch
import torch.nn.functional as F
from scatter_cases import each_dtype, random_floats, random_index
from scatter_group import (
    CANCELLING_300,
    assert_compiles,
    assert_gradients,
    assert_same_as,
    orders,
    outputs_and_gradients,
)

from truncdet import TruncdetError, _sticky, embedding, embedding_bag, index_add
from truncdet._accumulate_rows import accumulate_rows_reference
from truncdet.testing import assert_bitwise_equal

each_padding = pytest.mark.parametrize("padding_idx", [None, 3, -1])
each_scale = pytest.mark.parametrize("scale", [False, True], ids=["", "by_freq"])
each_mode = pytest.mark.parametrize("mode", ["sum", "mean"])
OFFSETS = {
    "ends given": ([0, 0, 4, 20, 35], True),
    "last bag open": ([0, 0, 4, 20, 35], False),
    "one bag": ([0], False),
    "no bag": ([0], True),
}


@each_padding
@each_scale
def test_embedding_is_torchs(device, padding_idx, scale):
    table = random_floats((10, 4), torch.float64, device, 1)
    for shape in ((5, 7), (6,), (), (0, 3)):
        index = random_index(shape, 10, device)

        def through(op, index=index):
            return lambda x: op(index, x, padding_idx, scale_grad_by_freq=scale)

        if index.numel() == 0 and scale and device.type == "cuda":
            # PyTorch's own kernel (2.11) is launched with no blocks here, which is an error.
            out, grad = outputs_and_gradients(through(embedding), table)
            assert out.shape == (*shape, 4) and not grad.any()
            continue
        assert_same_as(through(embedding), through(F.embedding), table)


@each_padding
@each_scale
@each_mode
@pytest.mark.parametrize("bags", ["matrix", *OFFSETS])
def test_embedding_bag_is_torchs(device, padding_idx, scale, mode, bags):
    table = random_floats((10, 4), torch.float64, device, 1)
    index = random_index((5, 7), 10, device)
    offsets, last = None, False
    if bags != "matrix":
        index, (starts, last) = index.flatten(), OFFSETS[bags]
        if bags == "no bag":
            index = index[:0]
        offsets = torch.tensor(starts, device=device)

    def through(op):
        return lambda x: op(
            index,
            x,
            offsets,
            mode=mode,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale,
            include_last_offset=last,
        )

    assert_same_as(through(embedding_bag), through(F.embedding_bag), table)


@each_padding
def test_sample_weights_are_torchs(device, padding_idx):
    table, samples = (random_floats(s, torch.float64, device, 1) for s in ((10, 4), (5, 7)))
    index = random_index((5, 7), 10, device)

    def through(op):
        return lambda x, y: op(index, x, mode="sum", padding_idx=padding_idx, per_sample_weights=y)

    assert_same_as(through(embedding_bag), through(F.embedding_bag), table, samples)


def weighted_rows(dtype, hostile=False):
    """Arguments of the primitive: rows and indices out of range, magnitudes of all sizes."""
    src = random_floats((9, 5), dtype, "cpu", 2)
    weights = random_floats((200,), dtype, "cpu", 2, seed=1)
    if hostile:
        src[1, 1], src[2, 2], src[3] = torch.inf, torch.nan, 0
        weights[7], weights[8], weights[9] = torch.inf, 0, torch.nan
    index, rows = (random_index((200,), n + 2, "cpu", seed=n) - 1 for n in (7, 9))
    return random_floats((7, 5), dtype, "cpu", 2, seed=2), index, src, rows, weights


@each_dtype
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_rows_are_the_reference(device, dtype, hostile, weighted):
    arguments = weighted_rows(dtype, hostile)
    arguments = arguments if weighted else (*arguments[:4], None)
    there = [None if x is None else x.to(device) for x in arguments]
    got = torch.ops.truncdet._accumulate_rows(*there)
    assert_bitwise_equal(got, accumulate_rows_reference(*arguments))


@each_dtype
def test_products_of_extreme_factors_do_not_overflow(device, dtype):
    """Each is scaled by itself, so only the result has to fit."""
    large, small = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    src = torch.tensor([[large], [-large]], dtype=dtype, device=device)
    weights = torch.tensor([2.0, 2.0, small], dtype=dtype, device=device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    rows = torch.tensor([0, 1, 0], device=device)
    got = torch.ops.truncdet._accumulate_rows(src.new_zeros(1, 1), zeros, src, rows, weights)
    # In the wider formats the smallest product is far below the last bit of the integers.
    assert got.item() == (large * small if dtype == torch.float16 else 0.0)


@each_dtype
@each_scale
def test_the_gradient_of_a_table_has_no_order(device, dtype, scale):
    grad = torch.tensor(CANCELLING_300, device=device).to(dtype).unsqueeze(1).expand(300, 3)
    index = random_index((300,), 4, device)
    seen = []
    for order in (torch.arange(300), *orders(300)):
        order = order.to(device)
        table = grad.new_zeros(5, 3).requires_grad_()
        embedding(index[order], table, scale_grad_by_freq=scale).backward(grad[order])
        seen.append(table.grad)
    for again in seen[1:]:
        assert_bitwise_equal(again, seen[0])
    if not scale:
        assert_bitwise_equal(seen[0], index_add(grad.new_zeros(5, 3), 0, index, grad))


@each_dtype
@each_mode
def test_the_gradient_of_bags_has_no_order(device, dtype, mode):
    """The order of the bags, and of the indices inside a bag."""
    grad = torch.tensor(CANCELLING_300, device=device).to(dtype).unsqueeze(1).expand(300, 3)
    index = random_index((300, 4), 5, device)
    seen = []
    for order in (torch.arange(300), *orders(300)):
        order = order.to(device)
        table = grad.new_zeros(6, 3).requires_grad_()
        inside = torch.randperm(4, generator=torch.Generator().manual_seed(len(seen)))
        moved = index[order][:, inside.to(device)]
        embedding_bag(moved, table, mode=mode).backward(grad[order])
        seen.append(table.grad)
    for again in seen[1:]:
        assert_bitwise_equal(again, seen[0])


@each_dtype
def test_half_tables(device, dtype):
    table = random_floats((6, 4), dtype, device, 1).requires_grad_()
    index = random_index((3, 5), 6, device)
    for out in (
        embedding(index, table, scale_grad_by_freq=True),
        embedding_bag(index, table, mode="mean", scale_grad_by_freq=True),
        embedding_bag(
            index, table, mode="sum", per_sample_weights=table.detach()[0, :1].expand(3, 5)
        ),
    ):
        (grad,) = torch.autograd.grad(out.sum(), table)
        assert out.dtype == grad.dtype == dtype


def test_gradients(device):
    table, samples = (random_floats(s, torch.float64, device, 0) for s in ((6, 3), (2, 4)))
    index = random_index((2, 4), 6, device)
    assert_gradients(lambda x: embedding(index, x), table)
    for mode in ("sum", "mean"):
        assert_gradients(lambda x, m=mode: embedding_bag(index, x, mode=m), table)
    table.requires_grad_()
    # What scale_grad_by_freq gives is no gradient of the forward, but has one of its own.
    for op in (embedding, embedding_bag):
        call = lambda x, op=op: op(index, x, scale_grad_by_freq=True)  # noqa: E731
        assert torch.autograd.gradgradcheck(call, (table,), nondet_tol=0)
    weighted = lambda x, y: embedding_bag(index, x, mode="sum", per_sample_weights=y)  # noqa: E731
    assert_gradients(weighted, table, samples, twice=False)


def test_compiles_in_one_graph(device):
    table = random_floats((6, 3), torch.float32, device)
    index = random_index((2, 4), 6, device)
    assert_compiles(lambda x: embedding(index, x, 1), table)
    assert_compiles(lambda x: embedding_bag(index, x, mode="mean"), table)


def test_operator_checks(device):
    table = random_floats((6, 3), torch.float32, device).requires_grad_()
    index = random_index((8,), 6, device)
    offsets = torch.tensor([0, 3], device=device)
    ops = torch.ops.truncdet
    torch.library.opcheck(ops.embedding.default, (table, index, 2, True))
    for mode in (0, 1):
        rest = (None, mode, False, False, -1)
        torch.library.opcheck(ops.embedding_bag.default, (table, index, offsets, *rest))
    start = table.detach()[:4].clone().requires_grad_()
    rows = index % 6
    torch.library.opcheck(ops._accumulate_rows.default, (start, index % 4, table, rows, None))


@pytest.mark.parametrize("name", ["embedding", "embedding_bag"])
def test_index_out_of_range(device, name):
    table = torch.ones(3, 2, device=device, requires_grad=True)
    index = torch.tensor([[0, 3, 1]], device=device)
    op = embedding if name == "embedding" else embedding_bag
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"^{name}: index must be in \[0, 3\), got 3"):
            op(index, table)
        return
    _sticky.check()
    out = op(index, table)
    with pytest.raises(TruncdetError, match=rf"^{name}: an index was out of range"):
        _sticky.check()
    (grad,) = torch.autograd.grad(out.sum(), table)
    assert grad[2].tolist() == [0.0, 0.0]
    _sticky.check()


def test_wrong_arguments_are_named():
    w, i = torch.ones(5, 3), torch.tensor([[0, 1]])
    o = torch.tensor([0])
    for text, error, call in [
        (
            "embedding: weight must be float64, .*, got torch.int64",
            TypeError,
            lambda: embedding(i, w.long()),
        ),
        (
            "embedding: input must be int64 or int32, got torch.float32",
            TypeError,
            lambda: embedding(i.float(), w),
        ),
        ("embedding: weight must have 2 dimensions, got 1", ValueError, lambda: embedding(i, w[0])),
        ("embedding: max_norm must be None", ValueError, lambda: embedding(i, w, max_norm=1.0)),
        (
            "embedding: sparse must be False, got True",
            ValueError,
            lambda: embedding(i, w, sparse=True),
        ),
        (
            r"embedding: padding_idx must be in \[-5, 5\), got 5",
            ValueError,
            lambda: embedding(i, w, 5),
        ),
        (
            "embedding: input must be on weight's device, cpu, got meta",
            ValueError,
            lambda: embedding(i.to("meta"), w),
        ),
        (
            "embedding_bag: max_norm must be None",
            ValueError,
            lambda: embedding_bag(i, w, max_norm=1.0),
        ),
        (
            "embedding_bag: mode must be 'sum' or 'mean', got 'max'",
            ValueError,
            lambda: embedding_bag(i, w, mode="max"),
        ),
        (
            "embedding_bag: offsets must be None for a matrix",
            ValueError,
            lambda: embedding_bag(i, w, o),
        ),
        (
            "embedding_bag: offsets must be a vector for a vector input, got None",
            ValueError,
            lambda: embedding_bag(i[0], w),
        ),
        (
            "embedding_bag: offsets must have input's dtype, torch.int64, got torch.int32",
            TypeError,
            lambda: embedding_bag(i[0], w, o.int()),
        ),
        (
            "embedding_bag: offsets must have an element",
            ValueError,
            lambda: embedding_bag(i[0], w, o[:0], include_last_offset=True),
        ),
        (
            "embedding_bag: input must have 1 or 2 dimensions, got 3",
            ValueError,
            lambda: embedding_bag(i[None], w),
        ),
        (
            "embedding_bag: mode must be 'sum' with per_sample_weights, got 'mean'",
            ValueError,
            lambda: embedding_bag(i, w, per_sample_weights=torch.ones(1, 2)),
        ),
        (
            "embedding_bag: per_sample_weights must have input's shape",
            ValueError,
            lambda: embedding_bag(i, w, mode="sum", per_sample_weights=torch.ones(2)),
        ),
        (
            "embedding_bag: per_sample_weights must have weight's dtype",
            TypeError,
            lambda: embedding_bag(i, w, mode="sum", per_sample_weights=torch.ones(1, 2).half()),
        ),
    ]:
        with pytest.raises(error, match=f"^{text}"):
            call()
