"""The strict checker names operators that differ from run to run, forward and backward.

No GPU is needed to see it fail: its list of devices is told to contain the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torchvision import ops
from truncdet.integrations import aten
from truncdet.integrations import torchvision as tv
from truncdet.integrations._aten_table import BY_NAME, OPERATORS

import truncdet
from truncdet._strict import StrictMode
from truncdet._strict_table import TABLE

BOXES = torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0], [0.0, 2.0, 0.0, 6.0, 7.0]])
INDEX = torch.tensor([0, 1, 1])


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


def backward_of(make: Callable[[], torch.Tensor]) -> Callable[[], None]:
    return lambda: make().sum().backward()


# Operator as it is reported, and a call that reaches it.
DIFFER = {
    "aten::grid_sampler_2d_backward": backward_of(
        lambda: F.grid_sample(leaf(1, 1, 4, 4), torch.zeros(1, 2, 2, 2), align_corners=False)
    ),
    "aten::grid_sampler_3d_backward": backward_of(
        lambda: F.grid_sample(leaf(1, 1, 4, 4, 4), torch.zeros(1, 2, 2, 2, 3), align_corners=False)
    ),
    "aten::upsample_linear1d_backward": backward_of(
        lambda: F.interpolate(leaf(1, 1, 4), scale_factor=2, mode="linear")
    ),
    "aten::upsample_bilinear2d_backward": backward_of(
        lambda: F.interpolate(leaf(1, 1, 4, 4), scale_factor=2, mode="bilinear")
    ),
    "aten::upsample_trilinear3d_backward": backward_of(
        lambda: F.interpolate(leaf(1, 1, 4, 4, 4), scale_factor=2, mode="trilinear")
    ),
    "aten::upsample_bicubic2d_backward": backward_of(
        lambda: F.interpolate(leaf(1, 1, 4, 4), scale_factor=2, mode="bicubic")
    ),
    "aten::_adaptive_avg_pool2d_backward": backward_of(
        lambda: F.adaptive_avg_pool2d(leaf(1, 1, 5, 5), 3)
    ),
    "aten::_adaptive_avg_pool3d_backward": backward_of(
        lambda: F.adaptive_avg_pool3d(leaf(1, 1, 5, 5, 5), 3)
    ),
    "aten::adaptive_max_pool2d_backward": backward_of(
        lambda: F.adaptive_max_pool2d(leaf(1, 1, 5, 5), 3)
    ),
    "aten::avg_pool3d_backward": backward_of(lambda: F.avg_pool3d(leaf(1, 1, 4, 4, 4), 2)),
    "aten::max_pool3d_with_indices_backward": backward_of(
        lambda: F.max_pool3d(leaf(1, 1, 4, 4, 4), 2)
    ),
    "aten::fractional_max_pool2d_backward": backward_of(
        lambda: F.fractional_max_pool2d(leaf(1, 1, 6, 6), 2, output_size=3)
    ),
    "aten::max_unpool2d": lambda: F.max_unpool2d(
        torch.rand(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2
    ),
    "aten::reflection_pad1d_backward": backward_of(
        lambda: F.pad(leaf(1, 1, 4), (1, 1), mode="reflect")
    ),
    "aten::reflection_pad2d_backward": backward_of(
        lambda: F.pad(leaf(1, 1, 4, 4), (1, 1, 1, 1), mode="reflect")
    ),
    "aten::reflection_pad3d_backward": backward_of(
        lambda: F.pad(leaf(1, 1, 4, 4, 4), (1, 1, 1, 1, 1, 1), mode="reflect")
    ),
    "aten::replication_pad2d_backward": backward_of(
        lambda: F.pad(leaf(1, 1, 4, 4), (1, 1, 1, 1), mode="replicate")
    ),
    "aten::nll_loss2d_forward": lambda: F.nll_loss(
        torch.rand(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64)
    ),
    "aten::_ctc_loss_backward": backward_of(
        lambda: F.ctc_loss(
            leaf(4, 1, 3).log_softmax(2),
            torch.ones(1, 2, dtype=torch.int64),
            torch.tensor([4]),
            torch.tensor([2]),
        )
    ),
    "aten::embedding_dense_backward": backward_of(lambda: F.embedding(INDEX, leaf(3, 2))),
    "aten::_embedding_bag_backward": backward_of(
        lambda: F.embedding_bag(INDEX[None], leaf(3, 2), mode="max")
    ),
    "aten::scatter_add": lambda: torch.zeros(2).scatter_add_(0, INDEX, torch.ones(3)),
    "aten::scatter": lambda: torch.zeros(2).scatter(0, INDEX, torch.ones(3), reduce="add"),
    "aten::scatter_reduce": lambda: torch.zeros(2).scatter_reduce(
        0, INDEX, torch.ones(3), reduce="mean"
    ),
    "aten::index_add": lambda: torch.zeros(2).index_add_(0, INDEX, torch.ones(3)),
    "aten::index_reduce": lambda: torch.zeros(2).index_reduce_(0, INDEX, torch.ones(3), "mean"),
    "aten::put": lambda: torch.zeros(2).put_(INDEX, torch.ones(3), accumulate=True),
    "aten::histc": lambda: torch.ones(2**11 + 1).half().histc(2),
    "aten::bincount": lambda: torch.bincount(INDEX, weights=torch.rand(3)),
    "aten::median": lambda: torch.rand(4).median(0),
    "aten::cumsum": lambda: torch.rand(4).cumsum(0),
    "torchvision::_roi_align_backward": backward_of(
        lambda: torch.ops.torchvision.roi_align(leaf(1, 1, 8, 8), BOXES, 1.0, 2, 2, 2, False)
    ),
    "torchvision::_roi_pool_backward": backward_of(
        lambda: ops.roi_pool(leaf(1, 1, 8, 8), BOXES, 2)
    ),
    "torchvision::_ps_roi_align_backward": backward_of(
        lambda: ops.ps_roi_align(leaf(1, 4, 8, 8), BOXES, 2)
    ),
    "torchvision::_ps_roi_pool_backward": backward_of(
        lambda: ops.ps_roi_pool(leaf(1, 4, 8, 8), BOXES, 2)
    ),
    "torchvision::_deform_conv2d_backward": backward_of(
        lambda: ops.deform_conv2d(leaf(1, 1, 4, 4), torch.zeros(1, 2, 4, 4), leaf(1, 1, 1, 1))
    ),
}

# Relatives of the above whose sums are exact, ordered or absent.
REPEAT = {
    "integer scatter_add": lambda: torch.zeros(2, dtype=torch.int64).scatter_add_(0, INDEX, INDEX),
    "integer index_add": lambda: torch.zeros(2, dtype=torch.int64).index_add_(0, INDEX, INDEX),
    "scatter": lambda: torch.zeros(2).scatter(0, INDEX, torch.ones(3)),
    "amax": lambda: torch.zeros(2).scatter_reduce(0, INDEX, torch.ones(3), reduce="amax"),
    "index backward": backward_of(lambda: leaf(3)[INDEX]),
    "bincount without weights": lambda: torch.bincount(INDEX),
    "median without index": lambda: torch.rand(4).median(),
    "integer cumsum": lambda: INDEX.cumsum(0),
    "nll_loss2d without reduction": lambda: F.nll_loss(
        torch.rand(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64), reduction="none"
    ),
    "nearest": backward_of(lambda: F.interpolate(leaf(1, 1, 4, 4), scale_factor=2)),
    "histc of so few elements that floats count them": lambda: torch.ones(2**11).half().histc(2),
    "one number added by scatter": lambda: torch.zeros(2).scatter(0, INDEX, 0.1, reduce="add"),
    "roi_align forward": lambda: ops.roi_align(torch.rand(1, 1, 8, 8), BOXES, 2),
    "bag sum": backward_of(lambda: F.embedding_bag(INDEX[None], leaf(3, 2), mode="sum")),
}


@pytest.mark.parametrize("op", DIFFER)
def test_an_operator_that_differs_is_named_with_its_remedy(op: str) -> None:
    with pytest.raises(truncdet.TruncdetError) as caught, StrictMode(True, devices=("cpu",)):
        DIFFER[op]()
    assert str(caught.value) == f"strict: {op}: {TABLE[op].why}; {TABLE[op].fix}"


@pytest.mark.parametrize("op", DIFFER)
def test_the_same_call_passes_on_a_device_that_is_not_checked(op: str) -> None:
    with StrictMode(True):
        DIFFER[op]()


@pytest.mark.parametrize("name", REPEAT)
def test_an_operator_that_repeats_is_left_alone(name: str) -> None:
    with StrictMode(True, devices=("cpu",)):
        REPEAT[name]()


def test_every_name_in_the_table_is_an_operator() -> None:
    for key in TABLE:
        namespace, name = key.split("::")
        packet = getattr(torch.ops, namespace)
        assert hasattr(packet, name) or hasattr(packet, f"{name}_"), key


def test_warn_says_each_operator_once_and_goes_on() -> None:
    with pytest.warns(RuntimeWarning) as caught, StrictMode("warn", devices=("cpu",)):
        for _ in range(3):
            result = torch.zeros(2).index_add(0, INDEX, torch.ones(3))
            torch.rand(4).median(0)
    assert [str(w.message).split(":")[0] for w in caught] == ["truncdet strict"] * 2
    assert "aten::index_add" in str(caught[0].message)
    assert result.tolist() == [1.0, 2.0]


def test_a_backward_is_seen_though_the_forward_ran_before() -> None:
    loss = F.interpolate(leaf(1, 1, 4, 4), scale_factor=2, mode="bilinear").sum()
    with (
        pytest.raises(truncdet.TruncdetError, match="upsample_bilinear2d_backward"),
        StrictMode(True, devices=("cpu",)),
    ):
        loss.backward()


def test_after_an_error_the_checker_is_gone() -> None:
    with pytest.raises(truncdet.TruncdetError), StrictMode(True, devices=("cpu",)):
        DIFFER["aten::median"]()
    assert torch._C._len_torch_dispatch_stack() == 0
    DIFFER["aten::median"]()


def test_the_deterministic_flag_covers_what_it_has_a_kernel_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with StrictMode(True, devices=("cpu",)):
            DIFFER["aten::scatter_add"]()
            with pytest.raises(truncdet.TruncdetError, match="grid_sampler_2d_backward"):
                DIFFER["aten::grid_sampler_2d_backward"]()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_torchvision_patch_covers_its_kernel() -> None:
    call = DIFFER["torchvision::_roi_align_backward"]
    with tv.patched("fixed_point"), StrictMode(True, devices=("cpu",)):
        call()
    # Under 'truncate' a reference from before the patch still runs in single precision.
    with (
        tv.patched("truncate"),
        pytest.raises(truncdet.TruncdetError, match="_roi_align_backward"),
        StrictMode(True, devices=("cpu",)),
    ):
        call()
    with tv.patched("truncate"), StrictMode(True, devices=("cpu",)):
        ops.roi_align(leaf(1, 1, 8, 8), BOXES, 2).sum().backward()


# Calls of covered operators that truncdet has no definition for.
LEFT = {
    "aten::scatter": lambda: torch.zeros(2).scatter(0, INDEX, torch.ones(3), reduce="multiply"),
    "aten::scatter_reduce": lambda: torch.zeros(2).scatter_reduce_(0, INDEX, torch.ones(3), "prod"),
    "aten::index_reduce": lambda: torch.zeros(2).index_reduce(0, INDEX, torch.ones(3), "prod"),
    "aten::put": lambda: torch.zeros(2).put_(INDEX, torch.ones(3)),
}


@pytest.mark.parametrize("op", [name for name in DIFFER if name in BY_NAME])
def test_the_patch_of_torch_covers_its_kernels(op: str) -> None:
    with aten.patched(), StrictMode(True, devices=("cpu",)):
        DIFFER[op]()


@pytest.mark.parametrize("op", LEFT)
def test_it_does_not_cover_what_it_leaves_to_pytorch(op: str) -> None:
    with (
        aten.patched(),
        pytest.raises(truncdet.TruncdetError, match=op),
        StrictMode(True, devices=("cpu",)),
    ):
        LEFT[op]()


def test_the_patch_of_torch_covers_nothing_else() -> None:
    complexes = torch.ones(3, dtype=torch.complex64)
    with aten.patched(), StrictMode(True, devices=("cpu",)):
        with pytest.raises(truncdet.TruncdetError, match="aten::median"):
            DIFFER["aten::median"]()
        with pytest.raises(truncdet.TruncdetError, match="aten::index_add"):
            complexes.index_add(0, INDEX, complexes)
    assert {name for name, operator in OPERATORS.items() if operator.left} == LEFT.keys()
    # PyTorch has one order for the sums of these, or a caller of theirs is in the table.
    assert OPERATORS.keys() - TABLE.keys() == {
        "aten::_index_put_impl",
        "aten::_embedding_bag_dense_backward",
        "aten::segment_reduce",
    }
    assert (TABLE.keys() & BY_NAME.keys()) - DIFFER.keys() == {"aten::cudnn_grid_sampler_backward"}


def test_a_layer_converted_to_truncate_runs_covered_in_double() -> None:
    # In a process of its own: such a layer covers the double kernel from then on.
    code = (
        "import torch, truncdet\n"
        "from torchvision.ops import RoIAlign\n"
        "from truncdet._strict import StrictMode\n"
        "box = torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0]])\n"
        "x = torch.rand(1, 1, 8, 8, requires_grad=True)\n"
        "model = torch.nn.ModuleList([RoIAlign(2, 1.0, 2), RoIAlign(2, 1.0, 2)])\n"
        "truncdet.convert(model[:1], 'truncate')\n"
        "with StrictMode(True, devices=('cpu',)):\n"
        "    model[0](x, box).sum().backward()\n"
        "    try:\n"
        "        model[1](x, box).sum().backward()\n"
        "    except truncdet.TruncdetError:\n"
        "        print('raised')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("raised\n", 0), done.stderr


def test_the_switch_enters_and_leaves_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictMode.__init__, "__defaults__", (("cpu",),))
    with (
        truncdet.deterministic(strict=True),
        pytest.raises(truncdet.TruncdetError, match="aten::median"),
    ):
        DIFFER["aten::median"]()
    with truncdet.deterministic(strict="warn"), pytest.warns(RuntimeWarning, match="aten::median"):
        DIFFER["aten::median"]()
    truncdet.enable(strict=True)
    try:
        with pytest.raises(truncdet.TruncdetError, match="aten::median"):
            DIFFER["aten::median"]()
    finally:
        truncdet.disable()
    with truncdet.deterministic(), warnings.catch_warnings():
        warnings.simplefilter("error")
        DIFFER["aten::median"]()


@pytest.mark.cuda
def test_autograd_threads_of_a_gpu_carry_the_checker() -> None:
    x = torch.rand(1, 1, 4, 4, device="cuda", requires_grad=True)
    for covered in ((), ("torch",)):
        loss = F.interpolate(x, scale_factor=2, mode="bilinear").sum()
        with truncdet.deterministic(strict=True, frameworks=covered):
            if covered:
                loss.backward()
                continue
            with pytest.raises(truncdet.TruncdetError, match="upsample_bilinear2d_backward"):
                loss.backward()
