"""roi_align as an operator: derivatives, compilers, autocast, streams, graphs, the module."""

import copy

import pytest
import torch
from roi_cases import (
    Case,
    backward,
    each_aligned,
    each_dtype,
    each_pool,
    each_ratio,
    forward,
    needs_cuda_kernels,
    stack_boxes,
    values,
)

from truncdet import RoIAlign, TruncdetError, roi_align
from truncdet.testing import assert_bitwise_equal

CASE = Case((2, 3, 7, 9), 6, (2, 3))
OPS = torch.ops.truncdet


def tensors(device, dtype=torch.float32):
    """Features, boxes and a gradient of the output."""
    input = CASE.make_input(dtype, device).requires_grad_()
    return input, CASE.make_boxes(dtype, device), CASE.make_grad(dtype, device)


def pooled(input, boxes, grad, pool_mode, op=roi_align):
    out = op(input, boxes, CASE.bins, aligned=True, pool_mode=pool_mode)
    return out.detach(), torch.autograd.grad(out, input, grad)[0]


@each_aligned
@each_ratio
@each_pool
def test_the_gradient_is_the_derivative_and_repeats(device, aligned, ratio, pool_mode):
    case = Case((1, 2, 5, 6), 4, (2, 2), 0.5, ratio, aligned)
    input = case.make_input(torch.float64, device).requires_grad_()
    boxes = case.make_boxes(torch.float64, device)

    def call(x):
        return roi_align(x, boxes, *case.rest_of_call, pool_mode)

    assert torch.autograd.gradcheck(call, (input,), nondet_tol=0)
    assert torch.autograd.gradcheck(call, (input,), nondet_tol=0, fast_mode=True)


@each_pool
def test_a_second_derivative_raises(device, pool_mode):
    input, boxes, grad = tensors(device)
    grad = grad.requires_grad_()
    out = roi_align(input, boxes, CASE.bins, aligned=True, pool_mode=pool_mode)
    (first,) = torch.autograd.grad(out, input, grad, create_graph=True)
    with pytest.raises(TruncdetError, match=r"^roi_align: a second derivative is not implemented$"):
        first.sum().backward()


@each_dtype
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(device, dtype, channels_last):
    input, boxes, grad = tensors(device, dtype)
    if channels_last:
        input = input.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    rest = (*CASE.bins, 1.0, -1, True)
    torch.library.opcheck(OPS.roi_align.default, (input, boxes, *rest))
    args = (grad, boxes, *CASE.shape, *rest, channels_last)
    torch.library.opcheck(OPS.roi_align_backward.default, args)
    torch.library.opcheck(OPS.roi_align_max.default, (input, boxes, *rest))
    argmax = OPS.roi_align_max(input, boxes, *rest)[1].detach()
    args = (grad, argmax, boxes, *CASE.shape, *rest, channels_last)
    torch.library.opcheck(OPS.roi_align_max_backward.default, args)


@each_pool
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_in_one_graph(device, pool_mode, dynamic):
    input, boxes, grad = tensors(device)
    compiled = torch.compile(roi_align, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = pooled(input, boxes, grad, pool_mode)
    assert_bitwise_equal(pooled(input, boxes, grad, pool_mode, compiled), expected)
    assert_bitwise_equal(
        pooled(input, boxes[:4], grad[:4], pool_mode, compiled)[0], expected[0][:4]
    )
    parts = [boxes[boxes[:, 0] == i][:, 1:] for i in range(2)]
    out = compiled(input, parts, CASE.bins, aligned=True, pool_mode=pool_mode)
    again = roi_align(input, parts, CASE.bins, aligned=True, pool_mode=pool_mode)
    assert_bitwise_equal(out, again)
    torch._dynamo.reset()


def test_a_compiled_call_still_checks_its_arguments(device):
    input, boxes, _ = tensors(device)
    compiled = torch.compile(roi_align, backend="aot_eager")
    with pytest.raises(Exception, match="pool_mode must be one of avg, max, got 'sum'"):
        compiled(input, boxes, 2, pool_mode="sum")
    torch._dynamo.reset()


@each_pool
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_keeps_coordinates_in_float32(device, pool_mode, dtype):
    """Features of a convolution come in the low type; boxes do not, and gradients reach it."""
    conv = torch.nn.Conv2d(3, 4, 1).to(device)
    boxes = CASE.make_boxes(device=device)
    image = values((2, 3, 7, 9), 5, device=device)
    with torch.autocast(device.type, dtype=dtype):
        features = conv(image)
        out = roi_align(features, boxes, 2, pool_mode=pool_mode)
    assert features.dtype == out.dtype == dtype
    plain = roi_align(features.detach(), boxes, 2, pool_mode=pool_mode)
    assert_bitwise_equal(out.detach(), plain)
    out.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32 and conv.weight.grad.any()


def test_the_gradient_has_the_memory_order_of_the_features(device):
    input, boxes, grad = tensors(device)
    last = input.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    for pool_mode in ("avg", "max"):
        plain, other = (pooled(x, boxes, grad, pool_mode) for x in (input, last))
        assert_bitwise_equal(other, plain)
        assert plain[1].is_contiguous()
        assert other[1].is_contiguous(memory_format=torch.channels_last)


def test_inputs_are_not_changed(device):
    input, boxes, grad = tensors(device)
    before = copy.deepcopy([input.detach(), boxes, grad])
    for pool_mode in ("avg", "max"):
        pooled(input, boxes, grad, pool_mode)
    assert_bitwise_equal([input.detach(), boxes, grad], before)


@pytest.mark.cuda
@needs_cuda_kernels
@each_pool
@each_dtype
def test_a_cuda_graph_replays_the_same_bits(pool_mode, dtype):
    input, boxes, grad = tensors("cuda", dtype)
    expected = pooled(input, boxes, grad, pool_mode)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pooled(input, boxes, grad, pool_mode)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = pooled(input, boxes, grad, pool_mode)
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7)
        graph.replay()
        assert_bitwise_equal(got, expected)
    # Other values, other boxes: nothing of the capture is baked in.
    with torch.no_grad():
        input.mul_(2)
        grad.mul_(3)
        boxes[:, 1:].mul_(0.5)
    graph.replay()
    assert_bitwise_equal(got, pooled(input, boxes, grad, pool_mode))


@pytest.mark.cuda
@each_pool
def test_any_stream_gives_the_same_bits(pool_mode):
    """The inputs are produced on the stream, late: a launch elsewhere would read zeros."""
    input, boxes, grad = tensors("cuda")
    expected = pooled(input, boxes, grad, pool_mode)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(input)
        torch.cuda._sleep(20_000_000)
        late.copy_(input.detach())
        got = pooled(late.requires_grad_(), boxes, grad, pool_mode)
    stream.synchronize()
    assert_bitwise_equal(got, expected)


@pytest.mark.cuda
def test_another_current_device_does_not_matter():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    input, boxes, grad = tensors("cuda:1")
    expected = pooled(
        *(x.detach().cpu().requires_grad_(i == 0) for i, x in enumerate((input, boxes, grad))),
        "avg",
    )
    got = pooled(input, boxes, grad, "avg")
    assert got[1].device == torch.device("cuda:1")
    assert_bitwise_equal([x.cpu() for x in got], list(expected))


@pytest.mark.cuda
@needs_cuda_kernels
@each_pool
def test_nothing_waits_for_the_device(pool_mode):
    input, boxes, grad = tensors("cuda")
    pooled(input, boxes, grad, pool_mode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pooled(input, boxes, grad, pool_mode)
        parts = [boxes[:3, 1:], boxes[3:, 1:]]
        pooled(input, parts, grad, pool_mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_pool
def test_the_module_is_the_function(device, pool_mode):
    input, boxes, _ = tensors(device)
    module = RoIAlign((2, 3), 0.5, 2, True, pool_mode)
    expected = roi_align(input, boxes, (2, 3), 0.5, 2, True, pool_mode)
    assert_bitwise_equal(module(input, boxes), expected)
    assert_bitwise_equal(copy.deepcopy(module)(input, boxes), expected)
    assert not list(module.parameters()) and not module.state_dict()


def test_the_module_prints_its_arguments():
    assert repr(RoIAlign(7, 0.25, 2, True)) == (
        "RoIAlign(output_size=7, spatial_scale=0.25, sampling_ratio=2, aligned=True, "
        "pool_mode='avg')"
    )
    assert repr(RoIAlign((7, 3), pool_mode="max")) == (
        "RoIAlign(output_size=(7, 3), spatial_scale=1.0, sampling_ratio=-1, aligned=False, "
        "pool_mode='max')"
    )


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::roi_align", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    case = Case((2, 1, 4, 4), 1, (2, 2), boxes=stack_boxes((0, 0, 0, 2, 2)))
    input, boxes, grad = case.make_input(), case.make_boxes(), case.make_grad()
    bad_forward = [
        (case, input[0], boxes),
        (case, input, boxes.double()),
        (case, input.double(), boxes),
        (case, input.long(), boxes),
        (case, input, boxes[:, :4]),
        (case, input, boxes[0]),
        (case._replace(bins=(0, 2)), input, boxes),
        (case._replace(bins=(2, 1 << 16)), input, boxes),
        (case._replace(ratio=1 << 20), input, boxes),
    ]
    for args in bad_forward:
        with pytest.raises(RuntimeError, match="roi_align"):
            forward(*args)
    bad_backward = [
        (case, grad[:, :, :1], boxes),
        (case, grad, boxes.repeat(2, 1)),
        (case, grad.double(), boxes),
        (case._replace(shape=(2, 2, 4, 4)), grad, boxes),
        (case._replace(shape=(2, 1, -4, 4)), grad, boxes),
        (case._replace(bins=(1, 4)), grad, boxes),
    ]
    for args in bad_backward:
        with pytest.raises(RuntimeError, match="roi_align"):
            backward(*args)
