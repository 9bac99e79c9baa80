"""nms and batched_nms: torchvision's semantics, and the same boxes on every device."""

import pytest
import torch
import torchvision
from scatter_cases import each_dtype

import truncdet
from truncdet import _nms as module
from truncdet import batched_nms, nms
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.truncdet
each_count = pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 300])
each_threshold = pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.7, 1.0])


def make_case(count, dtype=torch.float32, device="cpu", seed=0, grid=False):
    """Boxes, scores without ties, and groups; on a grid many overlaps are equal."""
    generator = torch.Generator().manual_seed(seed)
    corner = 60 * torch.rand((count, 2), generator=generator)
    size = 1 + 25 * torch.rand((count, 2), generator=generator)
    boxes = torch.cat([corner, corner + size], 1)
    if grid:
        boxes = (boxes / 6).round() * 6
    scores = torch.randperm(count, generator=generator) / max(count, 1)
    groups = torch.randint(-2, 4, (count,), generator=generator)
    return boxes.to(device, dtype), scores.to(device, dtype), groups.to(device)


def with_hostile(boxes):
    """Not finite, turned inside out, without an area."""
    boxes = boxes.clone()
    rows = [
        [torch.nan, 0, 5, 5],
        [0, 0, torch.inf, 5],
        [-torch.inf, -torch.inf, torch.inf, torch.inf],
        [9, 9, 1, 1],
        [3, 3, 3, 3],
        [0, 0, 0, 0],
        [3e38, 3e38, -3e38, -3e38],
    ]
    hostile = torch.tensor(rows, dtype=torch.float64).to(boxes)
    boxes[: 3 * len(rows) : 3] = hostile[: len(boxes[: 3 * len(rows) : 3])]
    return boxes


@each_dtype
@each_count
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
def test_kernels_are_the_reference(device, dtype, count, grouped):
    for grid in (False, True):
        boxes, _, groups = make_case(count, dtype, device, grid=grid)
        for own in (boxes, with_hostile(boxes)):
            for threshold in (0.0, 0.5, -1.0, torch.nan):
                rest = (groups if grouped else None, threshold)
                expected = module.keep_reference(own, *rest)
                assert_bitwise_equal(ops._nms_keep(own, *rest), expected)


def test_many_boxes_are_the_reference(device):
    """More than the words that one turn of the kernel's threads covers."""
    boxes, _, groups = make_case(2200, torch.float32, device)
    boxes += 3 * boxes[:, :2].repeat(1, 2)
    for own in (None, groups):
        expected = module.keep_reference(boxes, own, 0.3)
        assert 300 < expected.sum() < 2100
        assert_bitwise_equal(ops._nms_keep(boxes, own, 0.3), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [40_000, 132_000])
def test_so_many_boxes_that_shared_memory_is_full_are_the_cpus(count):
    """A chain in which every box overlaps its neighbours: every second one stays."""
    left = torch.arange(count, dtype=torch.float64)
    boxes = torch.stack([left, left * 0, left + 2, left * 0 + 1], 1)
    keep = ops._nms_keep(boxes.cuda(), None, 0.3).cpu()
    assert_bitwise_equal(keep, torch.arange(count) % 2 == 0)


@each_count
@each_threshold
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_boxes_are_torchvisions_on_the_cpu(dtype, count, threshold):
    for grid in (False, True):
        boxes, scores, groups = make_case(count, dtype, grid=grid)
        for own in (boxes, with_hostile(boxes)):
            expected = torchvision.ops.nms(own, scores, threshold)
            assert_bitwise_equal(nms(own, scores, threshold), expected)
        if count > 0:
            expected = torchvision.ops.boxes._batched_nms_vanilla(boxes, scores, groups, threshold)
            assert_bitwise_equal(batched_nms(boxes, scores, groups, threshold), expected)


def test_ties_take_the_lower_index_first(device):
    boxes, _, groups = make_case(300, device=device)
    scores = torch.arange(300, device=device).flip(0) // 100 / 2
    order = torch.arange(300, device=device)  # descending already, ties in order of the index
    expected = order[module.keep_reference(boxes, None, 0.4)]
    assert_bitwise_equal(nms(boxes, scores, 0.4), expected)
    expected = order[module.keep_reference(boxes, groups, 0.4)]
    assert_bitwise_equal(batched_nms(boxes, scores, groups, 0.4), expected)
    level = torch.zeros(300, device=device)
    level[::7] = -0.0  # the same score
    expected = order[module.keep_reference(boxes, None, 0.4)]
    assert_bitwise_equal(nms(boxes, level, 0.4), expected)


def test_nan_is_the_largest_score(device):
    """NaN of both signs and any payload, infinities, and every other score in its place."""
    words = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32, device=device)
    nans = words.view(torch.float32)
    scores = torch.cat([torch.tensor([0.5, torch.inf, -torch.inf], device=device), nans])
    boxes = torch.arange(7.0, device=device).unsqueeze(1) * 9 + torch.tensor(
        [0.0, 0, 1, 1], device=device
    )
    assert nms(boxes, scores, 0.5).tolist() == [3, 4, 5, 6, 1, 0, 2]


def test_an_overlap_equal_to_the_threshold_is_kept(device):
    """The quotient is a float32 and the threshold a float64: 0.3 lies below the float32 next to it.

    torchvision's CUDA kernel rounds the threshold as well and keeps this box, its CPU drops it.
    """
    boxes = torch.tensor([[0.0, 0, 10, 1], [0, 0, 3, 1]], device=device)
    scores = torch.tensor([0.9, 0.8], device=device)
    nearest = torch.tensor(0.3).item()
    assert nearest > 0.3
    assert nms(boxes, scores, 0.3).tolist() == [0]
    assert nms(boxes, scores, nearest).tolist() == [0, 1]


def test_other_groups_change_nothing(device):
    """Where torchvision moves coordinates apart, and rounds them."""
    boxes, scores, groups = make_case(200, device=device, grid=True)
    kept = set(batched_nms(boxes, scores, groups, 0.5).tolist())
    for group in groups.unique():
        own = torch.where(groups == group)[0]
        alone = own[nms(boxes[own], scores[own], 0.5)]
        assert set(alone.tolist()) == kept & set(own.tolist())
    moved = groups * 2**40 + 7
    assert set(batched_nms(boxes, scores, moved, 0.5).tolist()) == kept


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_groups_of_other_integers(device, kind):
    boxes, scores, groups = make_case(100, device=device)
    groups = groups + 2
    expected = batched_nms(boxes, scores, groups, 0.5)
    assert_bitwise_equal(batched_nms(boxes, scores, groups.to(kind), 0.5), expected)


def test_layouts_and_gradients_change_nothing(device):
    boxes, scores, groups = make_case(100, device=device)
    expected = batched_nms(boxes, scores, groups, 0.5)
    other = boxes.t().contiguous().t().requires_grad_()
    got = batched_nms(other, scores.requires_grad_(), torch.stack([groups] * 2, 1)[:, 0], 0.5)
    assert not got.requires_grad
    assert_bitwise_equal(got, expected)


@pytest.mark.cuda
@each_dtype
def test_cuda_keeps_what_the_cpu_keeps(dtype):
    for grid in (False, True):
        boxes, scores, groups = make_case(1500, dtype, grid=grid)
        for threshold in (0.3, 0.5, 0.7):
            there = nms(boxes.cuda(), scores.cuda(), threshold)
            assert_bitwise_equal(there.cpu(), nms(boxes, scores, threshold))
            there = batched_nms(boxes.cuda(), scores.cuda(), groups.cuda(), threshold)
            assert_bitwise_equal(there.cpu(), batched_nms(boxes, scores, groups, threshold))


def test_operator_checks(device):
    boxes, scores, groups = make_case(20, device=device)
    for own in (None, groups):
        torch.library.opcheck(ops._nms_keep.default, (boxes, own, 0.5))
        torch.library.opcheck(ops.nms.default, (boxes, scores, own, 0.5))


def test_compiles(device):
    """The mask in one graph; the number of boxes that stay is not known to a compiler."""
    boxes, scores, groups = make_case(50, device=device)
    compiled = torch.compile(batched_nms, backend="aot_eager")
    expected = batched_nms(boxes, scores, groups, 0.5)
    assert_bitwise_equal(compiled(boxes, scores, groups, 0.5), expected)
    mask = torch.compile(ops._nms_keep, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(mask(boxes, groups, 0.5), ops._nms_keep(boxes, groups, 0.5))


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_mask():
    boxes, _, groups = make_case(500, device="cuda")
    expected = ops._nms_keep(boxes, groups, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops._nms_keep(boxes, groups, 0.5)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert_bitwise_equal(captured, expected)


def test_wrong_arguments_are_named():
    b, s, i = torch.zeros(3, 4), torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    for text, error, args in [
        ("boxes must be a Tensor, got list", TypeError, ([1], s)),
        ("boxes must be float64, .*, got torch.int64", TypeError, (b.long(), s)),
        ("scores must be float64, .*, got torch.int64", TypeError, (b, s.long())),
        (r"boxes must have shape \[N, 4\], got \[3, 3\]", ValueError, (b[:, :3], s)),
        (r"boxes must have shape \[N, 4\], got \[4\]", ValueError, (b[0], s)),
        (r"scores must have shape \[3\], got \[2\]", ValueError, (b, s[:2])),
        ("scores must be on boxes's device, cpu, got meta", ValueError, (b, s.to("meta"))),
    ]:
        for op, rest in ((nms, ()), (batched_nms, (i,))):
            with pytest.raises(error, match=f"^{op.__name__}: {text}"):
                op(*args, *rest, 0.5)
    for text, error, idxs in [
        ("idxs must be a Tensor, got int", TypeError, 1),
        ("idxs must be of integers, got torch.float32", TypeError, s),
        (r"idxs must have scores' shape, \[3\], got \[2\]", ValueError, i[:2]),
        ("idxs must be on boxes's device, cpu, got meta", ValueError, i.to("meta")),
    ]:
        with pytest.raises(error, match=f"^batched_nms: {text}"):
            batched_nms(b, s, idxs, 0.5)


def test_kernels_check_what_python_has_checked():
    if not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_nms_keep", "CPU"):
        pytest.skip("checks of the compiled kernels")
    b, i = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for args in [(b[0], None), (b[:, :3], None), (b, i[:2]), (b, i.int())]:
        with pytest.raises(RuntimeError, match="nms: "):
            ops._nms_keep(*args, 0.5)


def test_is_public():
    assert truncdet.nms is nms and truncdet.batched_nms is batched_nms
