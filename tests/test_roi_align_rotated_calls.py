"""roi_align_rotated as it is called: derivatives, compilers, layouts, odd RoIs, wrong arguments."""

import copy
import math

import numpy as np
import pytest
import torch
from roi_cases import each_dtype, needs_cuda_kernels, values
from rotated_cases import Case, backward, forward, stack_rois

from truncdet import RoIAlignRotated, TruncdetError, check, roi_align_rotated
from truncdet.testing import assert_bitwise_equal

CASE = Case((2, 3, 7, 9), 6, (2, 3))
OPS = torch.ops.truncdet


def tensors(device, dtype=torch.float32):
    """Features, RoIs and a gradient of the output."""
    input = CASE.make_input(dtype, device).requires_grad_()
    return input, CASE.make_rois(dtype, device), CASE.make_grad(dtype, device)


def pooled(input, rois, grad, op=roi_align_rotated):
    out = op(input, rois, *CASE.rest_of_call)
    return out.detach(), torch.autograd.grad(out, input, grad)[0]


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("aligned", [False, True], ids=["", "aligned"])
@pytest.mark.parametrize("clockwise", [False, True], ids=["", "clockwise"])
def test_the_gradient_is_the_derivative_and_repeats(device, ratio, aligned, clockwise):
    case = Case((1, 2, 5, 6), 4, (2, 2), 0.5, ratio, aligned, clockwise)
    input = case.make_input(torch.float64, device).requires_grad_()
    rois = case.make_rois(torch.float64, device)

    def call(x):
        return roi_align_rotated(x, rois, *case.rest_of_call)

    assert torch.autograd.gradcheck(call, (input,), nondet_tol=0)


def test_a_second_derivative_raises(device):
    input, rois, grad = tensors(device)
    grad.requires_grad_()
    out = roi_align_rotated(input, rois, *CASE.rest_of_call)
    (first,) = torch.autograd.grad(out, input, grad, create_graph=True)
    text = r"^roi_align_rotated: a second derivative is not implemented$"
    with pytest.raises(TruncdetError, match=text):
        first.sum().backward()


@each_dtype
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(device, dtype, channels_last):
    input, rois, grad = tensors(device, dtype)
    if channels_last:
        input = input.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(OPS.roi_align_rotated.default, (input, rois, *CASE.rest))
    args = (grad, rois, *CASE.shape, *CASE.rest, channels_last)
    torch.library.opcheck(OPS.roi_align_rotated_backward.default, args)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_in_one_graph(device, dynamic):
    input, rois, grad = tensors(device)
    compiled = torch.compile(
        roi_align_rotated, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    expected = pooled(input, rois, grad)
    assert_bitwise_equal(pooled(input, rois, grad, compiled), expected)
    assert_bitwise_equal(pooled(input, rois[:4], grad[:4], compiled)[0], expected[0][:4])
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_keeps_coordinates_in_float32(device, dtype):
    """Features of a convolution come in the low type; RoIs do not, and gradients reach it."""
    conv = torch.nn.Conv2d(3, 4, 1).to(device)
    rois = CASE.make_rois(device=device)
    with torch.autocast(device.type, dtype=dtype):
        features = conv(values((2, 3, 7, 9), 5, device=device))
        out = roi_align_rotated(features, rois, 2, 1.0)
    assert features.dtype == out.dtype == dtype
    assert_bitwise_equal(out.detach(), roi_align_rotated(features.detach(), rois, 2, 1.0))
    out.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32 and conv.weight.grad.any()


@each_dtype
def test_layout_of_gradient_and_features_does_not_matter(device, dtype):
    rois = CASE.make_rois(dtype, device)
    wide = values((2, 6, 7, 18), 1, dtype, device)
    inputs = [
        wide[:, ::2, :, 1:10],
        wide[:1, :3, :, :9].expand(2, 3, 7, 9),
        values((2, 3, 9, 7), 6, dtype, device).transpose(2, 3),
        wide[:, :3, :, :9].contiguous(memory_format=torch.channels_last),
        wide.contiguous(memory_format=torch.channels_last)[:, :3, :, 2:11],
    ]
    grads = [
        values((1, 3, 1, 1), 2, dtype, device).expand(6, 3, 2, 3),
        values((3, 6, 2, 3), 3, dtype, device).transpose(0, 1),
        values((6, 3, 2, 6), 4, dtype, device)[..., ::2],
        values((6, 3, 2, 3), 5, dtype, device).contiguous(memory_format=torch.channels_last),
    ]
    for input in inputs:
        for grad in grads:
            got = pooled(input.detach().requires_grad_(), rois, grad)
            plain = input.detach().contiguous().requires_grad_()
            assert_bitwise_equal(got, pooled(plain, rois, grad.contiguous()))
    strided = torch.stack([rois, rois], 2)[..., 0]
    assert_bitwise_equal(forward(CASE, inputs[0], strided), forward(CASE, inputs[0], rois))
    assert_bitwise_equal(backward(CASE, grads[0], strided), backward(CASE, grads[0], rois))


def test_the_gradient_has_the_memory_order_of_the_features(device):
    input, rois, grad = tensors(device)
    last = input.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    plain, other = (pooled(x, rois, grad) for x in (input, last))
    assert_bitwise_equal(other, plain)
    assert plain[1].is_contiguous()
    assert other[1].is_contiguous(memory_format=torch.channels_last)


def test_inputs_are_not_changed(device):
    input, rois, grad = tensors(device)
    before = copy.deepcopy([input.detach(), rois, grad])
    pooled(input, rois, grad)
    assert_bitwise_equal([input.detach(), rois, grad], before)


@pytest.mark.parametrize(
    "dtype, rois_dtype",
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_rois_of_any_type_are_used_in_the_type_of_the_sums(device, dtype, rois_dtype):
    input, rois, grad = tensors(device, dtype)
    rois = rois.to(rois_dtype)
    expected = pooled(input, rois.to(torch.promote_types(dtype, torch.float32)), grad)
    assert_bitwise_equal(pooled(input, rois, grad), expected)


def test_rois_get_no_gradient(device):
    input, rois, _ = tensors(device)
    out = roi_align_rotated(input, rois.requires_grad_(), *CASE.rest_of_call)
    out.sum().backward()
    assert rois.grad is None and input.grad is not None
    assert not roi_align_rotated(input.detach(), rois, *CASE.rest_of_call).requires_grad


UNUSABLE = {
    "nan": torch.nan,
    "inf": torch.inf,
    "-inf": -torch.inf,
    "far": 3e38,
    "further than 2^22": 2.0**22,
}


@each_dtype
@pytest.mark.parametrize("column", range(1, 6))
@pytest.mark.parametrize("value", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_rois_that_cannot_be_placed_give_zeros_and_get_nothing(device, dtype, column, value):
    rois = CASE.make_rois(dtype, device)
    rois[2, column] = value
    input, _, grad = tensors(device, dtype)
    out, gradient = pooled(input, rois, grad)
    assert_bitwise_equal(out[2], torch.zeros_like(out[2]))
    grad[2] = 0
    # The same number of RoIs, or the head-room would be another.
    assert_bitwise_equal(pooled(input, CASE.make_rois(dtype, device), grad)[1], gradient)


def test_sides_of_zero_have_no_samples_of_their_own_choice(device):
    """As in the original: none if the grid is adaptive, all of them in one place otherwise."""
    input = values((1, 1, 5, 5), 1, device=device)
    rois = stack_rois((0, 2.5, 2.5, 0, 0, 1)).to(device)
    assert not roi_align_rotated(input, rois, 2, 1.0).any()
    assert (roi_align_rotated(input, rois, 2, 1.0, 3) == input[0, 0, 2, 2]).all()
    assert roi_align_rotated(input, rois, 2, 1.0, aligned=False).any()


@pytest.mark.parametrize("sides", [(-4, 3), (4, -3), (-4, -3)])
def test_sides_below_zero_mirror_the_box(device, sides):
    input = values((1, 2, 8, 8), 1, torch.float64, device)
    rois = torch.tensor([[0, 4, 4, *sides, 0.5]], dtype=torch.float64, device=device)
    assert not roi_align_rotated(input, rois, 3, 1.0).any()
    got = roi_align_rotated(input, rois, 3, 1.0, 2)
    flip = [3 - axis for axis in range(2) if sides[axis] < 0]
    upright = torch.cat([rois[:, :3], rois[:, 3:5].abs(), rois[:, 5:]], 1)
    expected = roi_align_rotated(input, upright, 3, 1.0, 2).flip(flip)
    assert (got - expected).abs().max() <= 1e-14


@pytest.mark.parametrize("index, text", [(2, "2"), (-1, "-1"), (1e9, "1e+09"), (torch.nan, "nan")])
def test_a_batch_index_outside_raises_on_the_cpu(index, text):
    rois = stack_rois((1, 1, 1, 2, 2, 0), (index, 1, 1, 2, 2, 0))
    message = f"roi_align_rotated: the batch index of rois must be in [0, 2), got {text} in row 1"
    with pytest.raises(ValueError) as error:
        roi_align_rotated(torch.ones(2, 1, 4, 4), rois, 2, 1.0)
    assert str(error.value) == message
    grad = torch.ones(2, 1, 2, 2)
    with pytest.raises((RuntimeError, ValueError), match="batch index of rois must be in"):
        OPS.roi_align_rotated_backward(grad, rois, 2, 1, 4, 4, 2, 2, 1.0, 0, True, False, False)


@pytest.mark.cuda
@pytest.mark.parametrize("index", [2, -1, 1e9, torch.nan])
def test_a_batch_index_outside_is_dropped_on_a_gpu_and_reported(index):
    check()
    rois = stack_rois((1, 1, 1, 2, 2, 0.3), (index, 1, 1, 2, 2, 0), (0, 2, 2, 3, 3, 1))
    input = values((2, 3, 4, 4), 1).requires_grad_()
    there = input.detach().cuda().requires_grad_()
    out = roi_align_rotated(there, rois.cuda(), 2, 1.0)
    with pytest.raises(TruncdetError, match=r"^roi_align_rotated: an index was out of range on"):
        check()
    expected = roi_align_rotated(input, rois[::2], 2, 1.0)
    assert_bitwise_equal(out[::2].cpu(), expected)
    assert_bitwise_equal(out[1], torch.zeros_like(out[1]))
    grad = values(out.shape, 2)
    (got,) = torch.autograd.grad(out, there, grad.cuda())
    (gradient,) = torch.autograd.grad(expected, input, grad[::2])
    with pytest.raises(TruncdetError, match=r"^roi_align_rotated: "):
        check()
    assert_bitwise_equal(got.cpu(), gradient)


X, B = torch.zeros(2, 3, 4, 4), torch.zeros(1, 6)
SIZE = "output_size must be one or two ints in [1, 32768], got "
WRONG = [
    (TypeError, "input must be a Tensor, got list", ([1], B, 2, 1.0)),
    (ValueError, "input must have shape [N, C, H, W], got [3, 4, 4]", (X[0], B, 2, 1.0)),
    (
        TypeError,
        "input must be float64, float32, float16 or bfloat16, got torch.int64",
        (X.long(), B, 2, 1.0),
    ),
    (TypeError, "rois must be a Tensor, got list", (X, [B], 2, 1.0)),
    (ValueError, "rois must have shape [K, 6], got [1, 5]", (X, B[:, 1:], 2, 1.0)),
    (ValueError, "rois must have shape [K, 6], got [6]", (X, B[0], 2, 1.0)),
    (TypeError, "rois must be floating point, got torch.int64", (X, B.long(), 2, 1.0)),
    (ValueError, "rois must be on cpu, got meta", (X, B.to("meta"), 2, 1.0)),
    (ValueError, SIZE + "0", (X, B, 0, 1.0)),
    (ValueError, SIZE + "(7, -1)", (X, B, (7, -1), 1.0)),
    (ValueError, SIZE + "[1, 2, 3]", (X, B, [1, 2, 3], 1.0)),
    (ValueError, SIZE + "(2, 2.5)", (X, B, (2, 2.5), 1.0)),
    (
        ValueError,
        "output_size must have at most 524288 bins, got (1024, 1024)",
        (X, B, 1024, 1.0),
    ),
    (TypeError, "output_size must be an int or two of them, got float", (X, B, 7.0, 1.0)),
    (TypeError, "output_size must be an int or two of them, got str", (X, B, "77", 1.0)),
    (ValueError, "spatial_scale must be positive and finite, got 0", (X, B, 2, 0)),
    (ValueError, "spatial_scale must be positive and finite, got nan", (X, B, 2, torch.nan)),
    (TypeError, "sampling_ratio must be an int, got float", (X, B, 2, 1.0, 2.0)),
    (ValueError, "sampling_ratio must be at most 512, got 513", (X, B, 2, 1.0, 513)),
]


@pytest.mark.parametrize("error, text, args", WRONG, ids=[text for _, text, _ in WRONG])
def test_wrong_arguments_are_named(error, text, args):
    with pytest.raises(error) as caught:
        roi_align_rotated(*args)
    assert str(caught.value) == f"roi_align_rotated: {text}"


def test_numpy_integers_and_sizes_are_sizes(device):
    x, b = X.to(device), B.to(device)
    assert roi_align_rotated(x, b, torch.Size([2, 3]), 1.0, np.int64(2)).shape == (1, 3, 2, 3)
    assert roi_align_rotated(x, b, (np.int64(2), np.int32(3)), 1.0).shape == (1, 3, 2, 3)


def test_the_module_is_the_function(device):
    input, rois, _ = tensors(device)
    module = RoIAlignRotated((2, 3), 0.5, 2, False, True)
    expected = roi_align_rotated(input, rois, (2, 3), 0.5, 2, False, True)
    assert_bitwise_equal(module(input, rois), expected)
    assert_bitwise_equal(copy.deepcopy(module)(input, rois), expected)
    assert not list(module.parameters()) and not module.state_dict()


def test_defaults_are_mmcvs(device):
    input, rois, _ = tensors(device)
    expected = forward(CASE._replace(bins=(2, 2)), input, rois)
    assert_bitwise_equal(roi_align_rotated(input, rois, 2, 1.0), expected)
    assert_bitwise_equal(RoIAlignRotated(2, 1.0)(input, rois), expected)
    assert repr(RoIAlignRotated(7, 0.25)) == (
        "RoIAlignRotated(output_size=7, spatial_scale=0.25, sampling_ratio=0, aligned=True, "
        "clockwise=False)"
    )


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::roi_align_rotated", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    case = Case((2, 1, 4, 4), 1, (2, 2), boxes=stack_rois((0, 2, 2, 2, 2, 0)))
    input, rois, grad = case.make_input(), case.make_rois(), case.make_grad()
    wrong = [
        (case, input[0], grad[0], rois),
        (case, input, grad, rois.double()),
        (case, input.double(), grad.double(), rois),
        (case, input.long(), grad.long(), rois),
        (case, input, grad, rois[:, :5]),
        (case, input, grad, rois[0]),
        (case._replace(bins=(0, 2)), input, grad, rois),
        (case._replace(bins=(2, 1 << 16)), input, grad, rois),
        (case._replace(bins=(1 << 10, 1 << 10)), input, grad, rois),
        (case._replace(ratio=513), input, grad, rois),
    ]
    for changed, x, g, b in wrong:
        with pytest.raises(RuntimeError, match="roi_align_rotated"):
            forward(changed, x, b)
        with pytest.raises(RuntimeError, match="roi_align_rotated"):
            backward(changed, g, b)
    for shape in ((2, 1, -4, 4), (2, 3, 4, 4), (2, 1, 1 << 31, 4)):
        with pytest.raises(RuntimeError, match="roi_align_rotated"):
            backward(case._replace(shape=shape), grad, rois)
    assert math.isfinite(forward(case, input, rois).sum())


@pytest.mark.cuda
@needs_cuda_kernels
@each_dtype
def test_a_cuda_graph_replays_the_same_bits(dtype):
    input, rois, grad = tensors("cuda", dtype)
    expected = pooled(input, rois, grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pooled(input, rois, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = pooled(input, rois, grad)
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7)
        graph.replay()
        assert_bitwise_equal(got, expected)
    # Other values, other boxes: nothing of the capture is baked in.
    with torch.no_grad():
        input.mul_(2)
        grad.mul_(3)
        rois[:, 1:].mul_(0.5)
    graph.replay()
    assert_bitwise_equal(got, pooled(input, rois, grad))


@pytest.mark.cuda
def test_any_stream_gives_the_same_bits():
    """The inputs are produced on the stream, late: a launch elsewhere would read zeros."""
    input, rois, grad = tensors("cuda")
    expected = pooled(input, rois, grad)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(input)
        torch.cuda._sleep(20_000_000)
        late.copy_(input.detach())
        got = pooled(late.requires_grad_(), rois, grad)
    stream.synchronize()
    assert_bitwise_equal(got, expected)


@pytest.mark.cuda
@needs_cuda_kernels
def test_nothing_waits_for_the_device():
    input, rois, grad = tensors("cuda")
    pooled(input, rois, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pooled(input, rois, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
