"""roi_align with arguments nobody should give: right values or one sentence, never a crash."""

import numpy as np
import pytest
import torch
from roi_cases import (
    Case,
    backward,
    each_dtype,
    each_pool,
    forward,
    needs_cuda_kernels,
    stack_boxes,
    values,
)
from torchvision.ops import roi_align as torchvision_roi_align

from truncdet import TruncdetError, check, roi_align
from truncdet.testing import assert_bitwise_equal

NONFINITE = [torch.nan, torch.inf, -torch.inf]


def run(input, boxes, *args, grad=None, **keywords):
    """Output and gradient."""
    input = input.detach().requires_grad_()
    out = roi_align(input, boxes, *args, **keywords)
    grad = torch.ones_like(out) if grad is None else grad
    return out.detach(), torch.autograd.grad(out, input, grad)[0]


@each_pool
@each_dtype
@pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
def test_boxes_that_are_not_finite_give_zeros_and_no_gradient(device, dtype, pool_mode, aligned):
    good = [0.0, 1.0, 1.0, 5.0, 5.0]
    rows = [[*good[:c], value, *good[c + 1 :]] for c in (1, 2, 3, 4) for value in NONFINITE]
    rows += [[0.0, -inf, -inf, inf, inf] for inf in NONFINITE]
    rows += [[0.0, -3e38, 0.0, 3e38, 4.0]]  # finite corners, infinite width
    bad = torch.tensor(rows, device=device)
    input = values((1, 2, 6, 7), 3, dtype, device)
    keywords = dict(aligned=aligned, pool_mode=pool_mode)
    out, gradient = run(input, bad, 2, **keywords)
    assert_bitwise_equal(out, torch.zeros_like(out))
    assert_bitwise_equal(gradient, torch.zeros_like(input))
    _, gradient = run(input, bad, 2, grad=torch.full_like(out, torch.nan), **keywords)
    assert_bitwise_equal(gradient, torch.zeros_like(input))
    # Beside a good RoI they change neither its output nor, in the format's range, its gradient.
    both = torch.cat([bad[:7], torch.tensor([good], device=device), bad[7:]])
    alone = run(input, torch.tensor([good], device=device), 2, **keywords)
    together = run(input, both, 2, **keywords)
    assert_bitwise_equal(together[0][7:8], alone[0])
    torch.testing.assert_close(together[1], alone[1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
def test_reversed_and_empty_boxes_are_as_in_torchvision(device, ratio, aligned):
    reversed_ = stack_boxes((0, 6, 6, 1, 2), (0, 6, 1, 2, 5), (0, 1, 7, 5, 3)).to(device)
    empty = stack_boxes((0, 3, 3, 3, 3), (0, 2.5, 1, 2.5, 6)).to(device)
    input = values((1, 2, 9, 8), 3, torch.float32, device)
    without_samples = aligned and ratio < 0
    boxes = empty if without_samples else torch.cat([empty, reversed_])
    results = []
    for op in (roi_align, torchvision_roi_align):
        x = input.clone().requires_grad_()
        out = op(x, boxes, (3, 2), 1.0, ratio, aligned)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    if without_samples:
        # torchvision's CPU operator throws here, its CUDA operator gives these zeros.
        out, gradient = run(input, reversed_, (3, 2), aligned=True)
        assert not out.any() and not gradient.any()


@each_pool
def test_a_huge_adaptive_box_comes_back(device, pool_mode):
    """Of the 20,000 samples an axis, the first four are inside; the bin's mean counts them all."""
    boxes = stack_boxes((0, 0, 0, 20000, 20000)).to(device)
    input = torch.ones(1, 1, 4, 4, device=device)
    out, gradient = run(input, boxes, 1, pool_mode=pool_mode)
    share = (4 / 20000) ** 2 if pool_mode == "avg" else 1.0
    torch.testing.assert_close(out, torch.full_like(out, share))
    torch.testing.assert_close(gradient.sum(), torch.tensor(share, device=device))


@each_pool
@pytest.mark.parametrize("size", [1e6, 1e30, 1.5e38])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_boxes_of_any_size_come_back(device, pool_mode, size, ratio):
    boxes = stack_boxes((0, 0, 0, size, size), (0, -size, -size, size, size), (0, -size, 0, 1, 2))
    input = torch.ones(1, 1, 4, 4, device=device)
    out, gradient = run(input, boxes.to(device), 3, sampling_ratio=ratio, pool_mode=pool_mode)
    assert ((out >= 0) & (out <= 1)).all()
    assert ((gradient >= 0) & (gradient <= 3 * 9)).all()


def test_many_samples_a_bin_average_the_area(device):
    input = torch.arange(6.0, device=device).expand(1, 1, 6, 6)
    boxes = stack_boxes((0, 1, 1, 4, 4)).to(device)
    out = roi_align(input, boxes, 1, sampling_ratio=1000)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.5], device=device))


@each_pool
@each_dtype
@pytest.mark.parametrize(
    "shape, rois",
    [
        ((2, 3, 4, 5), 0),
        ((0, 3, 4, 5), 0),
        ((2, 0, 4, 5), 2),
        ((2, 3, 0, 5), 2),
        ((2, 3, 4, 0), 2),
        ((0, 0, 0, 0), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_nothing_in_gives_zeros_of_the_right_shape(
    device, dtype, pool_mode, shape, rois, channels_last
):
    input = torch.ones(shape, dtype=dtype, device=device)
    if channels_last:
        input = input.contiguous(memory_format=torch.channels_last)
    boxes = stack_boxes((0, 0, 0, 3, 3), (1, 0, 0, 3, 3))[:rois].reshape(rois, 5).to(device)
    out, gradient = run(input, boxes, (2, 3), pool_mode=pool_mode)
    assert_bitwise_equal(out, torch.zeros(rois, shape[1], 2, 3, dtype=dtype, device=device))
    assert_bitwise_equal(gradient, torch.zeros_like(input))


def test_empty_lists_of_boxes(device):
    none = torch.zeros(0, 4, device=device)
    for images in (0, 1, 3):
        out = roi_align(torch.ones(images, 2, 4, 4, device=device), [none] * images, 2)
        assert out.shape == (0, 2, 2, 2)


@pytest.mark.parametrize("index, text", [(2, "2"), (-1, "-1"), (1e9, "1e+09"), (torch.nan, "nan")])
@each_pool
def test_a_batch_index_outside_raises_on_the_cpu(index, text, pool_mode):
    boxes = stack_boxes((1, 0, 0, 2, 2), (index, 0, 0, 2, 2))
    with pytest.raises(ValueError) as error:
        roi_align(torch.ones(2, 1, 4, 4), boxes, 2, pool_mode=pool_mode)
    assert str(error.value) == (
        f"roi_align: the batch index of boxes must be in [0, 2), got {text} in row 1"
    )


def test_the_operators_check_the_batch_index_themselves():
    case = Case((2, 1, 4, 4), 2, (2, 2), boxes=stack_boxes((1, 0, 0, 2, 2), (5, 0, 0, 2, 2)))
    text = r"the batch index of boxes must be in \[0, 2\), got 5 in row 1"
    with pytest.raises((RuntimeError, ValueError), match=text):
        forward(case, case.make_input(), case.make_boxes())
    with pytest.raises((RuntimeError, ValueError), match=text):
        backward(case, case.make_grad(), case.make_boxes())


@pytest.mark.cuda
@each_pool
@pytest.mark.parametrize("index", [2, -1, 1e9, torch.nan])
def test_a_batch_index_outside_is_dropped_on_a_gpu_and_reported(index, pool_mode):
    check()
    boxes = stack_boxes((1, 0, 0, 2, 2), (index, 0, 0, 2, 2), (0, 1, 1, 3, 3))
    input = values((2, 3, 4, 4), 1).requires_grad_()
    there = input.detach().cuda().requires_grad_()
    out = roi_align(there, boxes.cuda(), 2, pool_mode=pool_mode)
    with pytest.raises(TruncdetError, match=r"^roi_align: an index was out of range on a CUDA"):
        check()
    check()  # reported once
    expected = roi_align(input, boxes[::2], 2, pool_mode=pool_mode)
    assert_bitwise_equal(out[::2].cpu(), expected)
    assert_bitwise_equal(out[1], torch.zeros_like(out[1]))
    grad = values(out.shape, 2)
    (got,) = torch.autograd.grad(out, there, grad.cuda())
    (gradient,) = torch.autograd.grad(expected, input, grad[::2])
    torch.cuda.synchronize()
    with pytest.raises(TruncdetError, match=r"^roi_align: "):
        roi_align(there, boxes[:1].cuda(), 2)
    assert_bitwise_equal(got.cpu(), gradient)


X = torch.zeros(2, 3, 4, 4)
B = torch.zeros(1, 5)
WRONG = [
    (TypeError, "input must be a Tensor, got list", ([1], B, 2)),
    (ValueError, "input must have shape [N, C, H, W], got [3, 4, 4]", (X[0], B, 2)),
    (
        TypeError,
        "input must be float64, float32, float16 or bfloat16, got torch.int64",
        (X.long(), B, 2),
    ),
    (
        TypeError,
        "input must be float64, float32, float16 or bfloat16, got torch.complex64",
        (X.to(torch.complex64), B, 2),
    ),
    (ValueError, "output_size must be one or two ints in [1, 32768], got 0", (X, B, 0)),
    (ValueError, "output_size must be one or two ints in [1, 32768], got (7, -1)", (X, B, (7, -1))),
    (
        ValueError,
        "output_size must be one or two ints in [1, 32768], got [1, 2, 3]",
        (X, B, [1, 2, 3]),
    ),
    (
        ValueError,
        "output_size must be one or two ints in [1, 32768], got (2, 2.5)",
        (X, B, (2, 2.5)),
    ),
    (ValueError, "output_size must be one or two ints in [1, 32768], got 40000", (X, B, 40000)),
    (TypeError, "output_size must be an int or two of them, got float", (X, B, 7.0)),
    (TypeError, "output_size must be an int or two of them, got str", (X, B, "77")),
    (TypeError, "output_size must be an int or two of them, got NoneType", (X, B, None)),
    (ValueError, "spatial_scale must be positive and finite, got 0", (X, B, 2, 0)),
    (ValueError, "spatial_scale must be positive and finite, got -0.5", (X, B, 2, -0.5)),
    (ValueError, "spatial_scale must be positive and finite, got nan", (X, B, 2, torch.nan)),
    (ValueError, "spatial_scale must be positive and finite, got inf", (X, B, 2, torch.inf)),
    (ValueError, "sampling_ratio must be at most 32768, got 32769", (X, B, 2, 1.0, 32769)),
    (
        ValueError,
        "pool_mode must be one of avg, max, got 'mean'",
        (X, B, 2, 1.0, -1, False, "mean"),
    ),
    (
        ValueError,
        "boxes must have shape [K, 5], got [1, 4] (or give a list of [L, 4] tensors)",
        (X, B[:, 1:], 2),
    ),
    (
        ValueError,
        "boxes must have shape [K, 5], got [5] (or give a list of [L, 4] tensors)",
        (X, B[0], 2),
    ),
    (TypeError, "boxes must be floating point, got torch.int64", (X, B.long(), 2)),
    (TypeError, "boxes must be floating point, got torch.int32", (X, [B[:, 1:].int()] * 2, 2)),
    (ValueError, "boxes must be on cpu, got meta", (X, B.to("meta"), 2)),
    (ValueError, "boxes must be on cpu, got meta", (X, [B[:, 1:].to("meta")] * 2, 2)),
    (
        ValueError,
        "boxes must be a list of at most one tensor an image, 2, got 3",
        (X, [B[:, 1:]] * 3, 2),
    ),
    (ValueError, "boxes[1] must have shape [L, 4], got [1, 5]", (X, [B[:, 1:], B], 2)),
    (TypeError, "boxes[0] must be a Tensor, got list", (X, [[0, 0, 1, 1], B], 2)),
    (TypeError, "boxes must be a Tensor or a list of Tensors, got NoneType", (X, None, 2)),
]


@pytest.mark.parametrize("error, text, args", WRONG, ids=[text for _, text, _ in WRONG])
def test_wrong_arguments_are_named(error, text, args):
    with pytest.raises(error) as caught:
        roi_align(*args)
    assert str(caught.value) == f"roi_align: {text}"


@pytest.mark.cuda
def test_boxes_on_another_device_are_named():
    with pytest.raises(ValueError, match=r"^roi_align: boxes must be on cuda:0, got cpu$"):
        roi_align(X.cuda(), B, 2)


def test_numpy_integers_and_sizes_are_sizes(device):
    x, b = X.to(device), B.to(device)
    assert roi_align(x, b, torch.Size([2, 3])).shape == (1, 3, 2, 3)
    assert roi_align(x, b, (np.int64(2), np.int32(3))).shape == (1, 3, 2, 3)


@each_pool
@each_dtype
def test_layout_of_gradient_and_features_does_not_matter(device, dtype, pool_mode):
    boxes = stack_boxes((0, 0.3, 1, 4, 5.7), (1, 2, 2, 6, 3), (1, -1, 0, 3, 4)).to(device)
    wide = values((2, 6, 7, 12), 1, dtype, device)
    inputs = [
        wide[:, ::2, :, 1:9],
        wide.transpose(2, 3)[:, :3, 2:10],
        wide[:1, :3, :, :8].expand(2, 3, 7, 8),
        wide[:, :1].expand(2, 3, 7, 12).contiguous(memory_format=torch.channels_last),
        wide[:, :1],
        wide.contiguous(memory_format=torch.channels_last)[:, :, :, 2:],
    ]
    for input in inputs:
        shape = (3, input.shape[1], 2, 2)
        grads = [
            values((1, shape[1], 1, 1), 2, dtype, device).expand(shape),
            values((shape[1], 3, 2, 2), 3, dtype, device).transpose(0, 1),
            values((3, shape[1], 2, 4), 4, dtype, device)[..., ::2],
            values(shape, 5, dtype, device).contiguous(memory_format=torch.channels_last),
            torch.ones((), dtype=dtype, device=device).expand(shape),
        ]
        for grad in grads:
            got = run(input, boxes, 2, grad=grad, pool_mode=pool_mode)
            plain = input.contiguous()
            expected = run(plain, boxes, 2, grad=grad.contiguous(), pool_mode=pool_mode)
            assert_bitwise_equal(got, expected)


@each_pool
@pytest.mark.parametrize(
    "dtype, boxes_dtype",
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_boxes_of_any_type_are_coordinates_in_the_type_of_the_sums(
    device, dtype, boxes_dtype, pool_mode
):
    input = values((2, 3, 6, 7), 1, dtype, device)
    boxes = stack_boxes((0, 0.3, 1, 4, 5.7), (1, 2, 2, 6, 3)).to(device).to(boxes_dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    expected = run(input, boxes.to(kind), 2, pool_mode=pool_mode)
    got = run(input, boxes, 2, pool_mode=pool_mode)
    assert got[0].dtype == got[1].dtype == dtype
    assert_bitwise_equal(got, expected)
    parts = [boxes[:1, 1:], boxes[1:, 1:]]
    assert_bitwise_equal(run(input, parts, 2, pool_mode=pool_mode), expected)


def test_coordinates_beside_half_features_keep_float32(device):
    """In float16 a box at 2049 would move by a pixel, and image 2049 would become 2048."""
    input = values((1, 1, 4, 3000), 1, torch.float16, device)
    boxes = stack_boxes((0, 2048, 0, 2050, 2), (0, 2049, 0, 2051, 2)).to(device)
    out = roi_align(input, boxes, 1, aligned=True)
    assert not torch.equal(out[0], out[1])
    images = torch.zeros(2051, 1, 1, 1, dtype=torch.float16, device=device)
    images[2049] = 1
    none = torch.zeros(0, 4, dtype=torch.float16, device=device)
    one = torch.tensor([[0.0, 0, 1, 1]], dtype=torch.float16, device=device)
    assert roi_align(images, [none] * 2049 + [one, none], 1).item() == 1


@each_pool
def test_boxes_get_no_gradient(device, pool_mode):
    input = values((1, 2, 5, 5), 1, device=device).requires_grad_()
    boxes = stack_boxes((0, 1, 1, 4, 4)).to(device).requires_grad_()
    out = roi_align(input, boxes, 2, pool_mode=pool_mode)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out.sum(), boxes, retain_graph=True)
    out.sum().backward()
    assert boxes.grad is None and input.grad is not None
    fixed = roi_align(input.detach(), boxes, 2, pool_mode=pool_mode)
    assert not fixed.requires_grad


FAR = 40000  # channels: 2^31 elements with few of anything else


@pytest.mark.cuda
@needs_cuda_kernels
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_features_of_more_than_2_to_the_31_elements(channels_last):
    input = torch.zeros(2, FAR, 164, 164, dtype=torch.float16, device="cuda")
    assert input.numel() > 2**31
    if channels_last:
        input = input.contiguous(memory_format=torch.channels_last)
    last = values((1, 1, 164, 164), 1, torch.float16, "cuda")
    input[1, -1] = last[0, 0]
    boxes = stack_boxes((1, 120, 130, 170, 160), (0, 0, 0, 9, 9)).cuda()
    out = roi_align(input, boxes, 2, aligned=True)
    own = boxes[:1] * torch.tensor([0.0, 1, 1, 1, 1], device="cuda")
    expected = roi_align(last, own, 2, aligned=True)
    assert_bitwise_equal(out[:1, -1:], expected)
    assert not out[1].any() and not out[0, :-1].any()
    # The same size as a gradient.
    grad = torch.zeros_like(out)
    grad[0, -1] = values((2, 2), 2, torch.float16, "cuda")
    args = (2, FAR, 164, 164, 2, 2, 1.0, -1, True, channels_last)
    got = torch.ops.truncdet.roi_align_backward(grad, boxes, *args)
    args = (1, 1, 164, 164, 2, 2, 1.0, -1, True, False)
    small = torch.ops.truncdet.roi_align_backward(grad[:1, -1:].contiguous(), own, *args)
    assert_bitwise_equal(got[1:, -1:], small)
    assert not got[0].any() and not got[1, :-1].any()


@pytest.mark.cuda
@needs_cuda_kernels
@each_pool
def test_an_output_of_more_than_2_to_the_31_elements(pool_mode):
    boxes = stack_boxes((0, 0, 0, 3, 3)).repeat(1100, 1).cuda()
    boxes[-1] = torch.tensor([0, 1, 0, 2.5, 2])
    input = values((1, FAR, 3, 3), 1, torch.float16, "cuda").requires_grad_()
    out = roi_align(input, boxes, 7, pool_mode=pool_mode)
    assert out.numel() > 2**31
    last = input.detach()[:, -2:]
    expected = run(last, boxes, 7, pool_mode=pool_mode)
    assert_bitwise_equal(out[-1:, -2:], expected[0][-1:])
    (gradient,) = torch.autograd.grad(out, input, torch.ones_like(out))
    expected = expected[1]
    assert_bitwise_equal(gradient[:, -2:], expected)


@pytest.mark.cuda
@needs_cuda_kernels
def test_more_than_65535_images_or_channel_groups():
    """Limits of a launch grid's second and third dimension."""
    input = values((70000, 1, 2, 2), 1, device="cuda")
    boxes = stack_boxes((69999, 0, 0, 2, 2), (0, 0, 0, 2, 2)).cuda()
    out, gradient = run(input, boxes, 1)
    here = run(input.cpu(), boxes.cpu(), 1)
    assert_bitwise_equal((out.cpu(), gradient.cpu()), here)
    input = values((1, 32 * 70000, 1, 1), 1, device="cuda")
    out, gradient = run(input, boxes[1:], 1)
    assert_bitwise_equal((out.cpu(), gradient.cpu()), run(input.cpu(), boxes[1:].cpu(), 1))
