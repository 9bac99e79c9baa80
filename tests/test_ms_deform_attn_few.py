"""ms_deform_attn with few queries: on CUDA their taps join lists and are not added by atomics."""

import pytest
import torch
from sampling_cases import attention_grad, each_dtype, make_attention, rand, randn

from truncdet import _ms_deform_attn_reference as reference
from truncdet.testing import assert_bitwise_equal

kernel = torch.ops.truncdet.ms_deform_attn_backward
# What the CUDA kernel asks for: taps by rows of channels, samples of an image's head, channels.
TAPS_PER_ROW, MOST_SAMPLES, CHANNELS = 4, 1 << 14, 8


def are_few(case):
    value, locations = case[0], case[3]
    rows, samples = value.shape[:3].numel(), locations.shape[:5].numel()
    of_a_head = samples // (value.size(0) * value.size(2))
    few = 4 * samples <= TAPS_PER_ROW * rows and of_a_head <= MOST_SAMPLES
    return few and value.size(3) >= CHANNELS and value.size(3) % (16 // value.itemsize) == 0


def one_map(dtype, device, size, channels, queries, heads=1):
    """Attention of one point on one map, at places of its own for every query."""
    value = randn((1, size * size, heads, channels), dtype, device, 1)
    shapes = torch.tensor([[size, size]], device=device)
    starts = torch.tensor([0], device=device)
    locations = rand((1, queries, heads, 1, 1, 2), dtype, device, 2)
    return value, shapes, starts, locations, randn(locations.shape[:-1], dtype, device, 3)


def assert_is_the_reference(case, grad):
    assert are_few(case)
    assert_bitwise_equal(kernel(grad, *case), reference.backward(grad, *case))


@each_dtype
@pytest.mark.parametrize("channels", [8, 16, 24, 32, 72])
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
def test_kernel_is_the_reference(device, dtype, channels, wide):
    if wide and dtype.itemsize != 2:
        pytest.skip("locations wider than values exist for half types alone")
    case = make_attention(dtype, device, n=3, channels=channels, queries=3, wide=wide)
    assert_is_the_reference(case, attention_grad(case[0], case[3]))


@each_dtype
@pytest.mark.parametrize("place", [0.5, 0.53, 0.0, 1.0])
def test_all_queries_in_one_place(device, dtype, place):
    """The longest lists there are; on a cell's centre, between cells and on the border."""
    case = one_map(dtype, device, 15, 16, 150)
    case[3].fill_(place)
    grad = attention_grad(case[0], case[3])
    assert_is_the_reference(case, grad)
    reached = kernel(grad, *case)[0].any(-1).sum()
    assert reached == {0.5: 1, 0.53: 4}.get(place, 1)


def test_order_changes_no_bit(device):
    case = one_map(torch.float32, device, 10, 32, 50)
    case[3].mul_(0.2).add_(0.4)  # on few cells
    value, shapes, starts, locations, weights = case
    grad = attention_grad(value, locations)
    grad = grad * 2.0 ** torch.linspace(-40, 40, 50, device=device)[:, None]
    locations, weights = (torch.cat([x, x], 1) for x in (locations, weights))
    grad = torch.cat([grad, -grad + 2.0**-20], 1)  # all but cancels
    case = (value, shapes, starts, locations, weights)
    assert are_few(case)
    first = kernel(grad, *case)
    for seed in range(3):
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed)).to(device)
        permuted = (value, shapes, starts, locations[:, order], weights[:, order])
        second = kernel(grad[:, order], *permuted)
        assert_bitwise_equal(second[0], first[0])
        assert_bitwise_equal(second[1], first[1][:, order])


@each_dtype
def test_nonfinite_factors_reach_their_cells_alone(device, dtype):
    case = one_map(dtype, device, 9, 16, 40, heads=3)
    grad = attention_grad(case[0], case[3])
    case[4][0, :5, 0, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, torch.inf])
    grad[0, 3, 0], grad[0, 4, 7], grad[0, 20, 47] = torch.inf, 0.0, torch.nan
    grad[0, 30, 31], grad[0, 31, 16] = -torch.inf, torch.inf
    assert_is_the_reference(case, grad)
    got = kernel(grad, *case)[0]
    assert got.isnan().any() and got.isinf().any() and got.isfinite().sum() > got.numel() // 2


@each_dtype
@pytest.mark.parametrize(("weight", "size"), [(1, -1), (-1, 1), (1, 1), (-1, -1)])
def test_the_largest_and_the_smallest_factors(device, dtype, weight, size):
    info = torch.finfo(dtype)
    scales = {1: info.max / 8, -1: info.smallest_normal / 8}
    case = list(one_map(dtype, device, 9, 8, 30))
    case[4] = (case[4].double() * scales[weight]).to(dtype)
    grad = (attention_grad(case[0], case[3]).double() * scales[size]).to(dtype)
    grad[0, 3], case[4][0, 5] = 0.0, 0.0
    assert_is_the_reference(case, grad)


def test_images_have_scales_of_their_own(device):
    case = make_attention(torch.float32, device, n=3, channels=8, queries=3)
    grad = attention_grad(case[0], case[3])
    grad[2], case[4][1] = grad[2] * 2.0**30, case[4][1] * 2.0**-9
    grad[0, 0, 0] = torch.nan
    assert_is_the_reference(case, grad)


def test_nothing_to_add(device):
    value, shapes, starts, locations, weights = make_attention(
        torch.float32, device, channels=8, queries=3
    )
    for count in (0, 3):  # no queries, or all of them outside
        case = (value, shapes, starts, locations[:, :count] + 9, weights[:, :count])
        assert are_few(case)
        got = kernel(attention_grad(value, case[3]), *case)
        assert_bitwise_equal(got[0], torch.zeros_like(value))
        assert not got[1].any() and not got[2].any()


@pytest.mark.cuda
def test_a_gradient_at_an_odd_address():
    """Packs of it cannot be loaded there."""
    case = make_attention(torch.float32, "cuda", channels=8, queries=3)
    grad = attention_grad(case[0], case[3])
    moved = torch.empty(grad.numel() + 1, device="cuda")[1:].view_as(grad).copy_(grad)
    assert_bitwise_equal(kernel(moved, *case), kernel(grad, *case))


@pytest.mark.cuda
def test_a_cuda_graph_replays_the_same_bits():
    case = make_attention(torch.float32, "cuda", channels=32, queries=3)
    grad = attention_grad(case[0], case[3])
    kernel(grad, *case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernel(grad, *case)
    for scale in (1.0, 0.37):
        grad.mul_(scale)
        graph.replay()
        assert_bitwise_equal(result, kernel(grad, *case))
