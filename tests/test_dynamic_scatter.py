"""dynamic_scatter: the voxels of mmcv, sums, means and maxima without an order."""

import pytest
import torch
from scatter_cases import each_dtype, random_floats, random_index
from scatter_group import CANCELLING_300, assert_gradients, assert_same_as, orders

from truncdet import DynamicScatter, dynamic_scatter
from truncdet._segment_max import segment_max_reference
from truncdet.testing import assert_bitwise_equal

each_reduce = pytest.mark.parametrize("reduce_type", ["sum", "mean", "max"])


def points(dtype, device, count=200, span=3, seed=0):
    feats = random_floats((count, 4), dtype, device, 1, seed=seed)
    coors = random_index((count, 3), span + 1, device, seed=seed + 5) - 1
    return feats, coors.int()


def by_hand(feats, coors, reduce_type):
    """mmcv's definition: points with a negative coordinate dropped, voxels in ascending order."""
    kept = (coors >= 0).all(1)
    voxels, index = torch.unique(coors[kept], dim=0, return_inverse=True)
    wide = index[:, None].expand(-1, feats.size(1))
    reduce = {"max": "amax"}.get(reduce_type, reduce_type)
    start = feats.new_zeros(voxels.size(0), feats.size(1))
    return start.scatter_reduce(0, wide, feats[kept], reduce, include_self=False), voxels


@each_reduce
def test_values_and_gradients_are_mmcvs(device, reduce_type):
    feats, coors = points(torch.float64, device)
    assert_same_as(
        lambda x: dynamic_scatter(x, coors, reduce_type)[0],
        lambda x: by_hand(x, coors, reduce_type)[0],
        feats,
    )
    assert_bitwise_equal(
        dynamic_scatter(feats, coors, reduce_type)[1], by_hand(feats, coors, reduce_type)[1]
    )


@each_dtype
@each_reduce
def test_permuted_points_keep_the_bits(device, dtype, reduce_type):
    feats = torch.tensor(CANCELLING_300, device=device).to(dtype).unsqueeze(1)
    coors = random_index((300, 3), 2, device)
    first = dynamic_scatter(feats, coors, reduce_type)
    for order in orders(300):
        order = order.to(device)
        assert_bitwise_equal(dynamic_scatter(feats[order], coors[order], reduce_type), first)


@each_reduce
def test_no_point_and_no_valid_point(device, reduce_type):
    feats, coors = points(torch.float32, device)
    empty = dynamic_scatter(feats[:0], coors[:0], reduce_type)
    assert [x.shape for x in empty] == [(0, 4), (0, 3)]
    feats.requires_grad_()
    none = dynamic_scatter(feats, coors.clamp(max=-1), reduce_type)
    assert [x.shape for x in none] == [(0, 4), (0, 3)]
    none[0].sum().backward()
    assert not feats.grad.any()


@each_dtype
def test_the_maximum_is_the_reference(device, dtype):
    values = (random_index((300, 6), 7, "cpu") - 3).to(dtype) / 2
    values[values == 0] *= -1
    values[5], values[:, 3], values[7, :2] = torch.nan, torch.nan, torch.inf
    values[9:40:2, 4], values[10:40:2, 4] = 0.0, -0.0
    index = random_index((300,), 10, "cpu") - 1
    index[index == 4] = -1
    got = torch.ops.truncdet._segment_max(values.to(device), index.to(device), 8)
    assert_bitwise_equal(got, segment_max_reference(values, index, 8))


def test_the_lowest_of_equal_points_is_the_maximum(device):
    feats = torch.tensor([[1.0], [-0.0], [0.0], [1.0], [torch.nan]], device=device)
    coors = torch.tensor([[0], [1], [1], [0], [0]], device=device)
    feats.requires_grad_()
    largest, _ = dynamic_scatter(feats, coors)
    assert_bitwise_equal(largest, torch.tensor([[1.0], [-0.0]]))
    largest.backward(torch.tensor([[3.0], [5.0]], device=device))
    assert feats.grad.flatten().tolist() == [3.0, 5.0, 0.0, 0.0, 0.0]
    nan, _ = dynamic_scatter(feats[4:], coors[4:])
    assert nan.item() == -torch.inf
    (grad,) = torch.autograd.grad(nan.sum(), feats)
    assert not grad.any()


@each_reduce
def test_gradients(device, reduce_type):
    feats, coors = points(torch.float64, device, 12, 2)
    assert_gradients(lambda x: dynamic_scatter(x, coors, reduce_type)[0], feats)


@pytest.mark.parametrize("average", [True, False])
def test_the_module_reduces_samples_one_by_one(device, average):
    module = DynamicScatter([0.1] * 3, [0, 0, 0, 1, 1, 1], average)
    samples = [points(torch.float32, device, 50, seed=seed) for seed in range(3)]
    alone = [module(*sample) for sample in samples]
    coors = [torch.nn.functional.pad(c, (1, 0), value=i) for i, (_, c) in enumerate(samples)]
    # What else is in the batch sets no scale.
    feats = torch.cat([samples[0][0], samples[1][0] * 2**60, samples[2][0]])
    features, places = module(feats, torch.cat(coors))
    expected = [torch.nn.functional.pad(c, (1, 0), value=i) for i, (_, c) in enumerate(alone)]
    assert_bitwise_equal(places, torch.cat(expected))
    for sample in (0, 2):
        assert_bitwise_equal(features[places[:, 0] == sample], alone[sample][0])
    assert "average_points=" in repr(module)


def test_operator_checks(device):
    values = random_floats((20, 3), torch.float32, device, 1).requires_grad_()
    index = random_index((20,), 5, device)
    torch.library.opcheck(torch.ops.truncdet._segment_max.default, (values, index, 5))


def test_wrong_arguments_are_named():
    feats, coors = torch.ones(3, 2), torch.zeros(3, 3, dtype=torch.int64)
    for text, error, args in [
        ("feats must be float64, .*, got torch.int64", TypeError, (feats.long(), coors)),
        ("coors must be int64 or int32, got torch.float32", TypeError, (feats, coors.float())),
        ("coors must be on feats's device, cpu, got meta", ValueError, (feats, coors.to("meta"))),
        (
            "reduce_type must be 'max', 'sum' or 'mean', got 'min'",
            ValueError,
            (feats, coors, "min"),
        ),
        (
            r"coors must have shape \[N, n\] with feats' N, got \[2, 3\]",
            ValueError,
            (feats, coors[:2]),
        ),
        (r"feats must have shape .*, got \[3\]", ValueError, (feats[:, 0], coors)),
    ]:
        with pytest.raises(error, match=f"^dynamic_scatter: {text}"):
            dynamic_scatter(*args)
