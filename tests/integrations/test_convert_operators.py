"""`convert` on torchvision's and mmcv's layers beside RoIAlign: the bits, and what else holds."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _frameworks import installed
from _operator_cases import SHAPES, STARTS, boxes, close, convolution, draw, features, rotated
from torch import Tensor, nn
from torchvision import ops
from truncdet.integrations import mmcv as mmcv_patch
from truncdet.integrations import torchvision as tv
from truncdet.integrations._layers import KINDS, kind_of
from truncdet.integrations._swap import swap_of

import truncdet
from truncdet.testing import assert_bitwise_equal

CONVOLUTION = convolution()


def mmcv(name: str, *arguments: Any, **named: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import mmcv.ops

        made: nn.Module = getattr(mmcv.ops, name, None) or getattr(
            sys.modules["mmcv.ops.multi_scale_deform_attn"], name
        )
        return made(*arguments, **named)  # type: ignore[no-any-return,operator]

    return build


@dataclass(frozen=True)
class Layer:
    """A layer, what it is called with beside its input, and whether mmcv has it on a CPU."""

    build: Callable[[], nn.Module]
    input: Tensor
    rest: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    on_cpu: bool = True

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        layer = self.build()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        return layer

    def run(self, layer: Any) -> list[Tensor]:
        leaf = self.input.clone().requires_grad_()
        out = layer(leaf, *self.rest, **dict(self.named))
        out = out[0] if isinstance(out, tuple) else out
        parameters = list(layer.parameters())
        grads = torch.autograd.grad(
            out, [leaf, *parameters], draw(*out.shape, seed=9), allow_unused=True
        )
        return [out.detach(), *(grad for grad in grads if grad is not None)]


OFFSET, MASK = CONVOLUTION["offset"], CONVOLUTION["mask"]
TORCHVISION = {
    "RoIPool": Layer(lambda: ops.RoIPool((3, 2), 0.7), features(3), (boxes(),)),
    "PSRoIAlign": Layer(lambda: ops.PSRoIAlign((3, 2), 0.7, -1), features(12), (boxes(),)),
    "PSRoIPool": Layer(lambda: ops.PSRoIPool((3, 2), 0.7), features(12), (boxes(),)),
    "DeformConv2d": Layer(lambda: ops.DeformConv2d(4, 6, 3), CONVOLUTION["input"], (OFFSET, MASK)),
}
ATTENTION = (
    ("value", draw(2, 26, 32, seed=1)),
    ("reference_points", draw(2, 7, 2, 2, seed=2).sigmoid()),
    ("spatial_shapes", SHAPES),
    ("level_start_index", STARTS),
)
COORS = torch.randint(-1, 3, (60, 3), generator=torch.Generator().manual_seed(5)).int()
MMCV = {
    "mmcv RoIPool": Layer(mmcv("RoIPool", (3, 2), 0.7), features(3), (boxes(),), on_cpu=False),
    "RoIAlignRotated": Layer(mmcv("RoIAlignRotated", (3, 2), 0.9), features(3), (rotated(),)),
    "mmcv DeformConv2d": Layer(
        mmcv("DeformConv2d", 4, 6, 3, deform_groups=2), CONVOLUTION["input"], (OFFSET,)
    ),
    "a small map": Layer(
        mmcv("DeformConv2d", 4, 6, 3, padding=1), draw(2, 4, 2, 9), (draw(2, 18, 2, 9, seed=1),)
    ),
    "DeformConv2dPack": Layer(mmcv("DeformConv2dPack", 4, 6, 3, padding=1), features(4)),
    "ModulatedDeformConv2d": Layer(
        mmcv("ModulatedDeformConv2d", 4, 6, 3, deform_groups=2),
        CONVOLUTION["input"],
        (OFFSET, MASK),
    ),
    "ModulatedDeformConv2dPack": Layer(
        mmcv("ModulatedDeformConv2dPack", 4, 6, 3, stride=2), features(4)
    ),
    "SAConv2d": Layer(mmcv("SAConv2d", 4, 6, 3, padding=1, use_deform=True), features(4)),
    "MultiScaleDeformableAttention": Layer(
        mmcv("MultiScaleDeformableAttention", 32, 4, 2, 3, batch_first=True, dropout=0),
        draw(2, 7, 32),
        named=ATTENTION,
    ),
    "DynamicScatter": Layer(
        mmcv("DynamicScatter", [1.0] * 3, [0.0] * 6, True), draw(60, 4), (COORS,), on_cpu=False
    ),
}
LAYERS = TORCHVISION | (MMCV if installed("mmcv") else {})
each = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def nothing_global() -> Iterator[None]:
    before = {kind: vars(kind.found()).get("forward") for kind in KINDS if kind.found()}
    yield
    assert not tv.is_patched() and not mmcv_patch.is_patched()
    assert all(vars(kind.found()).get("forward") is value for kind, value in before.items())


def expected(name: str) -> list[Tensor]:
    """What the patch of the layer's framework gives."""
    if name in TORCHVISION:
        layer = LAYERS[name].make()
        found = kind_of(layer)
        assert found is not None
        function = getattr(truncdet, found.by.partition(".")[2])
        return LAYERS[name].run(Direct(layer, function))
    with mmcv_patch.patched():
        return LAYERS[name].run(LAYERS[name].make())


class Direct(nn.Module):
    """truncdet's function with the attributes of torchvision's layer."""

    def __init__(self, layer: Any, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, input: Tensor, *rest: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, ops.DeformConv2d):
            offset, mask = rest
            return self.function(input, offset, layer.weight, layer.bias, mask=mask)
        ratio = (layer.sampling_ratio,) if hasattr(layer, "sampling_ratio") else ()
        return self.function(input, *rest, layer.output_size, layer.spatial_scale, *ratio)


@each
def test_a_converted_layer_has_our_bits_and_the_frameworks_values(name: str) -> None:
    case = LAYERS[name]
    layer = case.make()
    keys = list(layer.state_dict())
    (change,) = truncdet.convert(layer)
    assert change.mode == "fixed_point" and list(layer.state_dict()) == keys
    ours = case.run(layer)
    assert_bitwise_equal(ours, expected(name))
    if case.on_cpu:
        plain = case.run(case.make())
        close(ours, plain)
        assert not all(map(torch.equal, ours, plain))


@each
def test_off_gives_the_very_layer_back(name: str) -> None:
    case = LAYERS[name]
    layer = case.make()
    cls, attributes = type(layer), dict(vars(layer))
    assert len(truncdet.convert(layer)) == 1 and type(layer) is not cls
    assert not truncdet.convert(layer)
    (change,) = truncdet.convert(layer, "off")
    assert (change.was, change.mode) == ("fixed_point", "off")
    assert type(layer) is cls and vars(layer).keys() == attributes.keys()
    assert all(vars(layer)[name] is value for name, value in attributes.items())


@each
def test_truncate_leaves_it_to_the_framework(name: str) -> None:
    case = LAYERS[name]
    layer = case.make()
    cls = type(layer)
    truncdet.convert(layer)
    conversion = truncdet.convert(layer, "truncate")
    assert [change.mode for change in conversion] == ["off"] and type(layer) is cls
    assert [left.reason for left in conversion.not_covered] == ["'truncate' covers RoIAlign alone"]


@each
def test_copies_pickles_and_checkpoints(name: str) -> None:
    case = LAYERS[name]
    layer = case.make()
    plain = layer.state_dict()
    truncdet.convert(layer)
    ours = case.run(layer)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(again) is type(layer)
        assert_bitwise_equal(case.run(again), ours)
        again.load_state_dict(plain)
        assert len(truncdet.convert(again, "off")) == 1
    fresh = case.build()
    fresh.load_state_dict(torch.load(saved))
    truncdet.convert(fresh)
    assert_bitwise_equal(case.run(fresh), ours)


@each
def test_the_original_runs_in_a_trace_and_says_so(name: str) -> None:
    case = LAYERS[name]
    if not case.on_cpu:
        pytest.skip("mmcv has no kernel for the CPU to trace")
    layer = case.make()
    truncdet.convert(layer)

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x, *case.rest, **dict(case.named))

    with pytest.warns(RuntimeWarning, match=r"with torch\.jit\.trace uses the framework's own"):
        traced = torch.jit.trace(Call(), case.input, check_trace=False)
    assert "truncdet::" not in str(traced.inlined_graph)
    assert_bitwise_equal(traced(case.input).detach(), case.run(case.make())[0])


@each
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_runs_ours(name: str, inside: bool) -> None:
    torch._dynamo.reset()
    case = LAYERS[name]
    if name == "DynamicScatter":
        pytest.skip("the number of voxels depends on the data")
    layer = case.make()
    truncdet.convert(layer)
    ours = case.run(layer)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.layer(*args, **kwargs)

    compiled = torch.compile(Outer() if inside else layer, backend="aot_eager")
    assert_bitwise_equal(case.run(compiled), ours)


@each
def test_the_layer_is_independent_of_patches(name: str) -> None:
    case = LAYERS[name]
    layer = case.make()
    with tv.patched(), mmcv_patch.patched() if installed("mmcv") else tv.patched():
        truncdet.convert(layer)
        inside = case.run(layer)
    assert_bitwise_equal(case.run(layer), inside)


def test_scripts_get_the_original() -> None:
    layer = ops.RoIPool([3, 2], 0.7)
    truncdet.convert(layer)
    case = LAYERS["RoIPool"]
    ours = case.run(layer)
    with pytest.warns(RuntimeWarning, match=r"torch\.jit\.script uses the framework's own operato"):
        scripted = torch.jit.script(layer)
    assert_bitwise_equal(case.run(scripted), case.run(case.make()))
    assert_bitwise_equal(case.run(layer), ours)


def test_symbolic_traces_record_the_original() -> None:
    layer = nn.Sequential(ops.RoIPool([3, 2], 0.7))
    truncdet.convert(layer)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: Any, name: str) -> bool:
            return False

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = layer[0]

        def forward(self, x: Tensor, rois: Tensor) -> Any:
            return self.pool(x, rois)

    with pytest.warns(RuntimeWarning, match=r"roi_pool with a symbolic trace \(torch\.fx\)"):
        graph = Tracer().trace(Call())
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ops.roi_pool]


def test_subclasses_with_a_forward_of_their_own_are_skipped() -> None:
    class Own(ops.RoIPool):  # type: ignore[misc]
        def forward(self, input: Tensor, rois: Tensor) -> Tensor:
            return super().forward(input, rois) + 1  # type: ignore[no-any-return]

    class Renamed(ops.RoIPool):  # type: ignore[misc]
        pass

    conversion = truncdet.convert(nn.Sequential(Own(3, 1.0), Renamed(3, 1.0)))
    assert [left.reason for left in conversion.skipped] == ["its class has a forward of its own"]
    assert [change.name for change in conversion] == ["1"]


def test_a_forward_that_somebody_replaced_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forward:
        def __get__(self, layer: Any, cls: Any) -> Any:
            return self

    def forward(self: Any, input: Tensor, rois: Tensor) -> Tensor:
        return 2 * original(self, input, rois)  # type: ignore[no-any-return]

    original = ops.RoIPool.forward
    before = ops.RoIPool(3, 1.0)
    truncdet.convert(before)
    for replaced in (forward, Forward()):
        with monkeypatch.context() as change:
            change.setattr(ops.RoIPool, "forward", replaced)
            conversion = truncdet.convert(nn.Sequential(ops.RoIPool(3, 1.0), before))
            assert [left.reason for left in conversion.skipped] == [
                "its forward was replaced and calls no known operator itself"
            ]
            assert len(truncdet.convert(before, "off")) == 1
            truncdet.convert(before, "off")
        truncdet.convert(before)


def test_the_deprecated_argument_of_a_decorated_forward_still_works() -> None:
    if not installed("mmcv"):
        pytest.skip("mmcv is not installed")
    case = LAYERS["MultiScaleDeformableAttention"]
    layer, rest = case.make(), dict(case.named)
    truncdet.convert(layer)
    with pytest.warns(Warning, match="residual"):
        renamed = layer(case.input, residual=case.input + 1, **rest)
    assert_bitwise_equal(renamed, layer(case.input, identity=case.input + 1, **rest))


def test_a_subclass_with_its_own_reduction_is_skipped() -> None:
    if not installed("mmcv"):
        pytest.skip("mmcv is not installed")
    from mmcv.ops import DynamicScatter

    class Own(DynamicScatter):  # type: ignore[misc]
        def forward_single(self, points: Tensor, coors: Tensor) -> Any:
            return super().forward_single(points, coors)

    (left,) = truncdet.convert(nn.Sequential(Own([1.0], [0.0], True))).skipped
    assert left.reason == "its class has a forward_single of its own"


@each
def test_the_framework_says_what_computes_it(name: str) -> None:
    layer = LAYERS[name].make()
    truncdet.convert(layer)
    kind, swap = kind_of(layer), swap_of(layer)
    assert kind is not None and swap is not None and swap.source == kind.framework
    assert callable(getattr(truncdet, kind.by.partition(".")[2]))
