"""deform_conv2d as it is called: autograd, layouts, autocast, compilers, wrong arguments."""

import itertools

import numpy as np
import pytest
import torch
from deform_cases import SHAPES, Deform, results
from sampling_cases import each_dtype

import truncdet
from truncdet import TruncdetError, deform_conv2d
from truncdet.testing import assert_bitwise_equal

ops = torch.ops.truncdet
SMALL = Deform(1, 4, 2, 2, 2, (3, 4), (2, 2), padding=(0, 1))


@pytest.mark.parametrize("masked", [True, False], ids=["modulated", "plain"])
def test_gradcheck(device, masked):
    shape = SMALL._replace(masked=masked)
    leaves = [None if x is None else x.requires_grad_() for x in shape.call(torch.float64, device)]

    def call(input, offset, weight, bias, mask):
        return deform_conv2d(input, offset, weight, bias, *shape.steps, mask)

    assert torch.autograd.gradcheck(call, leaves, nondet_tol=0)


def test_gradients_alone_and_together_have_the_same_bits(device):
    shape = SHAPES["groups"]
    case, grad = shape.call(torch.float32, device), shape.grad(torch.float32, device)
    every = results(deform_conv2d, case, grad, shape.steps)[1:]
    for chosen in itertools.chain(itertools.combinations(range(5), 1), ((0, 1), (2, 4), (1, 2, 3))):
        leaves = [x.clone().requires_grad_(i in chosen) for i, x in enumerate(case)]
        out = deform_conv2d(*leaves[:4], *shape.steps, leaves[4])
        got = torch.autograd.grad(out, [leaves[i] for i in chosen], grad)
        assert_bitwise_equal(got, [every[i] for i in chosen])
    assert not deform_conv2d(*case[:4], *shape.steps, case[4]).requires_grad


@each_dtype
@pytest.mark.parametrize("name", ["groups", "plain", "one tap"])
def test_memory_layouts_change_nothing(device, dtype, name):
    shape = SHAPES[name]
    case, grad = shape.call(dtype, device), shape.grad(dtype, device)
    expected = results(deform_conv2d, case, grad, shape.steps)
    grad = grad.contiguous(memory_format=torch.channels_last)
    for layout in (
        lambda x: torch.stack([x, x * 0], -1)[..., 0],
        lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 4 else x,
    ):
        other = [x if x is None else layout(x) for x in case]
        assert not other[0].is_contiguous()
        got = results(deform_conv2d, other, grad, shape.steps)
        assert_bitwise_equal(got, expected)
        assert all(x.is_contiguous() for x in (got[0], got[1], got[2]))


def test_empty_batch(device):
    for name in ("groups", "plain"):
        shape = SHAPES[name]._replace(n=0)
        case, grad = shape.call(torch.float32, device), shape.grad(torch.float32, device)
        out, *gradients = results(deform_conv2d, case, grad, shape.steps)
        assert out.shape == grad.shape
        given = [x for x in case if x is not None]
        assert [x.shape for x in gradients] == [x.shape for x in given]
        assert all((x == 0).all() for x in gradients)


def test_an_input_without_cells_is_all_padding(device):
    shape = Deform(size=(0, 5), padding=(2, 1))
    case, grad = shape.call(torch.float32, device), shape.grad(torch.float32, device)
    out, for_input, for_offset, for_weight, _, for_mask = results(
        deform_conv2d, case, grad, shape.steps
    )
    assert_bitwise_equal(out, case[3][:, None, None].expand_as(out).contiguous())
    assert for_input.shape == case[0].shape
    assert all((x == 0).all() for x in (for_offset, for_weight, for_mask))


def test_steps_may_be_ints_lists_and_numpys():
    shape = SHAPES["modulated"]
    input, offset, weight, bias, mask = shape.call(torch.float32)
    expected = deform_conv2d(input, offset, weight, bias, (1, 1), (1, 1), (1, 1), mask)
    for one in (1, [1, 1], np.int64(1), (np.int32(1), 1)):
        assert_bitwise_equal(
            deform_conv2d(input, offset, weight, bias, one, one, one, mask), expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_computes_in_float32_and_returns_inputs_type(device, dtype):
    shape = SHAPES["modulated"]
    case, grad = shape.call(dtype, device), shape.grad(dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = results(deform_conv2d, [x.to(wide) for x in case], grad.to(wide), shape.steps)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = results(deform_conv2d, case, grad, shape.steps)
    assert_bitwise_equal(got, [x.to(dtype) for x in expected])
    if dtype == torch.float16:  # as an offset that a convolution under autocast has computed
        with torch.autocast(device.type, dtype=torch.float16):
            mixed = deform_conv2d(case[0].float(), case[1], *case[2:4], *shape.steps, case[4])
        assert_bitwise_equal(mixed, expected[0])


def test_second_derivatives_are_refused(device):
    shape = SMALL
    input, offset, weight, bias, mask = shape.call(torch.float32, device)
    grad = shape.grad(torch.float32, device).requires_grad_()
    for leaf in (input, weight):
        leaf.requires_grad_()
        out = deform_conv2d(input, offset, weight, bias, *shape.steps, mask)
        (first,) = torch.autograd.grad(out, leaf, grad, create_graph=True)
        with pytest.raises(TruncdetError, match=r"^deform_conv2d: a second derivative is not im"):
            first.sum().backward()


@pytest.mark.parametrize("name", ["groups", "plain"])
def test_opcheck(device, name):
    shape = SHAPES[name]
    for dtype in (torch.float32, torch.float16):
        input, offset, weight, bias, mask = shape.call(dtype, device)
        grad = shape.grad(dtype, device)
        given = (input, weight, offset, mask)
        for wanted in ([True] * 3 + [shape.masked], [False, True, False, False], [False] * 4):
            arguments = (grad, *given, *shape.steps, wanted)
            torch.library.opcheck(ops.deform_conv2d_backward.default, arguments)
        leaves = [x if x is None else x.clone().requires_grad_() for x in (*given, bias)]
        torch.library.opcheck(ops.deform_conv2d.default, (*leaves, *shape.steps))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    compiled = torch.compile(deform_conv2d, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for name in ("groups", "plain"):
        shape = SHAPES[name]
        case, grad = shape.call(torch.float32, device), shape.grad(torch.float32, device)
        expected = results(deform_conv2d, case, grad, shape.steps)
        assert_bitwise_equal(results(compiled, case, grad, shape.steps), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    shape = Deform(2, 40, 24, 2, 2, (17, 19))
    input, offset, weight, bias, mask = shape.call(torch.float32, "cuda")
    grad = shape.grad(torch.float32, "cuda")

    def run():
        out = ops.deform_conv2d(input, weight, offset, mask, bias, *shape.steps)
        gradients = ops.deform_conv2d_backward(
            grad, input, weight, offset, mask, *shape.steps, [True] * 4
        )
        return out, *gradients

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [x.clone() for x in run()]
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = run()
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise_equal(captured, expected)


@pytest.mark.cuda
def test_extra_memory_is_the_columns_and_two_words_a_cell():
    shape = Deform(4, 64, 64, 1, 1, (64, 64))
    input, offset, weight, _, mask = shape.call(torch.float32, "cuda")
    grad = shape.grad(torch.float32, "cuda")

    def run():
        given = (grad, input, weight, offset, mask)
        return ops.deform_conv2d_backward(*given, *shape.steps, [True] * 4)

    run()  # the library of matrix products takes its workspace once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    extra -= sum(x.numel() * x.element_size() for x in result)
    columns = shape.columns_grad(torch.float32).numel() * 4
    assert extra <= columns + 16 * input.numel() + grad.numel() * 4 + (8 << 20)


def test_wrong_arguments_are_named():
    x, o, w = torch.zeros(2, 4, 6, 7), torch.zeros(2, 18, 6, 7), torch.zeros(6, 4, 3, 3)
    b, m, one = torch.zeros(6), torch.zeros(2, 9, 6, 7), (1, 1)
    right = {"input": x, "offset": o, "weight": w, "bias": b, "padding": one, "mask": m}
    deform_conv2d(**right)
    for text, error, wrong in [
        (r"input must be a Tensor, got int$", TypeError, {"input": 1}),
        (r"weight must be a Tensor, got NoneType$", TypeError, {"weight": None}),
        (
            r"offset must be float64, .* or bfloat16, got torch.int64$",
            TypeError,
            {"offset": o.long()},
        ),
        (
            r"mask must have input's dtype, torch.float32, got torch.float64$",
            TypeError,
            {"mask": m.double()},
        ),
        (r"bias must be on input's device, cpu, got meta$", ValueError, {"bias": b.to("meta")}),
        (r"input must have shape \[N, C, H, W\], got \[4, 6, 7\]$", ValueError, {"input": x[0]}),
        (
            r"weight must have shape \[O, C / groups, KH, KW\] without .*, got \[6, 4, 9\]$",
            ValueError,
            {"weight": w.flatten(2)},
        ),
        (
            r"weight must have shape \[O, .*\] with groups that divide O and C, got \[6, 3, 3, 3\] "
            r"for C = 4$",
            ValueError,
            {"weight": w[:, :3]},
        ),
        (
            r"weight must have .*, got \[5, 2, 3, 3\] for C = 4$",
            ValueError,
            {"weight": w[:5, :2]},
        ),
        (
            r"input must be as large as the kernel reaches, got \[6, 7\], which leaves no output$",
            ValueError,
            {"dilation": (1, 9)},
        ),
        (
            r"offset must have shape \[2, 18 \* G, 6, 7\] with G that divides 4, "
            r"got \[2, 9, 6, 7\]$",
            ValueError,
            {"offset": o[:, :9]},
        ),
        (
            r"offset must have shape .*, got \[2, 54, 6, 7\]$",
            ValueError,
            {"offset": o.repeat(1, 3, 1, 1)},
        ),
        (r"offset must have shape .*, got \[2, 18, 6, 6\]$", ValueError, {"offset": o[..., 1:]}),
        (
            r"mask must have shape \[2, 9, 6, 7\], got \[2, 18, 6, 7\]$",
            ValueError,
            {"mask": torch.cat([m, m], 1)},
        ),
        (r"bias must have shape \[6\], got \[4\]$", ValueError, {"bias": b[:4]}),
        (r"stride must be at least 1, got 0 and 1$", ValueError, {"stride": (0, 1)}),
        (r"padding must be at least 0, got 1 and -1$", ValueError, {"padding": (1, -1)}),
        (
            r"dilation must be an int or a pair, got \[1, 1, 1\]$",
            ValueError,
            {"dilation": (1,) * 3},
        ),
        (r"stride must be an int or a pair of them, got float$", TypeError, {"stride": 1.5}),
        (r"padding must be an int or a pair of them, got str$", TypeError, {"padding": ("a", 1)}),
    ]:
        with pytest.raises(error, match="^deform_conv2d: " + text):
            deform_conv2d(**{**right, **wrong})


def test_is_public():
    assert truncdet.deform_conv2d is deform_conv2d and truncdet.DeformConv2d
