"""deform_conv2d gives what torchvision and mmcv give, in chunks of any size."""

import pytest
import torch
from deform_cases import (
    NAN,
    SHAPES,
    SPECIAL,
    Deform,
    regular_places,
    results,
    special_offsets,
)
from torchvision import ops as torchvision_ops

import truncdet
from truncdet import _deform_chunks, deform_conv2d
from truncdet.testing import assert_bitwise_equal

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def close(ours, theirs, limit=1e-12):
    """Whether all pairs agree, relative to the largest finite magnitude; NaN equals NaN."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = max(1.0, b.nan_to_num(0, 0, 0).abs().max().item())
        torch.testing.assert_close(a, b, rtol=0, atol=limit * scale, equal_nan=True)


@each_shape
def test_values_and_gradients_are_torchvisions(shape):
    """In float64, where what differs is rounding alone."""
    case, grad = shape.call(torch.float64), shape.grad(torch.float64)
    ours = results(deform_conv2d, case, grad, shape.steps)
    close(ours, results(torchvision_ops.deform_conv2d, case, grad, shape.steps))


def hostile_call():
    input, offset, weight, bias, mask = SPECIAL.call(torch.float64)
    return input, special_offsets(SPECIAL, offset), weight, bias, mask


def test_far_and_infinite_places_are_torchvisions():
    case, grad = hostile_call(), SPECIAL.grad(torch.float64)
    # torchvision reads out of bounds where an offset is NaN.
    case[1].nan_to_num_(7.5, torch.inf, -torch.inf)
    assert case[1].isinf().any()
    ours = results(deform_conv2d, case, grad, SPECIAL.steps)
    close(ours, results(torchvision_ops.deform_conv2d, case, grad, SPECIAL.steps))
    assert ours[0].isfinite().all() and ours[1].isfinite().all()
    assert ours[2].isnan().any()  # offsets beside an infinite one: 0 * inf


def test_a_nan_offset_makes_its_sample_nan_and_nothing_else():
    case, grad = hostile_call(), SPECIAL.grad(torch.float64)
    out, for_input, for_offset, _, _, for_mask = results(deform_conv2d, case, grad, SPECIAL.steps)
    y, x = (case[1] + regular_places(SPECIAL)).unbind(1)
    outside = (y <= -1) | (y >= SPECIAL.size[0]) | (x <= -1) | (x >= SPECIAL.size[1])
    nan = (y.isnan() | x.isnan()) & ~outside
    assert nan.any() and (y.isnan() & outside).any()
    for values in (*out.unbind(1), for_mask[:, 0]):
        assert torch.equal(values.isnan(), nan)
    assert for_input.isfinite().all()
    assert torch.equal(for_offset[:, 0].isnan(), ~x.isfinite())
    assert torch.equal(for_offset[:, 1].isnan(), ~y.isfinite())


@pytest.mark.parametrize("where", ["input", "mask", "grad"])
def test_nonfinite_values_reach_what_they_reach_in_torchvision(where):
    shape = SHAPES["groups"]
    case, grad = shape.call(torch.float64), shape.grad(torch.float64)
    target = {"input": case[0], "mask": case[4], "grad": grad}[where]
    target[0, 0, 1, 1], target[1, 1, 2, 2], target[2, -1, 0, 3] = NAN, torch.inf, -torch.inf
    ours = results(deform_conv2d, case, grad, shape.steps)
    close(ours, results(torchvision_ops.deform_conv2d, case, grad, shape.steps))
    assert any(x.isnan().any() for x in ours)


def test_float32_errors_are_no_larger_than_torchvisions():
    shape = Deform(2, 32, 16, 1, 2, (20, 20))
    case, grad = shape.call(torch.float32), shape.grad(torch.float32)
    native = torchvision_ops.deform_conv2d
    exact = results(native, [x.double() for x in case], grad.double(), shape.steps)
    ours = results(deform_conv2d, case, grad, shape.steps)
    for a, b, e in zip(ours, results(native, case, grad, shape.steps), exact, strict=True):
        assert (a - e).norm() <= 1.25 * (b - e).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_their_coordinates_in_float32(device, dtype):
    """A place beyond half's integers: its coordinate is not rounded to the type of the tensors."""
    shape = Deform(1, 1, 1, 1, 1, (1, 3000), (1, 1), padding=(0, 0), masked=False)
    input, offset, weight, _, _ = shape.call(dtype, device)
    offset, weight = torch.full_like(offset, 0.25), torch.ones_like(weight)
    offset[:, 0] = 0
    out = deform_conv2d(input, offset, weight)
    x = input.float()
    right = torch.cat([x[..., 1:], torch.zeros_like(x[..., :1])], -1)
    assert_bitwise_equal(out, (x * 0.75 + right * 0.25).to(dtype))


@each_shape
def test_chunks_change_no_value_and_agree_with_a_batch_of_their_own(monkeypatch, device, shape):
    shape = shape._replace(n=5)
    case, grad = shape.call(torch.float64, device), shape.grad(torch.float64, device)
    whole = results(deform_conv2d, case, grad, shape.steps)
    one = shape.channels * shape.taps * shape.out[0] * shape.out[1]
    monkeypatch.setattr(_deform_chunks, "CHUNK_ELEMENTS", 2 * one + 1)
    assert [_deform_chunks.chunk_images(n) for n in (one, 2 * one, 3 * one)] == [2, 1, 1]
    chunked = results(deform_conv2d, case, grad, shape.steps)
    close(chunked, whole)
    for first in (0, 2, 4):
        some = slice(first, first + 2)
        input, offset, weight, bias, mask = case
        part = (input[some], offset[some], weight, bias, None if mask is None else mask[some])
        alone = results(deform_conv2d, part, grad[some], shape.steps)
        for number in (0, 1, 2, 5)[: 4 if shape.masked else 3]:
            assert_bitwise_equal(chunked[number][some], alone[number])


def test_calls_repeat_their_bits(device):
    shape = Deform(3, 40, 24, 2, 2, (17, 19))
    case, grad = shape.call(torch.float32, device), shape.grad(torch.float32, device)
    first = results(deform_conv2d, case, grad, shape.steps)
    for _ in range(3):
        assert_bitwise_equal(results(deform_conv2d, case, grad, shape.steps), first)


def test_zero_offsets_make_a_convolution(device):
    shape = SHAPES["groups"]
    input, offset, weight, bias, _ = shape.call(torch.float64, device)
    out = deform_conv2d(input, offset * 0, weight, bias, *shape.steps)
    plain = torch.nn.functional.conv2d(input, weight, bias, *shape.steps, groups=shape.groups)
    close([out], [plain])


def test_the_module_is_torchvisions():
    for arguments in ((4, 6, 3), (4, 6, (3, 1), 2, 1, 1, 2, False)):
        torch.manual_seed(0)
        theirs = torchvision_ops.DeformConv2d(*arguments)
        torch.manual_seed(0)
        ours = truncdet.DeformConv2d(*arguments)
        assert_bitwise_equal(ours.state_dict(), theirs.state_dict())
        x = torch.randn(2, 4, 9, 9)
        taps = theirs.weight[0, 0].numel()
        places = torch.nn.functional.conv2d(
            x, theirs.weight, None, theirs.stride, theirs.padding, theirs.dilation, theirs.groups
        ).shape[2:]
        offset, mask = torch.randn(2, 2 * taps, *places), torch.rand(2, taps, *places)
        close([ours(x, offset, mask)], [theirs(x, offset, mask)], 1e-6)
    assert "(3, 1), stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=2, bias=F" in str(ours)
    with pytest.raises(ValueError, match=r"in_channels must be divisible by groups, got 4 and 3$"):
        truncdet.DeformConv2d(4, 6, 3, groups=3)


@pytest.mark.framework("mmcv")
@each_shape
def test_values_and_gradients_are_mmcvs(shape):
    """Without any reordering: mmcv's offsets have torchvision's layout, whatever the groups."""
    import mmcv.ops

    case, grad = shape.call(torch.float64), shape.grad(torch.float64)
    rest = (shape.groups, shape.offset_groups)

    def modulated(input, offset, weight, bias, *steps_and_mask):
        *steps, mask = steps_and_mask
        return mmcv.ops.modulated_deform_conv2d(input, offset, mask, weight, bias, *steps, *rest)

    def plain(input, offset, weight, bias, *steps_and_mask):
        *steps, _ = steps_and_mask
        out = mmcv.ops.deform_conv2d(input, offset, weight, *steps, *rest)
        return out + bias[:, None, None]

    theirs = results(modulated if shape.masked else plain, case, grad, shape.steps)
    close(results(deform_conv2d, case, grad, shape.steps), theirs)
