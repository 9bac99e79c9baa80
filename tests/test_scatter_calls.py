"""scatter_add and index_add as operators: shapes, gradients, compilers, errors."""

import pytest
import torch
from scatter_cases import CANCELLING, each_dtype, each_exact, random_floats, random_index

from truncdet import TruncdetError, _sticky, index_add, scatter_add
from truncdet._scatter import INDEX_ADD
from truncdet.testing import assert_bitwise_equal


@pytest.mark.parametrize(
    "sizes",
    [
        ((), (), ()),
        ((), (2,), (3,)),
        ((3,), (), ()),
        ((3,), (), (2,)),
        ((3,), (0,), (2,)),
        ((3,), (0, 5), (2,)),
        ((0,), (0,), (0,)),
        ((3, 0), (4, 0), (4, 0)),
        ((3, 4), (2, 2), (5, 3)),
        ((3, 4, 5), (7, 1, 2), (7, 2, 3)),
    ],
    ids=str,
)
def test_scatter_add_takes_the_shapes_torch_takes(device, sizes):
    input, src = (random_floats(s, torch.float64, device, 0) for s in (sizes[0], sizes[2]))
    index = random_index(sizes[1], max([1, *sizes[0][:1]]), device)
    got = scatter_add(input, 0, index, src)
    torch.testing.assert_close(got, torch.scatter_add(input, 0, index, src))
    assert got.is_contiguous()
    assert got.data_ptr() != input.data_ptr() or input.numel() == 0


@pytest.mark.parametrize(
    "sizes",
    [
        ((), (1,), ()),
        ((), (), ()),
        ((3,), (), (1,)),
        ((3, 2), (0,), (0, 2)),
        ((3, 0), (4,), (4, 0)),
    ],
    ids=str,
)
def test_index_add_takes_the_shapes_torch_takes(device, sizes):
    input, source = (random_floats(s, torch.float64, device, 0) for s in (sizes[0], sizes[2]))
    index = random_index(sizes[1], max([1, *sizes[0][:1]]), device)
    got = index_add(input, 0, index, source)
    torch.testing.assert_close(got, torch.index_add(input, 0, index, source))


@each_dtype
def test_layout_does_not_matter(device, dtype):
    input = random_floats((6, 4), dtype, device).t()
    src = random_floats((1, 6), dtype, device, seed=3)
    index = random_index((9, 6), 4, device)
    strided = torch.stack([index, index], -1)[..., 0]
    expected = scatter_add(input.contiguous(), 0, index, src.expand(9, 6).contiguous())
    assert_bitwise_equal(scatter_add(input, 0, strided, src.expand(9, 6)), expected)
    column = index[:, :1].contiguous()
    wide = scatter_add(input, 0, column.expand(9, 6), src.expand(9, 6))
    assert_bitwise_equal(wide, index_add(input, 0, column[:, 0], src.expand(9, 6)))
    assert_bitwise_equal(wide, scatter_add(input, 0, column.repeat(1, 6), src.expand(9, 6)))


def test_only_the_elements_that_index_uses_set_the_scale(device):
    src = torch.tensor([1.0, 2.0**-70, torch.inf, 1e30], device=device)
    index = torch.tensor([0, 0], device=device)
    expected = scatter_add(torch.zeros(1, device=device), 0, index, src[:2].clone())
    assert_bitwise_equal(scatter_add(torch.zeros(1, device=device), 0, index, src), expected)


def gradient_case(device):
    input = random_floats((4, 3), torch.float64, device, 0).requires_grad_()
    src = random_floats((6, 3), torch.float64, device, 0, seed=2).requires_grad_()
    return input, random_index((5, 2), 4, device), random_index((6,), 4, device), src


@each_exact
def test_gradients_of_both_orders(device, exact):
    input, index, vector, src = gradient_case(device)

    def scatter(x, y):
        return scatter_add(x, 0, index, y, exact=exact)

    def add(x, y):
        return index_add(x, -2, vector, y, exact=exact)

    for op in (scatter, add):
        assert torch.autograd.gradcheck(op, (input, src), nondet_tol=0)
        squared = (lambda op: lambda x, y: op(x, y) ** 2)(op)
        assert torch.autograd.gradgradcheck(squared, (input, src), nondet_tol=0)


def test_gradients_of_scalars_and_of_nothing(device):
    for index_shape, src_shape in (((), ()), ((), (2,)), ((2,), (3,)), ((0,), (3,))):
        src = random_floats(src_shape, torch.float64, device, 0).requires_grad_()
        index = random_index(index_shape, 1, device)
        scatter_add(src.new_ones(()), 0, index, src).backward()
        expected = torch.zeros_like(src).reshape(-1)
        expected[: index.numel()] = 1
        assert_bitwise_equal(src.grad, expected.reshape(src_shape))


def test_second_derivatives_do_not_depend_on_the_order():
    """The gather of the backward is differentiated by fixed-point sums, not by float atomics."""
    index = torch.zeros(300, dtype=torch.int64)
    values = torch.tensor(CANCELLING * 50)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    seen = []
    for weights in (values, values[order]):
        grad = torch.ones(1, requires_grad=True)
        source = torch.zeros(300, requires_grad=True)
        out = index_add(torch.zeros(1), 0, index, source)
        (picked,) = torch.autograd.grad(out, source, grad, create_graph=True)
        seen.append(torch.autograd.grad((picked * weights).sum(), grad)[0])
    assert_bitwise_equal(seen[1], seen[0])
    assert_bitwise_equal(seen[0], index_add(torch.zeros(1), 0, index, values))


def test_opcheck(device):
    input, index, vector, src = gradient_case(device)
    half = [x.detach().half() for x in (input, src)]
    ops = torch.ops.truncdet
    for exact in (False, True):
        torch.library.opcheck(ops.scatter_add.default, (input, 0, index, src, exact))
        torch.library.opcheck(ops.scatter_add.default, (half[0], 1, index[:4] % 3, half[1], exact))
        torch.library.opcheck(ops.index_add.default, (input, 0, vector, src, exact))
        torch.library.opcheck(ops._gather.default, (input, 0, index, exact))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(device, dynamic):
    input, index, vector, src = gradient_case(device)
    for op, where in ((scatter_add, index), (index_add, vector)):
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        results = []
        for f in (op, compiled):
            out = f(input, 0, where, src)
            results.append((out, *torch.autograd.grad((out * out).sum(), (input, src))))
        assert_bitwise_equal(results[1], results[0])


@pytest.mark.cuda
def test_cuda_graph_replays_the_same_bits():
    src = random_floats((5000, 4), torch.float32, "cuda")
    index = random_index((5000,), 9, "cuda")
    input = torch.zeros(9, 4, device="cuda")
    expected = index_add(input, 0, index, src)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_add(input, 0, index, src)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_out_of_range_raises_on_the_cpu(dtype):
    x = torch.zeros(5)
    index = torch.tensor([0, 1, 2, 7], dtype=dtype)
    with pytest.raises(
        ValueError, match=r"^scatter_add: index must be in \[0, 5\), got 7 at position 3$"
    ):
        scatter_add(x, 0, index, torch.ones(4))
    with pytest.raises(
        ValueError, match=r"^index_add: index must be in \[0, 5\), got -1 at position 1$"
    ):
        index_add(x, 0, torch.tensor([4, -1], dtype=dtype), torch.ones(2))
    plane = torch.tensor([[0, 1], [5, 0]], dtype=dtype)
    with pytest.raises(ValueError, match=r"in \[0, 5\), got 5 at position \(1, 0\)$"):
        scatter_add(torch.zeros(2, 5), 1, plane, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"in \[0, 0\), got 0 at position 0$"):
        scatter_add(torch.zeros(0), 0, torch.tensor([0], dtype=dtype), torch.ones(1))
    assert torch.equal(x, torch.zeros(5))


@pytest.mark.cuda
@pytest.mark.parametrize("op", [scatter_add, index_add])
def test_index_out_of_range_is_dropped_and_reported_on_cuda(op):
    _sticky.check()
    index = torch.tensor([0, 7, -1, 1], device="cuda")
    src = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda", requires_grad=True)
    out = op(torch.zeros(2, device="cuda"), 0, index, src)
    assert out.tolist() == [1.0, 4.0]
    with pytest.raises(TruncdetError, match=f"^{op.__name__}: an index was out of range"):
        _sticky.check()
    _sticky.check()  # said once
    out.sum().backward()
    assert src.grad.tolist() == [1.0, 0.0, 0.0, 1.0]
    _sticky.check()


def test_wrong_arguments_are_named():
    x, i, s = torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4)
    v = i[:, 0]
    scatter, index = "^scatter_add: ", "^index_add: "
    for text, error, op, args in [
        (
            scatter + r"input must be float64, .* or bfloat16, got torch.int64$",
            TypeError,
            scatter_add,
            (x.long(), 0, i, s),
        ),
        (
            scatter + r"src must have input's dtype, torch.float32, got torch.float16$",
            TypeError,
            scatter_add,
            (x, 0, i, s.half()),
        ),
        (
            index + r"source must have input's dtype, torch.float32, got",
            TypeError,
            index_add,
            (x, 0, v, s.half()),
        ),
        (
            scatter + r"index must be int64 or int32, got torch.float32$",
            TypeError,
            scatter_add,
            (x, 0, i.float(), s),
        ),
        (scatter + r"dim must be in \[-2, 1\], got 2$", ValueError, scatter_add, (x, 2, i, s)),
        (index + r"dim must be in \[-2, 1\], got -3$", ValueError, index_add, (x, -3, v, s)),
        (
            scatter + r"index must have input's number of dimensions, 2, got 1$",
            ValueError,
            scatter_add,
            (x, 0, v, s),
        ),
        (
            scatter + r"src must have input's number of dimensions, 2, got 1$",
            ValueError,
            scatter_add,
            (x, 0, i, s[0]),
        ),
        (
            scatter + r"index must be at most as large as src, 1 in dimension 0, got 2$",
            ValueError,
            scatter_add,
            (x, 0, i, s[:1]),
        ),
        (
            scatter + r"index must be at most as large as input, 3 in dimension 1, got 4$",
            ValueError,
            scatter_add,
            (x[:, :3], 0, i, s),
        ),
        (index + r"index must be a vector, got 2 dimensions$", ValueError, index_add, (x, 0, i, s)),
        (
            index + r"source must have input's shape .*, \[2, 4\], got \[2, 3\]$",
            ValueError,
            index_add,
            (x, 0, v, s[:, :3]),
        ),
        (
            index + r"source must have input's shape .*, \[2, 4\], got \[1, 4\]$",
            ValueError,
            index_add,
            (x, 0, v, s[:1]),
        ),
        (
            scatter + r"index must be on input's device, cpu, got meta$",
            ValueError,
            scatter_add,
            (x, 0, i.to("meta"), s),
        ),
        (
            index + r"source must be on input's device, cpu, got meta$",
            ValueError,
            index_add,
            (x, 0, v, s.to("meta")),
        ),
    ]:
        with pytest.raises(error, match=text):
            op(*args)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("truncdet::_accumulate", "CPU"),
    reason="checks of the compiled kernels",
)
def test_kernels_check_what_python_has_checked():
    accumulate = torch.ops.truncdet._accumulate
    x, i, s = torch.zeros(1, 3, 1), torch.zeros(1, 2, 1, dtype=torch.int64), torch.ones(1, 2, 1)
    for args in [
        (x[0], i, s),
        (x, i.int(), s),
        (x, i, s.double()),
        (x, i, s[:, :1]),
        (x, i + 3, s),
        (x, i - 1, s),
    ]:
        with pytest.raises(RuntimeError, match="_accumulate: "):
            accumulate(*args, False, INDEX_ADD)
