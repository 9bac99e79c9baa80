"""torchvision under the patch: every way to RoIAlign, forward and backward, and back again."""

from __future__ import annotations

import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign, RoIAlign
from torchvision.ops import roi_align as captured
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet.testing import assert_bitwise_equal

ORIGINAL = sys.modules["torchvision.ops.roi_align"].roi_align  # type: ignore[attr-defined]
NAMES = (
    ("torchvision.ops", "roi_align"),
    ("torchvision.ops.roi_align", "roi_align"),
    ("torchvision.ops.poolers", "roi_align"),
    ("torchvision.models.detection.roi_heads", "roi_align"),
)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    kernel = torch._C._dispatch_dump(tv.BACKWARD_OP)
    yield
    assert not tv.is_patched()
    assert torch._C._dispatch_dump(tv.BACKWARD_OP) == kernel
    for module, name in NAMES:
        assert vars(sys.modules[module])[name] is ORIGINAL


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our functions in the order in which torchvision's callers reach them."""
    calls: list[str] = []

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return spied

    def spied_wrap(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        return spy("wrapped", truncdet_wrap(function, **kwargs))

    truncdet_wrap = truncdet.wrap
    monkeypatch.setattr(truncdet, "roi_align", spy("roi_align", truncdet.roi_align))
    monkeypatch.setattr(truncdet, "wrap", spied_wrap)
    return calls


def scene(rois: int = 40, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Features [2, 3, 16, 16], crowded RoIs [K, 5] and a gradient [K, 3, 3, 3]."""
    draw = torch.Generator().manual_seed(seed)
    corner = torch.rand(rois, 2, generator=draw) * 8
    size = torch.rand(rois, 2, generator=draw) * 7 + 1
    image = torch.randint(0, 2, (rois, 1), generator=draw).float()
    features = torch.randn(2, 3, 16, 16, generator=draw).to(dtype).requires_grad_()
    gradient = torch.randn(rois, 3, 3, 3, generator=draw).to(dtype)
    return features, torch.cat([image, corner, corner + size], 1).to(dtype), gradient


def gradient_of(
    function: Callable[..., Any], order: Tensor | None = None, **options: Any
) -> Tensor:
    features, boxes, upstream = scene(**options)
    if order is not None:
        boxes, upstream = boxes[order], upstream[order]
    function(features, boxes, 3, sampling_ratio=2).backward(upstream)
    assert features.grad is not None
    return features.grad


ORDERS = [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(20)]


def differs(function: Callable[..., Any]) -> bool:
    """Whether some order of the RoIs changes a bit of the gradient."""
    first = gradient_of(function)
    return any(not torch.equal(gradient_of(function, order), first) for order in ORDERS)


def test_negative_control_the_plain_gradient_depends_on_the_order() -> None:
    assert differs(torchvision.ops.roi_align)


def test_every_name_is_replaced_and_put_back() -> None:
    tv.patch()
    try:
        for module, name in NAMES:
            assert vars(sys.modules[module])[name] is not ORIGINAL
        left = [
            (name, key)
            for name, module in list(sys.modules.items())
            if name.split(".")[0] == "torchvision"
            for key, value in list(vars(module).items())
            if value is ORIGINAL
        ]
        assert left == []
    finally:
        assert tv.unpatch() is True
    assert tv.unpatch() is False


def through_module(features: Tensor, boxes: Any, size: int, sampling_ratio: int = -1) -> Any:
    return RoIAlign(size, 1.0, sampling_ratio)(features, boxes)


BUILT_BEFORE = RoIAlign(3, 1.0, 2)
WAYS: dict[str, Callable[..., Any]] = {
    "torchvision.ops.roi_align": lambda *a, **k: torchvision.ops.roi_align(*a, **k),
    "RoIAlign": through_module,
    "RoIAlign built before": lambda features, boxes, *_, **__: BUILT_BEFORE(features, boxes),
    "captured before": captured,
    "the dispatcher": lambda features, boxes, size, sampling_ratio: (
        torch.ops.torchvision.roi_align(features, boxes, 1.0, size, size, sampling_ratio, False)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_fixed_point_gradients_do_not_depend_on_the_order(way: str) -> None:
    with tv.patched():
        assert not differs(WAYS[way])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_all_ways_give_the_bits_of_our_own_operator(dtype: torch.dtype) -> None:
    expected = gradient_of(truncdet.roi_align, dtype=dtype)
    with tv.patched():
        for function in WAYS.values():
            assert_bitwise_equal(gradient_of(function, dtype=dtype), expected)


def test_the_kernel_agrees_with_our_operator_on_sides_that_differ() -> None:
    features = torch.randn(2, 3, 16, 11, requires_grad=True)
    _, boxes, _ = scene()
    upstream = torch.randn(40, 3, 3, 2)
    (expected,) = torch.autograd.grad(
        truncdet.roi_align(features, boxes, (3, 2), 0.5, 2, True), features, upstream
    )
    with tv.patched():
        (actual,) = torch.autograd.grad(
            captured(features, boxes, (3, 2), 0.5, 2, True), features, upstream
        )
    assert_bitwise_equal(actual, expected)


def test_truncate_leaves_references_from_before_alone() -> None:
    expected = gradient_of(captured)
    with tv.patched("truncate"):
        assert_bitwise_equal(gradient_of(captured), expected)


@pytest.mark.parametrize("way", ["torchvision.ops.roi_align", "RoIAlign", "RoIAlign built before"])
@pytest.mark.parametrize(
    ("mode", "expected"), [("fixed_point", "roi_align"), ("truncate", "wrapped")]
)
def test_names_lead_to_the_function_of_the_mode(
    way: str, mode: str, expected: str, seen: list[str]
) -> None:
    features, boxes, _ = scene()
    with tv.patched(mode):
        WAYS[way](features, boxes, 3, sampling_ratio=2)
    assert seen == [expected]


def test_off_is_the_original_to_the_bit(seen: list[str]) -> None:
    features, boxes, _ = scene()
    expected, gradient = ORIGINAL(features, boxes, 3), gradient_of(ORIGINAL)
    with tv.patched("truncate"), tv.patched("off"):
        assert torchvision.ops.roi_align is ORIGINAL
        assert_bitwise_equal(torchvision.ops.roi_align(features, boxes, 3), expected)
        assert_bitwise_equal(gradient_of(torchvision.ops.roi_align), gradient)
    assert seen == []


def test_truncate_is_close_and_keeps_rois_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    wrap = truncdet.wrap

    def record(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options.get("truncate_args", (0,)) == (0,)

        def inner(features: Tensor, boxes: Any, *args: Any) -> Any:
            given.append((features.dtype, boxes))
            return function(features, boxes, *args)

        return wrap(inner, **options)

    monkeypatch.setattr(truncdet, "wrap", record)
    features, boxes, _ = scene()
    features = features.detach()
    with tv.patched("truncate"):
        result = torchvision.ops.roi_align(features, boxes, 3)
        assert not differs(torchvision.ops.roi_align)
    assert given[0][0] == torch.float64
    assert_bitwise_equal(given[0][1], boxes.double())
    assert result.dtype == torch.float32
    largest = float(features.abs().max())
    # 11 bits: half a unit in the last place of the largest feature.
    assert float((result - ORIGINAL(features, boxes, 3)).abs().max()) <= largest * 2.0**-11
    assert not torch.equal(result, ORIGINAL(features, boxes, 3))


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_forms_of_arguments(mode: str) -> None:
    features, boxes, _ = scene()
    boxes = boxes[boxes[:, 0].argsort(stable=True)]
    as_list = [boxes[boxes[:, 0] == i, 1:] for i in range(2)]
    with tv.patched(mode):
        expected = torchvision.ops.roi_align(features, boxes, (3, 2), 0.5, 2, True)
        others = (
            torchvision.ops.roi_align(features, as_list, (3, 2), 0.5, 2, True),
            torchvision.ops.roi_align(
                input=features,
                boxes=boxes,
                output_size=[3, 2],
                spatial_scale=0.5,
                sampling_ratio=2,
                aligned=True,
            ),
        )
        square = torchvision.ops.roi_align(features, boxes, 3)
    for other in others:
        assert_bitwise_equal(other, expected)
    assert expected.shape == (40, 3, 3, 2) and square.shape == (40, 3, 3, 3)
    tolerance = 1e-5 if mode == "fixed_point" else 2.0**-11
    close = ORIGINAL(features, boxes, (3, 2), 0.5, 2, True)
    assert float((expected - close).detach().abs().max()) <= tolerance * float(
        features.detach().abs().max()
    )


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_autocast_keeps_the_dtype_of_the_features(mode: str) -> None:
    features, boxes, _ = scene()
    features = features.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = torchvision.ops.roi_align(features, boxes, 3)
        with tv.patched(mode):
            ours = torchvision.ops.roi_align(features, boxes, 3)
    assert ours.dtype == plain.dtype == torch.bfloat16
    ours.sum().backward()
    assert features.grad is not None and features.grad.dtype == torch.bfloat16


def test_the_mode_is_frozen_at_forward_time() -> None:
    features, boxes, upstream = scene()
    expected = gradient_of(lambda *a, **k: truncdet.roi_align(*a, **k))
    with tv.patched():
        result = torchvision.ops.roi_align(features, boxes, 3, sampling_ratio=2)
    result.backward(upstream)
    assert features.grad is not None
    assert_bitwise_equal(features.grad, expected)


def test_a_reference_from_inside_turns_into_the_original_outside(seen: list[str]) -> None:
    features, boxes, _ = scene()
    with tv.patched():
        ours = torchvision.ops.roi_align
    assert ours is not ORIGINAL
    assert_bitwise_equal(ours(features, boxes, 3), ORIGINAL(features, boxes, 3))
    assert seen == []


def test_multiscale_pooling_built_before_and_after(seen: list[str]) -> None:
    def build() -> MultiScaleRoIAlign:
        return MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)

    maps = {"0": torch.rand(1, 3, 16, 16), "1": torch.rand(1, 3, 8, 8)}
    boxes = [torch.tensor([[1.0, 1.0, 20.0, 20.0], [0.0, 0.0, 60.0, 60.0]])]
    before = build()
    plain = before(maps, boxes, [(64, 64)])
    with tv.patched():
        for pooler in (before, build()):
            result = pooler(maps, boxes, [(64, 64)])
            assert float((result - plain).abs().max()) <= 1e-5
    assert seen and set(seen) == {"roi_align"}


def small_detector(mask: bool) -> torch.nn.Module:
    from torchvision.models.detection import FasterRCNN, MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=4, padding=1), torch.nn.ReLU())
    backbone.out_channels = 8  # type: ignore[assignment]
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 9, 16), torch.nn.ReLU())
    options: dict[str, Any] = {
        "rpn_anchor_generator": AnchorGenerator(((16, 32),), ((1.0,),)),
        "box_roi_pool": MultiScaleRoIAlign(["0"], 3, 2),
        "box_head": head,
        "box_predictor": torchvision.models.detection.faster_rcnn.FastRCNNPredictor(16, 2),
        "min_size": 64,
        "max_size": 64,
        "rpn_post_nms_top_n_train": 50,
        "box_batch_size_per_image": 64,
    }
    if not mask:
        return FasterRCNN(backbone, **options)
    return MaskRCNN(
        backbone,
        mask_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
        mask_head=torch.nn.Conv2d(8, 8, 3, padding=1),
        mask_predictor=torchvision.models.detection.mask_rcnn.MaskRCNNPredictor(8, 8, 2),
        **options,
    )


def train_step(mask: bool, model: torch.nn.Module | None = None) -> dict[str, Tensor]:
    """Losses and gradients of one step, from the same weights and random draws each time."""
    model = small_detector(mask) if model is None else model
    model.zero_grad()
    torch.manual_seed(1)
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    box = torch.tensor([[5.0, 5.0, 30.0, 30.0], [20.0, 20.0, 60.0, 50.0]])
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 5:30, 5:30] = masks[1, 20:50, 20:60] = 1
    target = {"boxes": box, "labels": torch.tensor([1, 1]), "masks": masks}
    losses = model(images, [dict(target) for _ in range(2)])
    sum(losses.values()).backward()
    result = {name: loss.detach() for name, loss in losses.items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        result[name] = parameter.grad.clone()
    return result


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Hands the RoIs to the RoIAlign in force in another order, and its rows back sorted."""
    poolers = sys.modules["torchvision.ops.poolers"]

    def start(seed: int) -> None:
        function = vars(poolers)["roi_align"]

        def shuffling(features: Tensor, boxes: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            order = torch.randperm(len(boxes), generator=torch.Generator().manual_seed(seed))
            result: Tensor = function(features, boxes[order], *args, **kwargs)
            return result[order.argsort()]

        monkeypatch.setattr(poolers, "roi_align", shuffling)

    return start


def steps(mode: str, shuffled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    results = []
    for seed in (None, 1, 2, 3):
        state = torch.get_rng_state()
        with tv.patched(mode):
            if seed is not None:
                shuffled(seed)
            results.append(train_step(mask=False))
            monkeypatch.undo()
        torch.set_rng_state(state)
    return results


def test_a_training_step_has_the_same_bits_for_any_order_of_rois(
    shuffled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = steps("fixed_point", shuffled, monkeypatch)
    for other in others:
        assert_bitwise_equal(other, first)


def test_negative_control_a_plain_training_step_has_not(
    shuffled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = steps("off", shuffled, monkeypatch)
    name = "backbone.0.weight"
    assert any(not torch.equal(other[name], first[name]) for other in others)


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_mask_rcnn_built_before_the_patch_trains_and_uses_it(mode: str, seen: list[str]) -> None:
    state = torch.get_rng_state()
    model = small_detector(mask=True)
    plain = train_step(True, model)
    assert seen == []
    with tv.patched(mode):
        ours = train_step(True, model)
    torch.set_rng_state(state)
    # Box head, mask targets and mask head.
    assert len(seen) == 2 + 2
    for name, value in plain.items():
        # Against the float kernel: only the order of sums and, for 'truncate', 11 bits differ.
        assert torch.allclose(ours[name], value, rtol=0.05, atol=5e-3), name


def test_scripted_code_compiles_the_original_and_its_gradient_is_ours(fresh_jit: None) -> None:
    expected = gradient_of(truncdet.roi_align)
    with tv.patched():
        with pytest.warns(RuntimeWarning, match=r"torch\.jit\.script uses torchvision's own"):
            scripted = torch.jit.script(RoIAlign(3, 1.0, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            torch.jit.script(RoIAlign(3, 0.5, 2))
        assert_bitwise_equal(gradient_of(lambda x, b, *_, **__: scripted(x, b)), expected)
        torch.jit.script(torchvision.ops.roi_align)
    assert_bitwise_equal(gradient_of(lambda x, b, *_, **__: scripted(x, b)), gradient_of(ORIGINAL))


def test_traced_code_records_the_original_and_its_gradient_is_ours() -> None:
    features, boxes, _ = scene()
    expected = gradient_of(truncdet.roi_align)
    with tv.patched():
        with pytest.warns(RuntimeWarning, match=r"torch\.jit\.trace uses torchvision's own"):
            traced = torch.jit.trace(RoIAlign(3, 1.0, 2), (features, boxes))
        assert_bitwise_equal(gradient_of(lambda x, b, *_, **__: traced(x, b)), expected)
    assert "torchvision::roi_align" in str(traced.inlined_graph)


def test_a_symbolic_trace_keeps_one_call_and_obeys_the_patch_when_it_runs(
    seen: list[str],
) -> None:
    features, boxes, _ = scene()
    with tv.patched():
        graph = torch.fx.symbolic_trace(RoIAlign(3, 1.0, 2))
        assert [node.name for node in graph.graph.nodes if node.op == "call_function"] == [
            "roi_align"
        ]
        graph(features, boxes)
        assert seen == ["roi_align"]
        saved = pickle.dumps(graph)  # names torchvision's function, so it loads without us
    assert_bitwise_equal(graph(features, boxes), ORIGINAL(features, boxes, 3, 1.0, 2))
    assert seen == ["roi_align"]
    again = pickle.loads(saved)
    assert_bitwise_equal(again(features, boxes), ORIGINAL(features, boxes, 3, 1.0, 2))


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_compiled_code_has_the_bits_of_eager_code_and_follows_the_patch(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(RoIAlign(3, 1.0, 2), backend="aot_eager", fullgraph=True)
    with tv.patched(mode):
        expected = gradient_of(torchvision.ops.roi_align)
        assert_bitwise_equal(gradient_of(lambda x, b, *_, **__: compiled(x, b)), expected)
    assert_bitwise_equal(gradient_of(lambda x, b, *_, **__: compiled(x, b)), gradient_of(ORIGINAL))


def test_quantized_features_go_to_the_original(seen: list[str]) -> None:
    features, boxes, _ = scene()
    quantized = torch.quantize_per_tensor(features.detach()[:1], 0.1, 0, torch.qint8)
    rois = torch.quantize_per_tensor(boxes * torch.tensor([0.0, 1, 1, 1, 1]), 0.1, 0, torch.qint8)
    expected = ORIGINAL(quantized, rois, 3)
    with tv.patched():
        assert torch.equal(
            torchvision.ops.roi_align(quantized, rois, 3).int_repr(), expected.int_repr()
        )
    assert seen == []


def test_an_unknown_device_goes_to_the_original_and_says_so() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    features, boxes, _ = scene()
    elsewhere = features.detach().as_subclass(Elsewhere)
    for _ in range(2):  # once for each time it is patched
        with tv.patched(), pytest.warns(RuntimeWarning, match="device mps uses torchv") as caught:
            torchvision.ops.roi_align(elsewhere, boxes, 3)
            torchvision.ops.roi_align(elsewhere, boxes, 3)
        assert len(caught) == 1


def test_modes_are_checked() -> None:
    with pytest.raises(ValueError, match="patch: mode must not be 'snap' for RoIAlign: its contr"):
        tv.patch("snap")
    with pytest.raises(ValueError, match="patched: mode must not be 'snap'"):
        tv.patched("snap").__enter__()
    with pytest.raises(ValueError, match="mode must be one of fixed_point, truncate, off, got 'x'"):
        tv.patch("x")


@pytest.mark.parametrize("version", ["0.25.0", "0.30.0", "1.0"])
def test_untested_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(torchvision, "__version__", version)
    with pytest.raises(truncdet.TruncdetError, match=r">= 0\.26 and < 0\.30, the tested range"):
        tv.patch()
    with tv.patched(allow_untested=True):
        assert tv.is_patched()


def test_the_backward_schema_is_the_one_the_kernel_was_written_for() -> None:
    schema = torch.ops.torchvision._roi_align_backward.default._schema
    assert [a.name for a in schema.arguments] == list(
        inspect.signature(tv._backward_kernel).parameters
    )


def test_patching_prints_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tv.patched():
            features, boxes, _ = scene()
            torchvision.ops.roi_align(features, boxes, 3).sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_cuda_gradients_have_the_bits_of_the_cpu(way: str) -> None:
    expected = gradient_of(truncdet.roi_align)
    features, boxes, upstream = scene()
    on_gpu = features.detach().cuda().requires_grad_()
    with tv.patched():
        WAYS[way](on_gpu, boxes.cuda(), 3, sampling_ratio=2).backward(upstream.cuda())
    assert on_gpu.grad is not None
    assert_bitwise_equal(on_gpu.grad.cpu(), expected)
