"""mmcv under the patch: every way to RoIAlign, average and max, and back again."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import _mmcv_needed  # noqa: F401
import mmcv
import mmcv.ops
import pytest
import torch
import torchvision
from _mmcv_cases import FORMS, HELD, MMCVS, WAYS, differs, function, original, run, scene
from mmcv.ops import RoIAlign
from mmcv.ops.roi_align import RoIAlignFunction
from torch import Tensor
from truncdet.integrations import mmcv as integration
from truncdet.integrations._precision import keep_precision
from truncdet.integrations._roi import Recipe, from_mmcv, make_function

import truncdet
from truncdet.testing import assert_bitwise_equal

FORWARD = vars(RoIAlign)["forward"]
NAMES = (
    ("mmcv.ops", "roi_align"),
    ("mmcv.ops.roi_align", "roi_align"),
    ("_mmcv_cases", "imported"),
)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    assert not integration.is_patched()
    for module, name in NAMES:
        assert vars(sys.modules[module])[name] is HELD[0]
    assert vars(RoIAlign)["forward"] is FORWARD
    assert "apply" not in vars(RoIAlignFunction)


@pytest.mark.parametrize("way", WAYS)
def test_negative_control_the_plain_gradient_depends_on_the_order(way: str) -> None:
    assert differs(WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool_mode", ["avg", "max"])
def test_fixed_point_gradients_do_not_depend_on_the_order(way: str, pool_mode: str) -> None:
    with integration.patched():
        assert not differs(WAYS[way], pool_mode=pool_mode)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fixed_point_has_the_bits_of_our_operator_and_the_values_of_mmcv(
    way: str, form: dict[str, Any]
) -> None:
    plain = run(WAYS[way], **form)
    with integration.patched():
        ours = run(WAYS[way], **form)
    # torchvision only averages, and mmcv lets it.
    pool_mode = form["pool_mode"] if way in MMCVS else "avg"

    def operator(features: Tensor, boxes: Tensor) -> Tensor:
        return truncdet.roi_align(
            features, boxes, (3, 2), 0.5, form["sampling_ratio"], form["aligned"], pool_mode
        )

    assert_bitwise_equal(ours, run(operator))
    largest = float(scene()[0].detach().abs().max())
    assert float((ours[0] - plain[0]).abs().max()) <= 1e-5 * largest
    # Float32 sums of up to 60 RoIs' gradients, in another order.
    assert torch.allclose(ours[1], plain[1], rtol=1e-4, atol=1e-4)


def test_our_average_and_maximum_are_told_apart() -> None:
    with integration.patched():
        average, maximum = (run(WAYS["RoIAlign"], pool_mode=mode)[0] for mode in ("avg", "max"))
    assert float((average - maximum).abs().max()) > 0.1


def test_defaults_and_sizes_are_those_of_mmcv() -> None:
    features, boxes, _ = scene()
    expected = original(features, boxes, 3)
    with integration.patched():
        assert (
            float((mmcv.ops.roi_align(features, boxes, 3) - expected).detach().abs().max()) <= 1e-5
        )
        assert_bitwise_equal(
            mmcv.ops.roi_align(features, boxes, 3),
            mmcv.ops.roi_align(features, boxes, (3, 3), 1.0, 0, "avg", True),
        )
        assert mmcv.ops.roi_align(features, boxes[:0], 3).shape == (0, 3, 3, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("literal", [False, True])
def test_truncate_is_the_recipe_around_mmcvs_own_kernel(way: str, literal: bool) -> None:
    held = original if way in MMCVS else mmcv_form(torchvision.ops.roi_align)
    expected = run(function(lambda: recipe_around(held, literal)))
    with recipe_warning(literal), integration.patched("truncate", literal=literal):
        ours = run(WAYS[way])
        assert not differs(WAYS[way])
    assert_bitwise_equal(ours, expected)
    plain = run(WAYS[way])
    assert not torch.equal(ours[0], plain[0])
    # 11 bits, and literally also those of the coordinates.
    assert torch.allclose(ours[0], plain[0], atol=0.05 if literal else 2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_truncate_runs_the_kernel_that_the_layer_asks_for(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, calls = torchvision.ops.roi_align, []

    def spy(*args: Any) -> Any:
        calls.append(args)
        return theirs(*args)

    monkeypatch.setattr(torchvision.ops, "roi_align", spy)
    with integration.patched("truncate"):
        run(WAYS[way])
    assert len(calls) == (0 if way in MMCVS else 1)


def mmcv_form(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, b, size, scale, ratio, _, aligned: function(x, b, size, scale, ratio, aligned)


def recipe_around(held: Callable[..., Any], literal: bool) -> Callable[..., Any]:
    made = make_function(from_mmcv(held), Recipe("truncate", literal))
    return lambda x, b, size, scale, ratio, pool, aligned: made(
        x, b, size, scale, ratio, aligned, pool
    )


def recipe_warning(literal: bool) -> Any:
    if literal:
        return pytest.warns(UserWarning, match="features and rois through half to double")
    return warnings.catch_warnings()


def test_off_is_the_original_to_the_bit() -> None:
    expected = run(WAYS["RoIAlign"])
    with integration.patched("truncate"), integration.patched("off"):
        assert mmcv.ops.roi_align is HELD[0]
        assert_bitwise_equal(run(WAYS["RoIAlign"]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_references_from_inside_turn_into_the_original_outside(way: str) -> None:
    expected = run(WAYS[way])
    with integration.patched():
        ours, apply = mmcv.ops.roi_align, RoIAlignFunction.apply
        forward = RoIAlign((3, 2), 0.5, use_torchvision=True).forward
        assert not torch.equal(run(function(lambda: ours))[1], expected[1])
    if way in MMCVS:
        assert_bitwise_equal(run(function(lambda: ours)), expected)
        assert_bitwise_equal(run(function(lambda: apply)), expected)
    else:
        assert_bitwise_equal(run(forward), expected)


def test_the_mode_is_frozen_at_forward_time() -> None:
    features, boxes, upstream = scene()
    with integration.patched():
        expected = run(WAYS["RoIAlign"])[1]
        result = WAYS["RoIAlign"](features, boxes)
    (gradient,) = torch.autograd.grad(result, features, upstream)
    assert_bitwise_equal(gradient, expected)
    assert not torch.equal(run(WAYS["RoIAlign"])[1], expected)


def test_subclasses_keep_what_they_define() -> None:
    class Doubled(RoIAlignFunction):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            first, *rest = RoIAlignFunction.backward(ctx, gradient)
            return (2 * first, *rest)

    class Layer(RoIAlign):  # type: ignore[misc]
        def forward(self, input: Tensor, rois: Tensor) -> Any:
            return super().forward(input, rois) + 1

    plain, doubled = run(WAYS["RoIAlign"]), run(function(lambda: Doubled.apply))
    assert_bitwise_equal(doubled[1], 2 * plain[1])
    for through in (False, True):
        subclass = Layer((3, 2), 0.5, use_torchvision=through)
        with integration.patched():
            assert_bitwise_equal(run(function(lambda: Doubled.apply)), doubled)
            assert_bitwise_equal(run(subclass)[0], run(WAYS["RoIAlign"])[0] + 1)
            assert not differs(subclass)


def test_torchvision_itself_is_not_patched_and_may_be_besides() -> None:
    from truncdet.integrations import torchvision as tv

    before = torchvision.ops.roi_align
    way = WAYS["through torchvision"]
    with integration.patched():
        ours = run(way)
        assert torchvision.ops.roi_align is before and not tv.is_patched()
        with tv.patched():
            assert_bitwise_equal(run(way), ours)
    with integration.patched("truncate"):
        rounded = run(way)
        with tv.patched("truncate"):
            assert_bitwise_equal(run(way), rounded)
    with tv.patched():  # without ours, the layer calls torchvision's name
        assert_bitwise_equal(run(way), ours)


@pytest.mark.parametrize("way", WAYS)
def test_boxes_keep_their_precision_beside_half_features(way: str) -> None:
    features, boxes, _ = scene()
    features = features.detach().half()
    with integration.patched():
        whole = WAYS[way](features, keep_precision(boxes).type_as(features))
        assert_bitwise_equal(whole, WAYS[way](features, boxes))
        rounded = WAYS[way](features, boxes.half())
    assert whole.dtype == torch.float16 and not torch.equal(whole, rounded)


@pytest.mark.parametrize("way", WAYS)
def test_an_original_kernel_gets_the_boxes_it_would_have_got(way: str) -> None:
    features, boxes, _ = scene()
    features = features.detach().half()
    given: list[Tensor] = []

    def traced(input: Tensor) -> Any:
        given.append(WAYS[way](input, keep_precision(boxes)))
        return given[-1]

    expected = WAYS[way](features, boxes.half())
    with integration.patched(), pytest.warns(RuntimeWarning, match="uses the original roi_align"):
        torch.jit.trace(traced, features, check_trace=False)
    assert_bitwise_equal(given[0], expected)


def trace(module: torch.nn.Module) -> Any:
    """Two traces of a layer, of which the second brings no second notice."""
    features, boxes, _ = scene()
    with pytest.warns(RuntimeWarning, match=r"torch\.jit\.trace uses the original") as caught:
        torch.jit.trace(module, (features, boxes), check_trace=False)
        traced = torch.jit.trace(module, (features, boxes), check_trace=False)
    assert sum("uses the original" in str(w.message) for w in caught) == 1
    assert "truncdet::" not in str(traced.inlined_graph)
    return traced


def test_a_trace_records_mmcvs_function_and_obeys_the_patch_when_it_runs() -> None:
    module = RoIAlign((3, 2), 0.5)
    with integration.patched():
        traced = trace(module)
        assert "RoIAlignFunction" in str(traced.inlined_graph)
        assert_bitwise_equal(run(traced), run(module))
    assert_bitwise_equal(run(traced), run(module))


def test_a_trace_through_torchvision_records_torchvisions_operator() -> None:
    module = RoIAlign((3, 2), 0.5, use_torchvision=True)
    expected = run(module)
    with integration.patched():
        traced = trace(module)
        assert "torchvision::roi_align" in str(traced.inlined_graph)
        assert_bitwise_equal(run(traced), expected)


def test_an_unknown_device_goes_to_the_original_and_says_so() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    features, boxes, _ = scene()
    elsewhere = features.detach().as_subclass(Elsewhere)
    with integration.patched(), pytest.warns(RuntimeWarning, match="device mps uses the orig"):
        result = mmcv.ops.roi_align(elsewhere, boxes, 3)
    assert torch.equal(result.as_subclass(Tensor), original(features, boxes, 3).detach())


@pytest.mark.parametrize("use_torchvision", [False, True])
def test_compiled_code_obeys_the_patch_and_its_end(use_torchvision: bool) -> None:
    torch._dynamo.reset()
    module = RoIAlign((3, 2), 0.5, 2, use_torchvision=use_torchvision)
    plain = run(module)
    compiled = torch.compile(module, backend="aot_eager")
    with integration.patched():
        assert_bitwise_equal(run(compiled), run(module))
        assert not torch.equal(run(compiled)[1], plain[1])
    assert_bitwise_equal(run(compiled), plain)


def test_layers_are_copied_and_saved_while_patched() -> None:
    module = RoIAlign((3, 2), 0.5, use_torchvision=True)
    with integration.patched():
        copied, saved = copy.deepcopy(module), pickle.dumps((module, mmcv.ops.roi_align))
        expected = run(copied)
    loaded, held = pickle.loads(saved)
    assert held is HELD[0]
    with integration.patched():
        assert_bitwise_equal(run(loaded), expected)


def test_modules_imported_while_patched_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    late = type(sys)("late_module")
    monkeypatch.setitem(sys.modules, "late_module", late)
    with integration.patched():
        exec("from mmcv.ops import roi_align", vars(late))
        assert late.roi_align is mmcv.ops.roi_align is not HELD[0]
    assert late.roi_align is HELD[0]


def test_the_surface() -> None:
    assert integration.unpatch() is False and integration.mode() == "off"
    integration.patch()
    integration.patch()
    integration.patch("truncate")
    assert integration.mode() == "truncate" and integration.is_patched()
    with pytest.raises(KeyError), integration.patched("fixed_point"):
        raise KeyError
    assert integration.mode() == "truncate"
    assert integration.unpatch() is True
    assert integration.unpatch() is False


def test_a_failed_switch_goes_on_in_the_mode_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyError

    with integration.patched():
        expected = run(WAYS["RoIAlign"])
        monkeypatch.setattr(integration, "apply_of", fail)
        with pytest.raises(KeyError):
            integration.patch("truncate")
        assert integration.mode() == "fixed_point"
        for way in WAYS.values():
            assert_bitwise_equal(run(way), expected)


def test_literal_and_not_are_two_modes() -> None:
    with integration.patched("truncate"):
        whole = run(WAYS["RoIAlign"])
        with pytest.warns(UserWarning, match="literal"):
            integration.patch("truncate", literal=True)
        assert not torch.equal(run(WAYS["RoIAlign"])[0], whole[0])
        integration.patch("truncate")
        assert_bitwise_equal(run(WAYS["RoIAlign"]), whole)


def test_arguments_are_checked() -> None:
    where = r"truncdet\.integrations\.mmcv\.patch"
    with pytest.raises(ValueError, match=f"{where}: mode must not be 'snap' for RoIAlign"):
        integration.patch("snap")
    with pytest.raises(ValueError, match=f"{where}ed: mode must be one of fixed_point, trunc"):
        integration.patched("x").__enter__()
    with pytest.raises(ValueError, match=f"{where}: literal must be False unless mode is 'trunc"):
        integration.patch(literal=True)


@pytest.mark.parametrize("version", ["2.0.1", "2.2.0", "2.3.6", "1.7.2"])
def test_untested_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(mmcv, "__version__", version)
    with pytest.raises(truncdet.TruncdetError, match=r"mmcv must be >= 2\.1 and < 2\.2, the test"):
        integration.patch()
    with integration.patched(allow_untested=True):
        assert integration.is_patched()


def test_importing_the_integration_imports_no_mmcv() -> None:
    code = "import sys, truncdet.integrations.mmcv; assert 'mmcv' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_cuda_gradients_have_the_bits_of_the_cpu(way: str) -> None:
    features, boxes, upstream = scene()
    on_gpu = features.detach().cuda().requires_grad_()
    with integration.patched():
        expected = run(WAYS[way])
        result = WAYS[way](on_gpu, boxes.cuda())
    (gradient,) = torch.autograd.grad(result, on_gpu, upstream.cuda())
    assert_bitwise_equal([result.detach().cpu(), gradient.cpu()], expected)
