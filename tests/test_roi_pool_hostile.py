"""roi_pool, ps_roi_align, ps_roi_pool with arguments nobody should give: values or one sentence."""

import numpy as np
import pytest
import torch
from pool_cases import ROI_POOL, each_name, each_op
from roi_cases import Case, each_dtype, needs_cuda_kernels, stack_boxes, values

from truncdet import TruncdetError, check, ps_roi_align, ps_roi_pool, roi_pool
from truncdet.testing import assert_bitwise_equal

NONFINITE = [torch.nan, torch.inf, -torch.inf]


@each_op
@each_dtype
def test_boxes_that_are_not_finite_give_zeros_and_no_gradient(device, op, dtype):
    good = [0.0, 1.0, 1.0, 4.0, 4.0]
    rows = [[*good[:c], value, *good[c + 1 :]] for c in (1, 2, 3, 4) for value in NONFINITE]
    rows += [[0.0, -inf, -inf, inf, inf] for inf in NONFINITE]
    case = Case((1, 2, 6, 7), len(rows), (2, 2), boxes=stack_boxes(*rows))
    input, boxes, grad = op.make(case, dtype, device)
    out, gradient = op.gradient(case, input, boxes, grad)
    assert_bitwise_equal(out, torch.zeros_like(out))
    assert_bitwise_equal(gradient, torch.zeros_like(input))
    gradient = op.gradient(case, input, boxes, torch.full_like(grad, torch.nan))[1]
    assert_bitwise_equal(gradient, torch.zeros_like(input))
    # Beside a good RoI they change nothing of its output.
    both = torch.cat([boxes[:7], boxes.new_tensor([good]), boxes[7:]])
    alone = op.call(case, input, boxes.new_tensor([good]))
    assert alone.all()
    assert_bitwise_equal(op.call(case, input, both)[7:8], alone)


@each_op
@pytest.mark.parametrize("size", [1e6, 1e30, 1.5e38])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_boxes_of_any_size_come_back(device, op, size, ratio):
    boxes = stack_boxes((0, 0, 0, size, size), (0, -size, -size, size, size), (0, -size, 0, 1, 2))
    case = Case((1, 1, 4, 4), 3, (3, 3), ratio=ratio, boxes=boxes)
    input = torch.ones(op.shape(case), device=device)
    grad = torch.ones(3, 1, 3, 3, device=device)
    out, gradient = op.gradient(case, input, boxes.to(device), grad)
    assert ((out >= 0) & (out <= 1)).all()
    assert ((gradient >= 0) & (gradient <= 27)).all()


@each_op
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
def test_nothing_in_gives_zeros_of_the_right_shape(device, op, dtype, shape, rois, channels_last):
    boxes = stack_boxes((0, 0, 0, 3, 3), (1, 0, 0, 3, 3))[:rois].reshape(rois, 5)
    case = Case(shape, rois, (2, 3), boxes=boxes)
    input, boxes, grad = op.make(case, dtype, device)
    if channels_last:
        input = input.contiguous(memory_format=torch.channels_last)
    out, gradient = op.gradient(case, input, boxes, grad)
    assert_bitwise_equal(out, torch.zeros(rois, shape[1], 2, 3, dtype=dtype, device=device))
    assert_bitwise_equal(gradient, torch.zeros_like(input))


@each_op
@pytest.mark.parametrize("count", [(0, 0), (3, 0), (2, 4)], ids=str)
def test_boxes_may_be_a_list(device, op, count):
    case = Case((2, 3, 9, 9), sum(count), (2, 2))
    input, boxes, _ = op.make(case, device=device)
    boxes[:, 0] = torch.tensor([0.0] * count[0] + [1.0] * count[1])
    parts = list(boxes[:, 1:].split(count))
    expected = op.call(case, input, boxes)
    assert_bitwise_equal(op.call(case, input, parts), expected)
    assert_bitwise_equal(op.call(case, input, tuple(parts)), expected)
    # A shorter list leaves the last images without boxes.
    assert_bitwise_equal(op.call(case, input, parts[:1]), expected[: count[0]])
    assert op.call(case, input, []).shape == (0, 3, 2, 2)


@each_name
@pytest.mark.parametrize("index, text", [(2, "2"), (-1, "-1"), (1e9, "1e+09"), (torch.nan, "nan")])
def test_a_batch_index_outside_raises_on_the_cpu(op, index, text):
    boxes = stack_boxes((1, 0, 0, 2, 2), (index, 0, 0, 2, 2))
    case = Case((2, 1, 4, 4), 2, (2, 2), boxes=boxes)
    input, _, grad = op.make(case)
    sentence = f"{op.name}: the batch index of boxes must be in [0, 2), got {text} in row 1"
    with pytest.raises(ValueError) as error:
        op.call(case, input, boxes)
    assert str(error.value) == sentence
    for run in (
        lambda: op.forward(case, input, boxes),
        lambda: op.backward(case, grad, op.chosen_anywhere(case), boxes),
        lambda: op.reference_forward(case, input, boxes),
        lambda: op.reference_backward(case, grad, op.chosen_anywhere(case), boxes),
    ):
        with pytest.raises((RuntimeError, ValueError)) as error:
            run()
        assert sentence in str(error.value)


@pytest.mark.cuda
@each_name
@pytest.mark.parametrize("index", [2, -1, 1e9, torch.nan])
def test_a_batch_index_outside_is_dropped_on_a_gpu_and_reported(op, index):
    check()
    boxes = stack_boxes((1, 0, 0, 2, 2), (index, 0, 0, 2, 2), (0, 1, 1, 3, 3))
    case = Case((2, 3, 4, 4), 3, (2, 2), boxes=boxes)
    input, _, grad = op.make(case)
    there = input.cuda().requires_grad_()
    out = op.call(case, there, boxes.cuda())
    with pytest.raises(TruncdetError, match=rf"^{op.name}: an index was out of range on a CUDA"):
        check()
    check()  # reported once
    expected, gradient = op.gradient(case, input, boxes[::2], grad[::2])
    assert_bitwise_equal(out[::2].detach().cpu(), expected)
    assert_bitwise_equal(out[1].detach(), torch.zeros_like(out[1]))
    (got,) = torch.autograd.grad(out, there, grad.cuda())
    torch.cuda.synchronize()
    with pytest.raises(TruncdetError, match=rf"^{op.name}: "):
        op.call(case, there, boxes[:1].cuda())
    assert_bitwise_equal(got.cpu(), gradient)


X = torch.zeros(2, 4, 4, 4)
B = torch.zeros(1, 5)
WRONG = [
    (TypeError, "input must be a Tensor, got list", ([1], B, 2)),
    (ValueError, "input must have shape [N, C, H, W], got [4, 4, 4]", (X[0], B, 2)),
    (
        TypeError,
        "input must be float64, float32, float16 or bfloat16, got torch.int64",
        (X.long(), B, 2),
    ),
    (ValueError, "output_size must be one or two ints in [1, 32768], got 0", (X, B, 0)),
    (ValueError, "output_size must be one or two ints in [1, 32768], got (7, -1)", (X, B, (7, -1))),
    (TypeError, "output_size must be an int or two of them, got float", (X, B, 7.0)),
    (ValueError, "spatial_scale must be positive and finite, got 0", (X, B, 2, 0)),
    (ValueError, "spatial_scale must be positive and finite, got nan", (X, B, 2, torch.nan)),
    (
        ValueError,
        "boxes must have shape [K, 5], got [1, 4] (or give a list of [L, 4] tensors)",
        (X, B[:, 1:], 2),
    ),
    (TypeError, "boxes must be floating point, got torch.int64", (X, B.long(), 2)),
    (ValueError, "boxes must be on cpu, got meta", (X, B.to("meta"), 2)),
    (
        ValueError,
        "boxes must be a list of at most one tensor an image, 2, got 3",
        (X, [B[:, 1:]] * 3, 2),
    ),
    (ValueError, "boxes[1] must have shape [L, 4], got [1, 5]", (X, [B[:, 1:], B], 2)),
    (TypeError, "boxes[0] must be a Tensor, got list", (X, [[0, 0, 1, 1], B], 2)),
    (TypeError, "boxes must be a Tensor or a list of Tensors, got NoneType", (X, None, 2)),
]


@each_name
@pytest.mark.parametrize("error, text, args", WRONG, ids=[text for _, text, _ in WRONG])
def test_wrong_arguments_are_named(op, error, text, args):
    with pytest.raises(error) as caught:
        op.public(*args)
    assert str(caught.value) == f"{op.name}: {text}"


@pytest.mark.parametrize("function", [ps_roi_align, ps_roi_pool], ids=lambda f: f.__name__)
def test_channels_that_no_bins_can_share_are_named(function):
    with pytest.raises(ValueError) as caught:
        function(X, B, (3, 2))
    sentence = "input must have a multiple of 3 x 2 = 6 channels, got 4"
    assert str(caught.value) == f"{function.__name__}: {sentence}"


def test_a_sampling_ratio_that_is_none_is_named():
    with pytest.raises(ValueError, match="ps_roi_align: sampling_ratio must be at most 32768"):
        ps_roi_align(X, B, 2, 1.0, 40000)
    with pytest.raises(TypeError, match="ps_roi_align: sampling_ratio must be an int, got float"):
        ps_roi_align(X, B, 2, 1.0, 2.5)


def test_numpy_integers_and_sizes_are_sizes(device):
    x, b = X.to(device), B.to(device)
    assert roi_pool(x, b, torch.Size([2, 3])).shape == (1, 4, 2, 3)
    assert ps_roi_align(x, b, np.int64(2), 1.0, np.int32(2)).shape == (1, 1, 2, 2)
    assert ps_roi_pool(x, b, (np.int64(2), np.int32(2))).shape == (1, 1, 2, 2)


@each_op
@each_dtype
def test_layout_of_gradient_and_features_does_not_matter(device, op, dtype):
    boxes = stack_boxes((0, 0.3, 1, 4, 5.7), (1, 2, 2, 6, 3), (1, -1, 0, 3, 4))
    wide = values((2, 24, 7, 12), 1, dtype, device)
    inputs = [
        wide[:, ::2, :, 1:9],
        wide.transpose(2, 3)[:, :12, 2:10],
        wide[:1, :4, :, :8].expand(2, 4, 7, 8),
        wide[:, :1].expand(2, 4, 7, 12).contiguous(memory_format=torch.channels_last),
        wide.contiguous(memory_format=torch.channels_last)[:, :, :, 2:],
    ]
    for input in inputs:
        images, channels, *cells = input.shape
        outputs = channels // 4 if op.sensitive else channels
        case = Case((images, outputs, *cells), 3, (2, 2), boxes=boxes)
        shape = (3, outputs, 2, 2)
        there = case.make_boxes(dtype, device)
        grads = [
            values((outputs, 3, 2, 2), 3, dtype, device).transpose(0, 1),
            values((3, outputs, 2, 4), 4, dtype, device)[..., ::2],
            values(shape, 5, dtype, device).contiguous(memory_format=torch.channels_last),
            torch.ones((), dtype=dtype, device=device).expand(shape),
        ]
        for grad in grads:
            got = op.gradient(case, input, there, grad)
            expected = op.gradient(case, input.contiguous(), there, grad.contiguous())
            assert_bitwise_equal(got, expected)


@each_op
@each_dtype
def test_tensors_that_start_anywhere_in_memory(device, op, dtype):
    """Slices of storage whose addresses do not allow loads of 16 bytes."""
    case = Case((1, 4, 8, 8), 5, (2, 2))
    input, boxes, grad = op.make(case, dtype, device)
    out, *chosen = op.forward(case, input, boxes)
    expected = op.backward(case, grad, chosen, boxes)

    def shifted(x):
        store = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        store[1:] = x.flatten()
        return store[1:].view(x.shape)

    assert_bitwise_equal(op.forward(case, shifted(input), shifted(boxes))[0], out)
    moved = [shifted(x) for x in chosen]
    assert_bitwise_equal(op.backward(case, shifted(grad), moved, shifted(boxes)), expected)


@each_op
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
def test_boxes_of_any_type_are_coordinates_in_the_type_of_the_sums(device, op, dtype, boxes_dtype):
    rows = stack_boxes((0, 0.3, 1, 4, 5.7), (1, 2, 2, 6, 3)).to(boxes_dtype)
    case = Case((2, 3, 6, 7), 2, (2, 2), boxes=rows)
    input, boxes, grad = op.make(case, dtype, device)
    expected = op.gradient(case, input, boxes, grad)
    got = op.gradient(case, input, rows.to(device), grad)
    assert got[0].dtype == got[1].dtype == dtype
    assert_bitwise_equal(got, expected)


def test_coordinates_beside_half_features_keep_float32(device):
    """In float16 a box at 2049 would move by a pixel, and image 2049 would become 2048."""
    x = torch.arange(3000.0, device=device).remainder(7).half().expand(1, 1, 1, 3000)
    boxes = stack_boxes((0, 2048, 0, 2048, 0), (0, 2049, 0, 2049, 0)).to(device)
    assert roi_pool(x, boxes, 1).flatten().tolist() == [2048 % 7, 2049 % 7]
    images = torch.zeros(2051, 1, 1, 1, dtype=torch.float16, device=device)
    images[2049] = 1
    assert roi_pool(images, stack_boxes((2049, 0, 0, 0, 0)).to(device), 1).item() == 1


@each_op
def test_boxes_get_no_gradient(device, op):
    case = Case((1, 2, 5, 5), 3, (2, 2))
    input, boxes, _ = op.make(case, device=device)
    input.requires_grad_()
    boxes.requires_grad_()
    out = op.call(case, input, boxes)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out.sum(), boxes, retain_graph=True)
    out.sum().backward()
    assert boxes.grad is None and input.grad is not None
    assert not op.call(case, input.detach(), boxes).requires_grad


FAR = 40000  # channels: 2^31 elements with few of anything else


@pytest.mark.cuda
@needs_cuda_kernels
@each_name
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_features_of_more_than_2_to_the_31_elements(op, channels_last):
    outputs = FAR // 4 if op.sensitive else FAR
    boxes = stack_boxes((1, 120, 130, 150, 155), (0, 0, 0, 9, 9))
    case = Case((2, outputs, 164, 164), 2, (2, 2), boxes=boxes)
    input = torch.zeros(op.shape(case), dtype=torch.float16, device="cuda")
    assert input.numel() > 2**31
    if channels_last:
        input = input.contiguous(memory_format=torch.channels_last)
    few = case._replace(shape=(1, 1, 164, 164), rois=1, boxes=boxes[:1] * (boxes[:1] > 1))
    own, own_boxes, own_grad = op.make(few, torch.float16, "cuda")
    input[1, -own.shape[1] :] = own[0].abs()
    out, *chosen = op.forward(case, input, boxes.cuda())
    expected, *own_chosen = op.forward(few, own.abs(), own_boxes)
    assert_bitwise_equal(out[:1, -1:], expected)
    assert not out[1].any() and not out[0, :-1].any()
    del input
    grad = torch.zeros_like(out)
    grad[0, -1] = own_grad[0, 0]
    got = op.backward(case, grad, chosen, boxes.cuda(), channels_last)
    small = op.backward(few, own_grad, own_chosen, own_boxes)
    # The scale is another one, since the image's RoIs are as many but its channels more.
    assert_bitwise_equal(got[1:, -own.shape[1] :], small)
    assert not got[0].any() and not got[1, : -own.shape[1]].any()


@pytest.mark.cuda
@needs_cuda_kernels
def test_an_output_of_more_than_2_to_the_31_elements():
    boxes = stack_boxes((0, 0, 0, 2, 2)).repeat(1100, 1).cuda()
    boxes[-1] = torch.tensor([0, 1, 0, 2, 1])
    case = Case((1, FAR, 3, 3), 1100, (7, 7))
    input = values((1, FAR, 3, 3), 1, torch.float16, "cuda")
    out, chosen = ROI_POOL.forward(case, input, boxes)
    assert out.numel() > 2**31
    few = case._replace(shape=(1, 2, 3, 3))
    expected = ROI_POOL.forward(few, input[:, -2:], boxes[-1:])
    assert_bitwise_equal((out[-1:, -2:], chosen[-1:, -2:]), expected)
    got = ROI_POOL.backward(case, torch.ones_like(out), (chosen,), boxes)
    part = chosen[:, -2:].contiguous()
    expected = ROI_POOL.backward(few, torch.ones_like(part, dtype=torch.float16), (part,), boxes)
    assert_bitwise_equal(got[:, -2:], expected)


@pytest.mark.cuda
@needs_cuda_kernels
@each_op
def test_more_images_than_a_launch_has_rows(op):
    boxes = stack_boxes((69999, 0, 0, 2, 2), (0, 0, 0, 2, 2))
    case = Case((70000, 1, 3, 3), 2, (1, 1), boxes=boxes)
    input, _, grad = op.make(case)
    here = op.gradient(case, input, boxes, grad)
    there = op.gradient(case, input.cuda(), boxes.cuda(), grad.cuda())
    assert_bitwise_equal([x.cpu() for x in there], list(here))
