"""roi_pool, ps_roi_align, ps_roi_pool as operators: derivatives, compilers, autocast, graphs."""

import copy

import pytest
import torch
from pool_cases import (
    EXACT_ROI_POOL,
    OPS,
    PS_ROI_ALIGN,
    PS_ROI_POOL,
    ROI_POOL,
    each_name,
    each_op,
)
from roi_cases import Case, each_dtype, needs_cuda_kernels, stack_boxes, values

import truncdet
from truncdet import PSRoIAlign, PSRoIPool, RoIPool, TruncdetError
from truncdet.testing import assert_bitwise_equal

CASE = Case((2, 3, 7, 9), 6, (2, 3), 0.5)


def tensors(op, device, dtype=torch.float32):
    input, boxes, grad = op.make(CASE, dtype, device)
    return input.requires_grad_(), boxes, grad


@each_op
@pytest.mark.parametrize("ratio", [-1, 2])
def test_the_gradient_is_the_derivative_and_repeats(device, op, ratio):
    case = Case((1, 2, 7, 8), 4, (2, 2), 0.5, ratio)
    input, boxes, _ = op.make(case, torch.float64, device)
    if op is PS_ROI_POOL:
        # Away from the last row and column, which its forward alone leaves out.
        boxes[:, 1:] = boxes[:, 1:].clamp(max=10)
    input.requires_grad_()

    def call(x):
        return op.call(case, x, boxes)

    assert call(input).count_nonzero() > 4
    assert torch.autograd.gradcheck(call, (input,), nondet_tol=0)
    assert torch.autograd.gradcheck(call, (input,), nondet_tol=0, fast_mode=True)


@each_name
def test_a_second_derivative_raises(device, op):
    input, boxes, grad = tensors(op, device)
    out = op.call(CASE, input, boxes)
    (first,) = torch.autograd.grad(out, input, grad.requires_grad_(), create_graph=True)
    text = rf"^{op.name}: a second derivative is not implemented$"
    with pytest.raises(TruncdetError, match=text):
        first.sum().backward()


@each_op
@each_dtype
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(device, op, dtype, channels_last):
    input, boxes, grad = op.make(CASE, dtype, device)
    if channels_last:
        input = input.contiguous(memory_format=torch.channels_last)
    rest = op.rest(CASE)
    torch.library.opcheck(getattr(OPS, op.name).default, (input.requires_grad_(), boxes, *rest))
    chosen = [x.detach() for x in op.forward(CASE, input, boxes)[1:]]
    args = (grad, *chosen, boxes, *op.shape(CASE), *rest, channels_last)
    torch.library.opcheck(getattr(OPS, f"{op.name}_backward").default, args)


@each_name
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_in_one_graph(device, op, dynamic):
    input, boxes, grad = op.make(CASE, device=device)
    compiled = torch.compile(op.public, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = op.gradient(CASE, input, boxes, grad)
    assert_bitwise_equal(op.gradient(CASE, input, boxes, grad, compiled), expected)
    fewer = op.gradient(CASE, input, boxes[:4], grad[:4], compiled)
    assert_bitwise_equal(fewer[0], expected[0][:4])
    parts = [boxes[boxes[:, 0] == i][:, 1:] for i in range(2)]
    again = op.call(CASE, input, parts)
    assert_bitwise_equal(op.call(CASE, input, parts, compiled), again)
    torch._dynamo.reset()


@each_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_keeps_coordinates_in_float32(device, op, dtype):
    """Features of a convolution come in the low type; boxes do not, and gradients reach it."""
    channels = op.shape(CASE)[1]
    conv = torch.nn.Conv2d(3, channels, 1).to(device)
    boxes = CASE.make_boxes(device=device)
    image = values((2, 3, 7, 9), 5, device=device)
    with torch.autocast(device.type, dtype=dtype):
        features = conv(image)
        out = op.call(CASE, features, boxes)
    assert features.dtype == out.dtype == dtype
    assert_bitwise_equal(out.detach(), op.call(CASE, features.detach(), boxes))
    out.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32 and conv.weight.grad.any()


@each_op
def test_the_gradient_has_the_memory_order_of_the_features(device, op):
    input, boxes, grad = op.make(CASE, device=device)
    plain = op.gradient(CASE, input, boxes, grad)
    last = input.contiguous(memory_format=torch.channels_last)
    other = op.gradient(CASE, last, boxes, grad)
    assert_bitwise_equal(other, plain)
    assert plain[1].is_contiguous()
    assert other[1].is_contiguous(memory_format=torch.channels_last)


@each_op
def test_inputs_are_not_changed(device, op):
    given = op.make(CASE, device=device)
    before = copy.deepcopy(given)
    op.gradient(CASE, *given)
    assert_bitwise_equal(given, before)


@pytest.mark.cuda
@needs_cuda_kernels
@each_op
@each_dtype
def test_a_cuda_graph_replays_the_same_bits(op, dtype):
    input, boxes, grad = tensors(op, "cuda", dtype)

    def run():
        out = op.call(CASE, input, boxes)
        return out.detach(), torch.autograd.grad(out, input, grad)[0]

    expected = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7)
        graph.replay()
        assert_bitwise_equal(got, expected)
    # Other values, other boxes: nothing of the capture is baked in.
    with torch.no_grad():
        input.mul_(-2)
        grad.mul_(3)
        boxes[:, 1:].mul_(0.5)
    graph.replay()
    assert_bitwise_equal(got, run())


@pytest.mark.cuda
@each_name
def test_any_stream_gives_the_same_bits(op):
    """The inputs are produced on the stream, late: a launch elsewhere would read zeros."""
    input, boxes, grad = op.make(CASE, device="cuda")
    expected = op.gradient(CASE, input, boxes, grad)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(input)
        torch.cuda._sleep(20_000_000)
        late.copy_(input)
        got = op.gradient(CASE, late, boxes, grad)
    stream.synchronize()
    assert_bitwise_equal(got, expected)


@pytest.mark.cuda
@needs_cuda_kernels
@each_op
def test_nothing_waits_for_the_device(op):
    input, boxes, grad = op.make(CASE, device="cuda")
    op.gradient(CASE, input, boxes, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.gradient(CASE, input, boxes, grad)
        op.call(CASE, input, [boxes[:3, 1:], boxes[3:, 1:]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@needs_cuda_kernels
@each_op
def test_a_backward_allocates_little_beside_its_output(op):
    case = Case((2, 2 if op.sensitive else 64, 100, 168), 600, (7, 7), 0.25)
    input, boxes, grad = op.make(case, device="cuda")
    chosen = op.forward(case, input, boxes)[1:]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = op.backward(case, grad, chosen, boxes)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert beyond <= 256 * case.rois + (2 << 20)


def test_the_modules_are_the_functions(device):
    input, boxes, _ = ROI_POOL.make(CASE, device=device)
    for module, expected in (
        (RoIPool((2, 3), 0.5), ROI_POOL.call(CASE, input, boxes)),
        (RoIPool((2, 3), 0.5, rounded=False), EXACT_ROI_POOL.call(CASE, input, boxes)),
    ):
        assert_bitwise_equal(module(input, boxes), expected)
        assert_bitwise_equal(copy.deepcopy(module)(input, boxes), expected)
        assert not list(module.parameters()) and not module.state_dict()
    input, boxes, _ = PS_ROI_ALIGN.make(CASE, device=device)
    expected = truncdet.ps_roi_align(input, boxes, (2, 3), 0.5, 2)
    assert_bitwise_equal(PSRoIAlign((2, 3), 0.5, 2)(input, boxes), expected)
    expected = PS_ROI_POOL.call(CASE, input, boxes)
    assert_bitwise_equal(PSRoIPool((2, 3), 0.5)(input, boxes), expected)


def test_the_modules_print_their_arguments():
    assert repr(RoIPool(7, 0.25)) == "RoIPool(output_size=7, spatial_scale=0.25)"
    assert repr(RoIPool((7, 3), rounded=False)) == (
        "RoIPool(output_size=(7, 3), spatial_scale=1.0, rounded=False)"
    )
    assert repr(PSRoIAlign(7, 0.25, 2)) == (
        "PSRoIAlign(output_size=7, spatial_scale=0.25, sampling_ratio=2)"
    )
    assert repr(PSRoIPool(7, 0.25)) == "PSRoIPool(output_size=7, spatial_scale=0.25)"


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::roi_pool", "CPU"),
    reason="checks of the compiled kernels",
)
@each_op
def test_kernels_check_what_python_has_checked(op):
    case = Case((2, 1, 4, 4), 1, (2, 2), boxes=stack_boxes((0, 0, 0, 2, 2)))
    input, boxes, grad = op.make(case)
    chosen = op.forward(case, input, boxes)[1:]
    bad_forward = [
        (case, input[0], boxes),
        (case, input, boxes.double()),
        (case, input.double(), boxes),
        (case, input.long(), boxes),
        (case, input, boxes[:, :4]),
        (case, input, boxes[0]),
        (case._replace(bins=(0, 2)), input, boxes),
        (case._replace(bins=(2, 1 << 16)), input, boxes),
    ]
    if op.sensitive:
        bad_forward.append((case._replace(bins=(3, 2)), input, boxes))
    for args in bad_forward:
        with pytest.raises(RuntimeError, match=op.name):
            op.forward(*args)
    bad_backward = [
        (case, grad[:, :, :1], chosen, boxes),
        (case, grad, chosen, boxes.repeat(2, 1)),
        (case, grad.double(), chosen, boxes),
        (case._replace(shape=(2, 2, 4, 4)), grad, chosen, boxes),
        (case._replace(shape=(2, 1, -4, 4)), grad, chosen, boxes),
        (case._replace(bins=(1, 4)), grad, chosen, boxes),
    ]
    for x in chosen:
        bad_backward += [(case, grad, (wrong,), boxes) for wrong in (x.long(), x[:, :, :1], x[0])]
    for args in bad_backward:
        with pytest.raises(RuntimeError, match=op.name):
            op.backward(*args)
