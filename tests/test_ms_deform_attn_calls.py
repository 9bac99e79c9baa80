"""ms_deform_attn as it is called: autograd, layouts, compilers, empty and wrong arguments."""

import pytest
import torch
from sampling_cases import attention_grad, each_dtype, make_attention

from truncdet import TruncdetError, _sticky, ms_deform_attn
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.truncdet
compiled_kernel = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::ms_deform_attn", "CPU"),
    reason="checks of the compiled kernels",
)


def results(op, case, grad):
    """Output and the three gradients."""
    value, shapes, starts, locations, weights = case
    leaves = [x.detach().requires_grad_() for x in (value, locations, weights)]
    out = op(leaves[0], shapes, starts, *leaves[1:])
    return out, *torch.autograd.grad(out, leaves, grad)


def test_gradcheck(device):
    value, shapes, starts, *rest = make_attention(torch.float64, device, n=1, queries=2)
    leaves = [x.requires_grad_() for x in (value, *rest)]

    def call(v, where, weights):
        return ms_deform_attn(v, shapes, starts, where, weights)

    assert torch.autograd.gradcheck(call, leaves, nondet_tol=0)


@each_dtype
def test_memory_layouts_and_index_types_change_nothing(device, dtype):
    case = make_attention(dtype, device, channels=5)
    grad = attention_grad(case[0], case[3])
    expected = results(ms_deform_attn, case, grad)
    strided = [torch.stack([x, x * 0], -1)[..., 0] for x in case]
    assert not any(x.is_contiguous() for x in strided)
    got = results(ms_deform_attn, strided, grad.transpose(0, 1).contiguous().transpose(0, 1))
    assert_bitwise_equal(got, expected)
    assert all(x.is_contiguous() for x in got)
    narrow = (case[0], case[1].int(), case[2].int(), *case[3:])
    assert_bitwise_equal(results(ms_deform_attn, narrow, grad), expected)
    assert_bitwise_equal(ms_deform_attn(*case, im2col_step=3), expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_locations_are_not_rounded_to_the_type_of_the_values(device, dtype):
    value, shapes, starts, locations, weights = make_attention(dtype, device, wide=True)
    grad = attention_grad(value, locations)
    wide = results(ms_deform_attn, (value, shapes, starts, locations, weights), grad)
    assert [x.dtype for x in wide] == [dtype, dtype, torch.float32, torch.float32]
    # One of the two in another type: both are computed with in float32 and keep their own.
    mixed = (value, shapes, starts, locations, weights.to(dtype))
    got = results(ms_deform_attn, mixed, grad)
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32, dtype]
    rounded = (value, shapes, starts, locations, weights.to(dtype).float())
    expected = results(ms_deform_attn, rounded, grad)
    assert_bitwise_equal(got[:3], expected[:3])
    assert_bitwise_equal(got[3], expected[3].to(dtype))
    narrow = (value, shapes, starts, locations.to(dtype), weights.to(dtype))
    assert not torch.equal(got[0], ms_deform_attn(*narrow))


@pytest.mark.parametrize("sizes", ["n", "queries", "channels", "points", "heads"])
def test_empty_inputs(device, sizes):
    case = make_attention(torch.float32, device, **{sizes: 0})
    grad = attention_grad(case[0], case[3])
    out, *gradients = results(ms_deform_attn, case, grad)
    assert out.shape == grad.shape and (out == 0).all()
    for x, like in zip(gradients, (case[0], *case[3:]), strict=True):
        assert x.shape == like.shape and (x == 0).all()


def test_no_cells_and_no_levels(device):
    value, shapes, starts, locations, weights = make_attention(torch.float32, device)
    grad = attention_grad(value, locations)
    for case in (
        (value[:, :0], shapes * 0, starts * 0, locations, weights),
        (value, shapes[:0], starts[:0], locations[:, :, :, :0], weights[:, :, :, :0]),
    ):
        got = results(ms_deform_attn, case, grad)
        assert all((x == 0).all() for x in got)
        assert [x.shape for x in got[1:]] == [case[0].shape, case[3].shape, case[4].shape]


def test_second_derivatives_are_refused(device):
    case = make_attention(torch.float32, device)
    leaf = case[0].requires_grad_()
    grad = attention_grad(leaf.detach(), case[3]).requires_grad_()
    (first,) = torch.autograd.grad(ms_deform_attn(*case), leaf, grad, create_graph=True)
    with pytest.raises(TruncdetError, match=r"^ms_deform_attn: a second derivative is not impl"):
        first.sum().backward()


def test_opcheck(device):
    for dtype, wide in ((torch.float32, False), (torch.float16, True), (torch.bfloat16, False)):
        case = make_attention(dtype, device, wide=wide)
        grad = attention_grad(case[0], case[3])
        torch.library.opcheck(ops.ms_deform_attn_backward.default, (grad, *case))
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in case]
        torch.library.opcheck(ops.ms_deform_attn.default, leaves)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    compiled = torch.compile(ms_deform_attn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    case = make_attention(torch.float16, device, wide=True)
    grad = attention_grad(case[0], case[3])
    assert_bitwise_equal(results(compiled, case, grad), results(ms_deform_attn, case, grad))


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    case = make_attention(torch.float32, "cuda", channels=32)
    grad = attention_grad(case[0], case[3])
    expected = (ops.ms_deform_attn(*case), *ops.ms_deform_attn_backward(grad, *case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = (ops.ms_deform_attn(*case), *ops.ms_deform_attn_backward(grad, *case))
    for _ in range(3):
        for x in got:
            x.zero_()
        graph.replay()
        assert_bitwise_equal(got, expected)


BEYOND = {
    "start": ([[4, 3], [2, 2], [1, 5]], [0, 12, 17]),
    "negative start": ([[4, 3], [2, 2], [1, 5]], [0, -1, 16]),
    "negative size": ([[4, 3], [-2, -2], [1, 5]], [0, 12, 16]),
    "product beyond 64 bits": ([[4, 3], [1 << 33, 1 << 33], [1, 5]], [0, 0, 16]),
}


@pytest.mark.parametrize("how", BEYOND)
def test_levels_beyond_the_values_raise_on_the_cpu(how):
    value, _, _, locations, weights = make_attention(torch.float32)
    levels = [torch.tensor(x) for x in BEYOND[how]]
    level = 2 if how == "start" else 1
    with pytest.raises(
        ValueError,
        match=rf"^ms_deform_attn: spatial_shapes must lie inside value's 21 cells, got \(.*\) at "
        rf"-?\d+ for level {level}$",
    ):
        ms_deform_attn(value, *levels, locations, weights)


@pytest.mark.cuda
@pytest.mark.parametrize("how", BEYOND)
def test_levels_beyond_the_values_are_left_out_and_reported_on_cuda(how):
    _sticky.check()
    value, shapes, starts, locations, weights = make_attention(torch.float32, "cuda")
    grad = attention_grad(value, locations)
    bad = [torch.tensor(x, device="cuda") for x in BEYOND[how]]
    level = 2 if how == "start" else 1
    got = ops.ms_deform_attn(value, *bad, locations, weights)
    gradients = ops.ms_deform_attn_backward(grad, value, *bad, locations, weights)
    with pytest.raises(TruncdetError, match=r"^ms_deform_attn: an index was out of range"):
        _sticky.check()
    without = shapes.clone()
    without[level] = 0
    case = (value, without, starts, locations, weights)
    assert_bitwise_equal(got, ops.ms_deform_attn(*case))
    assert_bitwise_equal(gradients[0], ops.ms_deform_attn_backward(grad, *case)[0])
    _sticky.check()


def test_wrong_arguments_are_named():
    v, shapes, starts, where, weights = make_attention(torch.float32)
    for text, error, args in [
        (r"value must be a Tensor, got int$", TypeError, (1, shapes, starts, where, weights)),
        (
            r"value must be float64, .*, got torch.int64$",
            TypeError,
            (v.long(), shapes, starts, where, weights),
        ),
        (
            r"spatial_shapes must be int64 or int32, got torch.float32$",
            TypeError,
            (v, shapes.float(), starts, where, weights),
        ),
        (
            r"level_start_index must be int64 or int32, got ",
            TypeError,
            (v, shapes, starts.half(), where, weights),
        ),
        (
            r"sampling_locations must be float64, .*, got torch.int",
            TypeError,
            (v, shapes, starts, where.int(), weights),
        ),
        (
            r"attention_weights must be float64, .*, got torch.bool",
            TypeError,
            (v, shapes, starts, where, weights > 0),
        ),
        (
            r"value must have shape \[N, S, M, D\], got \[21, 2, 3\]$",
            ValueError,
            (v[0], shapes, starts, where, weights),
        ),
        (
            r"spatial_shapes must have shape \[L, 2\], got \[3\]$",
            ValueError,
            (v, starts, starts, where, weights),
        ),
        (
            r"level_start_index must have shape \[3\], got \[2\]$",
            ValueError,
            (v, shapes, starts[:2], where, weights),
        ),
        (
            r"sampling_locations must have shape \[2, Lq, 2, 3, P, 2\], got \[2, 6, 2, 3, 2\]$",
            ValueError,
            (v, shapes, starts, weights, weights),
        ),
        (
            r"sampling_locations must have shape \[2, Lq, 2, 3, P, 2\], got \[2, 6, 1, 3, 2, 2\]$",
            ValueError,
            (v, shapes, starts, where[:, :, :1], weights),
        ),
        (
            r"attention_weights must have shape \[2, 6, 2, 3, 2\], got \[2, 6, 2, 3, 1\]$",
            ValueError,
            (v, shapes, starts, where, weights[..., :1]),
        ),
        (
            r"attention_weights must be on value's device, cpu, got meta$",
            ValueError,
            (v, shapes, starts, where, weights.to("meta")),
        ),
    ]:
        with pytest.raises(error, match="^ms_deform_attn: " + text):
            ms_deform_attn(*args)


@compiled_kernel
def test_kernels_check_what_python_has_checked():
    case = make_attention(torch.float32)
    grad = attention_grad(case[0], case[3])
    v, shapes, starts, where, weights = case
    for args in [
        (v[0], shapes, starts, where, weights),
        (v, shapes.int(), starts, where, weights),
        (v, shapes[:, :1], starts, where, weights),
        (v, shapes, starts[:2], where, weights),
        (v, shapes + 1, starts, where, weights),
        (v, shapes, starts, where[:, :2], weights),
        (v, shapes, starts, where[..., :1], weights),
        (v, shapes, starts, where.double(), weights),
        (v, shapes, starts, where.half(), weights.half()),
    ]:
        with pytest.raises(RuntimeError, match="ms_deform_attn: "):
            ops.ms_deform_attn(*args)
        with pytest.raises(RuntimeError, match="ms_deform_attn: "):
            ops.ms_deform_attn_backward(grad, *args)
    with pytest.raises(RuntimeError, match="ms_deform_attn: grad must have"):
        ops.ms_deform_attn_backward(grad[:, :2], *case)
