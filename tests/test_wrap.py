"""wrap: few bits in, double inside, the caller's dtype out, rounded gradients back."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import truncdet
from truncdet import truncate, wrap
from truncdet.testing import assert_bitwise_equal

Pair = namedtuple("Pair", "left right")


def spy(*returned):
    """A black box that remembers what it was called with."""

    def box(*args, **kwargs):
        box.args, box.kwargs = args, kwargs
        return returned[0] if returned else args[0] * 3

    return box


def third(*shape, device="cpu", dtype=torch.float32):
    return (torch.ones(shape, dtype=torch.float64) / 3).to(dtype).to(device)


def test_only_selected_arguments_are_rounded_and_all_are_widened(device):
    box = spy()
    x, rois, index = third(4, device=device), third(2, device=device), torch.tensor([3])
    nested = {"a": [x, (index, "text")], "b": Pair(x, None)}
    y = wrap(box)(x, rois, index, nested, scale=0.5, boxes=rois)
    assert y.dtype == torch.float32
    assert_bitwise_equal(box.args[0], truncate(x).double())
    assert not torch.equal(box.args[0], x.double())
    assert_bitwise_equal(box.args[1], rois.double())  # boxes are never rounded
    assert box.args[2] is index
    assert_bitwise_equal(box.args[3]["a"][0], x.double())
    assert box.args[3]["a"][1] == (index, "text") and isinstance(box.args[3]["b"], Pair)
    assert_bitwise_equal(box.args[3]["b"].left, x.double())
    assert box.kwargs["scale"] == 0.5
    assert_bitwise_equal(box.kwargs["boxes"], rois.double())
    assert nested["a"][0] is x  # the caller's containers are left alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_outputs_come_back_in_the_dtype_of_the_first_rounded_argument(dtype, device):
    x = third(3, device=device, dtype=dtype)
    rois = third(2, device=device)
    outputs = OrderedDict(a=[x.double(), torch.tensor(3)], b=Pair(x.double(), "text"))
    result = wrap(spy(outputs), bits=None)(x, rois)
    assert isinstance(result, OrderedDict) and isinstance(result["b"], Pair)
    assert_bitwise_equal(result, OrderedDict(a=[x, torch.tensor(3)], b=Pair(x, "text")))
    assert wrap(spy(), truncate_args=(1,))(x, rois).dtype == torch.float32


@pytest.mark.parametrize("grad_bits", [11, 4, None])
def test_the_gradient_is_rounded_once_from_double(grad_bits, device):
    x = third(5, device=device).requires_grad_()
    factor = torch.tensor([1 / 3, 1 + 2.0**-11 + 2.0**-40, 1e-40, 3e38, 1.0]).double().to(device)
    factor[1] = 1 + 2.0**-11 + 2.0**-40  # above the midpoint, but not any more in float32
    y = wrap(lambda t: t * factor, grad_bits=grad_bits)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = factor if grad_bits is None else truncate(factor, grad_bits)
    assert_bitwise_equal(grad, expected.float())
    if grad_bits == 11:
        assert grad[1] == 1 + 2.0**-10
    assert_bitwise_equal(y, (truncate(x).double() * factor).float())


def test_every_gradient_that_leaves_is_rounded(device):
    x, w = third(3, device=device).requires_grad_(), third(3, device=device).requires_grad_()
    y = wrap(lambda a, b: a * b, grad_bits=5)(x, w)
    grads = torch.autograd.grad(y.sum(), (x, w))
    assert_bitwise_equal(grads[0], truncate(w.double(), 5).float())
    assert_bitwise_equal(grads[1], truncate(truncate(x).double(), 5).float())


def test_compute_dtype_is_the_callers_choice(device):
    box = spy()
    y = wrap(box, compute_dtype=torch.float32)(third(2, device=device).half())
    assert box.args[0].dtype == torch.float32 and y.dtype == torch.float16


@pytest.mark.parametrize(
    "selected, call, rounded",
    [
        ((1,), lambda f, x: f(x, x, x), "b"),
        (("b",), lambda f, x: f(x, x, x), "b"),
        (("b", 0), lambda f, x: f(x, b=x, c=x), "ab"),
        ((1, "c"), lambda f, x: f(x, c=x, b=x), "bc"),
        (("a", "c"), lambda f, x: f(x, x), "a"),  # c keeps its default
        ((0,), lambda f, x: f(b=x, a=x, c=x), "a"),
    ],
)
def test_arguments_are_selected_by_position_and_by_name(selected, call, rounded):
    seen = {}

    def box(a, b, c=None):
        seen.update(a=a, b=b, c=c)
        return a

    x = third(2)
    call(wrap(box, truncate_args=selected), x)
    for name, value in seen.items():
        if value is not None:
            assert_bitwise_equal(value, truncate(x).double() if name in rounded else x.double())


def test_nested_tensors_of_a_selected_argument_are_all_rounded():
    box = spy(third(1).double())
    x = third(2)
    wrap(box)([x, {"a": x}])
    assert_bitwise_equal(box.args[0], [truncate(x).double(), {"a": truncate(x).double()}])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_literal_casts_follow_the_published_recipe(dtype, device):
    box = spy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = wrap(box, bits=dtype, grad_bits=dtype)
    x = torch.tensor([1 / 3, 70000.0, 1e-8], device=device, requires_grad=True)
    g = torch.tensor([1 / 3, 1e-8, 1e-6], device=device)
    y = f(x)
    assert_bitwise_equal(box.args[0], x.to(dtype).double())
    recipe = x.to(dtype).double() * 3
    assert_bitwise_equal(y, recipe.float())
    expected = torch.autograd.grad(recipe, x, g.double())[0]
    assert_bitwise_equal(torch.autograd.grad(y, x, g)[0], expected)


def test_a_literal_float16_cast_warns_once():
    text = r"literal float16 cast turns gradients of at most 2\^-25 .* overflows above 65504"
    with pytest.warns(UserWarning, match=text) as record:
        f = wrap(torch.sin, bits=11, grad_bits=torch.float16)
    assert len(record) == 1 and record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.ones(2, requires_grad=True)).sum().backward()
        wrap(torch.sin, bits=torch.bfloat16, grad_bits=torch.bfloat16)


def test_double_backward_passes_straight_through():
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(wrap(lambda t: t**3)(x).sum(), x, create_graph=True)
    assert grad.tolist() == [6.75, 12.0]
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [9.0, -12.0]


def test_autocast_is_off_inside():
    seen = []

    def box(t):
        seen.append(torch.is_autocast_enabled("cpu"))
        return t @ t

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = wrap(box)(third(4, 4))
        half = wrap(box)(third(4, 4).bfloat16())
    assert seen == [False, False] and y.dtype == torch.float32 and half.dtype == torch.bfloat16
    assert_bitwise_equal(y, wrap(box)(third(4, 4)))


def test_a_wrapped_function_compiles_in_one_graph_with_the_same_bits(device):
    f = wrap(lambda t, index: t.index_select(0, index) * 2)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, device=device, requires_grad=True)
    index = torch.tensor([0, 3, 3, 7], device=device)
    assert_bitwise_equal(compiled(x, index), f(x, index))
    g = torch.randn(4, device=device)
    grads = [torch.autograd.grad(h(x, index), x, g)[0] for h in (f, compiled)]
    assert_bitwise_equal(*grads)


def test_functions_keep_their_name_and_modes_of_grad():
    def box(t):
        """Text."""
        return t

    assert wrap(box).__name__ == "box" and wrap(box).__doc__ == "Text."
    with torch.no_grad():
        assert not wrap(box)(torch.ones(1, requires_grad=True)).requires_grad
    with torch.inference_mode():
        assert wrap(box)(torch.ones(1)).is_inference()


class Box(nn.Module):
    """Parameters, a buffer that is updated, tied weights, a child and an attribute."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)
        self.tied = self.conv
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.output_size = 7
        self.seen = []

    def forward(self, x, shift=0.0):
        self.seen.append((x.dtype, self.conv.weight.dtype, self.norm.running_mean.dtype))
        return self.norm(self.tied(x)) + shift


def make_box(device="cpu"):
    torch.manual_seed(0)
    return Box().to(device)


def test_a_float32_module_runs_in_double_and_keeps_its_parameters(device):
    box, x = make_box(device), torch.randn(2, 2, 3, 3, device=device)
    f = wrap(box)
    y = f(x)
    assert box.seen == [(torch.float64,) * 3] and y.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in box.parameters())
    reference = make_box(device).double()
    assert_bitwise_equal(y, reference(truncate(x).double()).float())
    assert not box.conv.weight.grad_fn and box.norm.running_mean.dtype == torch.float32
    assert box.tied.weight is box.conv.weight


def test_tied_parameters_stay_one_and_are_put_back(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)
            self.right.weight = self.left.weight
            self.again = self.twice = self.left.weight
            self.seen = []

        def forward(self, x):
            self.seen.append((self.left.weight, self.right.weight, self.twice, self.again))
            return self.right(self.left(x))

    box = Tied().to(device)
    wrap(box)(third(1, 2, device=device)).sum().backward()
    left, right, twice, again = box.seen[0]
    assert left is right is twice is again and left.dtype == torch.float64
    assert box.left.weight is box.right.weight is box.twice is box.again
    assert box.left.weight.dtype == torch.float32 and box.left.weight.grad is not None


def test_gradients_of_parameters_equal_those_in_double_rounded(device):
    box, x = make_box(device), torch.randn(2, 2, 3, 3, device=device)
    reference = copy.deepcopy(box).double()
    g = torch.randn(2, 3, 3, 3, device=device)
    wrap(box)(x).backward(g)
    reference(truncate(x).double()).backward(g.double())
    for (name, p), q in zip(box.named_parameters(), reference.parameters(), strict=True):
        assert_bitwise_equal(p.grad, truncate(q.grad, 11).float(), name)


def test_running_statistics_are_written_back(device):
    box, x = make_box(device), torch.randn(2, 2, 3, 3, device=device)
    reference = copy.deepcopy(box).double()
    f = wrap(box)
    for _ in range(2):
        f(x)
        reference(truncate(x).double())
        reference.float().double()  # the module keeps its statistics in float32
        assert_bitwise_equal(box.norm.running_mean, reference.norm.running_mean.float())
        assert_bitwise_equal(box.norm.running_var, reference.norm.running_var.float())
    assert box.norm.num_batches_tracked == 2
    assert box.norm.running_mean.abs().max() > 0
    before = box.norm.running_mean.clone()
    f.eval()(x + 1)
    assert_bitwise_equal(box.norm.running_mean, before)


def test_buffers_updated_in_eval_mode_are_written_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += 1
            return x

    f = wrap(Counter().eval())
    for _ in range(3):
        f(third(1))
    with torch.inference_mode():
        f(third(1))
    assert f.total.item() == 4 and f.total.dtype == torch.float32


def test_state_dict_keys_and_parameters_are_those_of_the_module(device):
    box = make_box(device)
    f = wrap(box)
    assert list(f.state_dict()) == list(box.state_dict())
    assert_bitwise_equal(f.state_dict(), box.state_dict())
    assert [n for n, _ in f.named_parameters()] == [n for n, _ in box.named_parameters()]
    assert all(p is q for p, q in zip(f.parameters(), box.parameters(), strict=True))
    parent, plain = nn.Sequential(f), nn.Sequential(box)
    assert list(parent.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in parent.named_buffers()] == [n for n, _ in plain.named_buffers()]
    zeros = {k: torch.zeros_like(v) for k, v in plain.state_dict().items()}
    assert str(parent.load_state_dict(zeros)) == "<All keys matched successfully>"
    assert not box.conv.weight.any()
    with pytest.raises(RuntimeError, match="Missing key"):
        f.load_state_dict({})


def test_training_mode_dtype_and_attributes_go_through():
    box = make_box()
    f = wrap(box)
    assert f.output_size == 7 and f.conv is box.conv
    f.eval()
    assert not box.training and not box.norm.training and not f.training
    nn.Sequential(f).train()
    assert box.training and f.training and f.norm.training
    f.double()
    assert box.conv.weight.dtype == torch.float64 and box.scratch.dtype == torch.float64
    f.bias = nn.Parameter(torch.ones(1))
    assert box.bias is f.bias
    f.register_buffer("more", torch.ones(1), persistent=False)
    assert box.more is f.more and "more" not in f.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        _ = f.nothing


def test_custom_state_of_a_module_goes_through():
    class Versioned(nn.Linear):
        def get_extra_state(self):
            return {"a": 5}

        def set_extra_state(self, state):
            self.loaded = state

        def _apply(self, fn, recurse=True):
            self.grid = fn(torch.ones(1))  # a plain tensor that has to move along
            return super()._apply(fn, recurse)

    f = wrap(Versioned(2, 2))
    assert f.double() is f and f.grid.dtype == f.weight.dtype == torch.float64
    state = f.state_dict()
    assert state["_extra_state"] == {"a": 5}
    f.load_state_dict(state)
    assert f.loaded == {"a": 5}


def test_copies_and_pickles_are_independent_and_still_share_inside():
    f = wrap(nn.Linear(2, 2))
    x = third(1, 2)
    for other in (copy.deepcopy(f), pickle.loads(pickle.dumps(f))):
        assert_bitwise_equal(other(x), f(x))
        other.weight.data.zero_()
        assert not other.wrapped.weight.any() and f.weight.any()
    buffer = io.BytesIO()
    torch.save(f, buffer)
    buffer.seek(0)
    assert_bitwise_equal(torch.load(buffer, weights_only=False)(x), f(x))


def test_module_hooks_run_once():
    box = nn.Linear(2, 2)
    calls = []
    box.register_forward_hook(lambda *_: calls.append(1))
    wrap(box)(third(1, 2))
    assert calls == [1]


def test_frozen_and_half_modules_run():
    box = nn.Linear(2, 2).half().requires_grad_(False)
    x = third(1, 2).half().requires_grad_()
    y = wrap(box)(x)
    assert y.dtype == torch.float16
    y.sum().backward()
    assert x.grad.dtype == torch.float16 and box.weight.grad is None


def test_torchvision_roi_align_stays_close():
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(1, 3, 16, 16, requires_grad=True)
    boxes = torch.tensor([[0, 1.3, 2.7, 9.1, 12.2]])
    y, expected = (
        f(x, boxes, 7) for f in (wrap(torchvision.ops.roi_align), torchvision.ops.roi_align)
    )
    # Half a unit of 11 bits on every feature.
    assert y.dtype == torch.float32 and (y - expected).abs().max() < 2**-11 * x.abs().max()
    module = wrap(torchvision.ops.RoIAlign(7, 1.0, 2))
    assert_bitwise_equal(module(x, boxes), wrap(torchvision.ops.roi_align)(x, boxes, 7, 1.0, 2))


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    f = wrap(lambda t, index: t.index_select(0, index))
    x = torch.randn(8, device="cuda", requires_grad=True)
    index = torch.tensor([0, 3, 3], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        f(x, index).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad[3] == 2


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"bits": 1}, ValueError, r"wrap: bits must be at least 2, got 1"),
        ({"bits": "11"}, TypeError, r"wrap: bits must be an int, got str"),
        ({"bits": torch.float32}, ValueError, r"wrap: bits must be torch\.float16 or torch\.bfl"),
        ({"grad_bits": 0}, ValueError, r"wrap: grad_bits must be at least 2, got 0"),
        ({"compute_dtype": torch.float16}, ValueError, r"wrap: compute_dtype must be .*float16"),
        ({"truncate_args": ()}, ValueError, r"wrap: truncate_args must be a non-empty tuple"),
        ({"truncate_args": 0}, ValueError, r"wrap: truncate_args must be .*, got 0"),
        ({"truncate_args": (-1,)}, ValueError, r"wrap: truncate_args must be .*, got \(-1,\)"),
        ({"truncate_args": (True,)}, ValueError, r"wrap: truncate_args must be .*, got \(True,"),
    ],
)
def test_errors_of_wrap(options, error, text):
    with pytest.raises(error, match=text):
        wrap(torch.sin, **options)


def test_errors_of_calls():
    with pytest.raises(TypeError, match="wrap: callable_or_module must be callable, got int"):
        wrap(3)
    x = torch.ones(2)
    text = "wrap: truncate_args must name arguments of the call, got 'b' for 1 positional ones"
    with pytest.raises(ValueError, match=text):
        wrap(torch.sin, truncate_args=("b",))(x)
    with pytest.raises(ValueError, match=r"got 3 for 1 positional ones and keywords \['out'\]"):
        wrap(torch.sin, truncate_args=(3,))(x, out=None)
    with pytest.raises(TypeError, match="truncate_args must select a floating tensor, got none"):
        wrap(torch.sin)(x.int())
    assert truncdet.wrap is wrap
