"""Every kernel that the CUDA side picks by size gives the bits of the CPU: direct, runs, shared
memory and sorted rows, for hostile indices and values."""

import pytest
import torch
from scatter_cases import random_floats, random_index

from truncdet import TruncdetError, _sticky
from truncdet._scatter import SCATTER_ADD, accumulate_reference
from truncdet.testing import assert_bitwise_equal

# outer, cells, count, inner: by the kernel they are meant for
SHAPES = {
    "elements": (1, 900, 3001, 5),
    "elements of several outer": (3, 70, 301, 40),
    "runs": (1, 5000, 100_003, 1),
    "shared": (1, 7, 70_000, 1),
    "shared rows": (2, 5, 9000, 3),
    "sorted": (1, 1000, 40_000, 64),
    "sorted narrow": (1, 20_000, 240_000, 9),
    "sorted wide": (1, 600, 17_000, 130),
    "sorted of several outer": (3, 500, 12_000, 64),
}
INDICES = ("random", "ascending", "crowded", "one cell", "out of range")


def make_index(kind, outer, cells, count):
    index = random_index((outer, count), cells, "cpu")
    if kind == "ascending":
        return index.sort(dim=1).values
    if kind == "one cell":
        return torch.full_like(index, cells - 1)
    if kind == "crowded":
        index[:, ::2] %= 3
    if kind == "out of range":
        index[:, ::7], index[:, 3::11] = -1, cells
    return index


def on_both(index, src, input, exact=False):
    """The results of the CPU and of the GPU; operator 0 leaves indices out of range out."""
    ours = torch.ops.truncdet._accumulate(input, index, src, exact, 0)
    there = (x.cuda() for x in (input, index, src))
    return torch.ops.truncdet._accumulate(*there, exact, 0), ours


def inputs(shape, dtype, kind="random", per_element=False):
    outer, cells, count, inner = shape
    index = make_index(kind, outer, cells, count).unsqueeze(-1).expand(outer, count, inner)
    src = random_floats((outer, count, inner), dtype, "cpu", 2)
    input = random_floats((outer, cells, inner), dtype, "cpu", 2, seed=7)
    return index.contiguous() if per_element else index, src, input


@pytest.mark.cuda
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_kernel_gives_the_bits_of_the_cpu(name, kind):
    assert_bitwise_equal(*on_both(*inputs(SHAPES[name], torch.float32, kind)))


@pytest.mark.cuda
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_in_every_type(name, dtype, exact):
    assert_bitwise_equal(*on_both(*inputs(SHAPES[name], dtype), exact))


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHAPES)
def test_with_an_index_for_every_element(name):
    assert_bitwise_equal(*on_both(*inputs(SHAPES[name], torch.float32, per_element=True)))


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHAPES)
def test_nonfinite_values_reach_their_cells_alone(name):
    index, src, input = inputs(SHAPES[name], torch.float32)
    flat = src.view(-1)
    flat[5], flat[1000], flat[-1], flat[2000] = torch.nan, torch.inf, -torch.inf, -torch.inf
    assert_bitwise_equal(*on_both(index, src, input))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["runs", "shared", "sorted", "sorted wide"])
def test_addresses_need_no_alignment(name):
    index, src, input = inputs(SHAPES[name], torch.float32)
    index, src = index.cuda(), src.cuda()
    shifted = torch.empty(src.numel() + 1, device="cuda")[1:].view_as(src).copy_(src)
    moved = torch.empty(index.size(1) + 1, dtype=torch.int64, device="cuda")[1:]
    moved = moved.copy_(index[0, :, 0]).reshape(1, -1, 1).expand_as(index)
    expected = torch.ops.truncdet._accumulate(input.cuda(), index, src, False, 0)
    got = torch.ops.truncdet._accumulate(input.cuda(), moved, shifted, False, 0)
    assert_bitwise_equal(got, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHAPES)
def test_an_index_out_of_range_is_reported_by_every_kernel(name):
    _sticky.check()
    index, src, input = inputs(SHAPES[name], torch.float32)
    index = index.contiguous()[:, :, :1].contiguous()
    index[-1, -1] = SHAPES[name][1]
    there = (input.cuda(), index.cuda().expand(src.shape), src.cuda())
    torch.ops.truncdet._accumulate(*there, False, SCATTER_ADD)
    with pytest.raises(TruncdetError, match=r"^scatter_add: an index was out of range"):
        _sticky.check()


@pytest.mark.cuda
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(900, 3001, 5), (1000, 40_000, 64), (600, 17_000, 130)])
def test_weighted_rows_give_the_bits_of_the_cpu(shape, dtype, weighted):
    cells, count, columns = shape
    index, rows = (random_index((count,), n, "cpu", seed=n) for n in (cells + 1, 120))
    src = random_floats((119, columns), dtype, "cpu", 2)
    weights = random_floats((count,), dtype, "cpu", 2, seed=5) if weighted else None
    input = random_floats((cells, columns), dtype, "cpu", 2, seed=6)
    arguments = (input, index, src, rows, weights)
    there = [None if x is None else x.cuda() for x in arguments]
    op = torch.ops.truncdet._accumulate_rows
    assert_bitwise_equal(op(*there), op(*arguments))


@pytest.mark.cuda
def test_sorted_rows_in_a_cuda_graph():
    index, src, input = (x.cuda() for x in inputs(SHAPES["sorted"], torch.float32))
    expected = torch.ops.truncdet._accumulate(input, index, src, False, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.truncdet._accumulate(input, index, src, False, 0)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, expected)


@pytest.mark.parametrize("name", ["elements", "shared rows", "elements of several outer"])
@pytest.mark.parametrize("kind", INDICES)
def test_operator_0_leaves_indices_out_of_range_out(device, name, kind):
    """As if such rows were not there, but for the scale, which all of src sets."""
    index, src, input = inputs(SHAPES[name], torch.float32, kind)
    src[0, 1] = 2.0**20  # at an index in range, above everything else
    got = torch.ops.truncdet._accumulate(*(x.to(device) for x in (input, index, src)), False, 0)
    outside = (index < 0) | (index >= input.size(1))
    expected = accumulate_reference(
        input, index.masked_fill(outside, 0), src.masked_fill(outside, 0), False, SCATTER_ADD
    )
    assert_bitwise_equal(got, expected)
