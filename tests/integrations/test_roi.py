"""Recipes for RoIAlign: what each mode runs, does to features and boxes, and declines."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from truncdet.integrations import _roi as roi
from truncdet.integrations._precision import keep_precision
from truncdet.integrations._roi import Recipe, make_function

import truncdet
from truncdet.testing import assert_bitwise_equal

ARGUMENTS = ((3, 2), 0.5, 2, True)
LITERALLY = Recipe("truncate", literal=True)
COMMON = roi.from_torchvision(torchvision.ops.roi_align)


def scene(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features [2, 3, 16, 16] and boxes [40, 5] whose coordinates are no half numbers."""
    draw = torch.Generator().manual_seed(0)
    corner = torch.rand(40, 2, generator=draw) * 20
    size = torch.rand(40, 2, generator=draw) * 12 + 1
    image = torch.randint(0, 2, (40, 1), generator=draw).float()
    features = torch.randn(2, 3, 16, 16, generator=draw).to(dtype).requires_grad_()
    return features, torch.cat([image, corner, corner + size], 1)


def run(function: Callable[..., Any], features: Tensor, boxes: Any, *rest: Any) -> list[Tensor]:
    """The result and the gradient of its sum."""
    result = function(features, boxes, *(rest or ARGUMENTS))
    (gradient,) = torch.autograd.grad(result.float().square().sum(), features)
    return [result.detach(), gradient]


def spying(seen: list[Any]) -> Callable[..., Any]:
    def original(input: Tensor, boxes: Any, *rest: Any) -> Any:
        seen.append((input.detach(), boxes))
        return COMMON(input, boxes, *rest)

    return original


def test_fixed_point_is_our_operator() -> None:
    features, boxes = scene()
    seen: list[Any] = []
    function = make_function(spying(seen), Recipe("fixed_point"))
    expected = run(truncdet.roi_align, features, boxes)
    assert_bitwise_equal(run(function, features, boxes), expected)
    assert_bitwise_equal(run(function, features, keep_precision(boxes)), expected)
    largest = run(lambda *a: truncdet.roi_align(*a, pool_mode="max"), features, boxes)
    assert_bitwise_equal(run(function, features, boxes, *ARGUMENTS, "max"), largest)
    assert not torch.equal(largest[0], expected[0])
    assert seen == []


def test_fixed_point_keeps_coordinates_in_float32_beside_half_features() -> None:
    features, boxes = scene(torch.float16)
    function = make_function(COMMON, Recipe("fixed_point"))
    result = run(function, features, keep_precision(boxes).type_as(features))
    assert_bitwise_equal(result, run(truncdet.roi_align, features, boxes))
    assert not torch.equal(result[0], truncdet.roi_align(features, boxes.half(), *ARGUMENTS))


def test_our_operator_gets_ordinary_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    features, boxes = scene()
    kinds: list[type] = []
    monkeypatch.setattr(truncdet, "roi_align", lambda _, boxes, *rest: kinds.append(type(boxes)))
    make_function(COMMON, Recipe("fixed_point"))(features, keep_precision(boxes), *ARGUMENTS)
    assert kinds == [Tensor]


def test_off_is_the_original_itself() -> None:
    assert make_function(COMMON, Recipe("off")) is COMMON
    assert Recipe("off") == roi.OFF


@pytest.mark.parametrize("kept", [False, True])
def test_truncate_rounds_features_and_leaves_boxes_whole(kept: bool) -> None:
    features, boxes = scene()
    given: list[Any] = []
    function = make_function(spying(given), Recipe("truncate"))
    result = run(function, features, keep_precision(boxes) if kept else boxes)
    expected = run(truncdet.wrap(COMMON, truncate_args=(0,)), features, boxes)
    assert_bitwise_equal(result, expected)
    ((inside, rois),) = given
    assert type(rois) is Tensor
    assert_bitwise_equal(rois, boxes.double())
    assert_bitwise_equal(inside, truncdet.truncate(features.detach(), bits=11).double())


def test_truncate_literally_is_the_published_line() -> None:
    features, boxes = scene()
    given: list[Any] = []
    function = make_function(spying(given), LITERALLY)

    def published(input: Tensor, rois: Tensor, *rest: Any) -> Any:
        result = COMMON(input.half().double(), rois.half().double(), *rest)
        return result.to(dtype=input.dtype)

    expected = run(published, features, boxes)
    assert_bitwise_equal(run(function, features, boxes), expected)
    assert_bitwise_equal(run(function, features, keep_precision(boxes)), expected)
    assert_bitwise_equal(given[0][1], boxes.half().double())
    per_image = [boxes[boxes[:, 0] == i, 1:] for i in range(2)]
    order = boxes[:, 0].argsort(stable=True)
    listed = function(features, per_image, *ARGUMENTS)
    assert_bitwise_equal(listed, expected[0][order])
    # It differs from the recipe that leaves rois whole.
    assert not torch.equal(
        expected[0], make_function(COMMON, Recipe("truncate"))(features, boxes, *ARGUMENTS)
    )


def test_literally_features_overflow_as_the_warning_says() -> None:
    features, boxes = scene()
    large = features.detach() * 1e5
    result = make_function(COMMON, LITERALLY)(large, boxes, *ARGUMENTS)
    assert not bool(result.isfinite().all())
    assert bool(
        make_function(COMMON, Recipe("truncate"))(large, boxes, *ARGUMENTS).isfinite().all()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_recipe_returns_the_dtype_of_the_features(dtype: torch.dtype) -> None:
    features, boxes = scene(dtype)
    for recipe in (Recipe("fixed_point"), Recipe("truncate"), LITERALLY):
        result, gradient = run(make_function(COMMON, recipe), features, boxes)
        assert result.dtype == gradient.dtype == dtype


def test_frameworks_orders_of_arguments() -> None:
    given: list[Any] = []

    def record(*args: Any) -> None:
        given.append(args)

    roi.from_torchvision(record)("input", "boxes", 7, 0.5, 2, True, "max")
    roi.from_mmcv(record)("input", "boxes", 7, 0.5, 2, True, "max")
    roi.from_mmcv(record)("input", "boxes", 7, 0.5, 2, True)
    assert given == [
        ("input", "boxes", 7, 0.5, 2, True),
        ("input", "boxes", 7, 0.5, 2, "max", True),
        ("input", "boxes", 7, 0.5, 2, "avg", True),
    ]


def test_recipes_are_values() -> None:
    assert copy.deepcopy(LITERALLY) == pickle.loads(pickle.dumps(LITERALLY)) == LITERALLY
    assert len({Recipe("truncate"), Recipe("truncate"), LITERALLY}) == 2


def test_arguments_are_checked_in_the_callers_name() -> None:
    with pytest.raises(ValueError, match=r"^f: mode must not be 'snap' for RoIAlign: its contrib"):
        roi.recipe("snap", False, "f")
    with pytest.raises(ValueError, match=r"^f: mode must be one of fixed_point, truncate, off, go"):
        roi.recipe("x", False, "f")
    message = r"literal must be False unless mode is 'truncate', got True for mode 'fixed_point'$"
    with pytest.raises(ValueError, match=f"^f: {message}"):
        roi.recipe("fixed_point", True, "f")
    with pytest.raises(ValueError, match=f"^Recipe: {message}"):
        Recipe("fixed_point", True)
    with pytest.raises(TypeError, match=r"^f: literal must be a bool, got 'yes'$"):
        roi.recipe("truncate", "yes", "f")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Recipe: mode must be one of"):
        Recipe("x")
    with pytest.raises(TypeError, match="Recipe: literal must be a bool, got 1"):
        Recipe("truncate", 1)  # type: ignore[arg-type]


def test_what_is_declined_and_why() -> None:
    features, boxes = scene()
    assert roi.declined(features, boxes) is None
    assert roi.declined(features.detach().to("meta"), boxes) is None
    assert roi.declined([features], boxes) == ""
    assert roi.declined(torch.empty(1, device="meta").as_subclass(Elsewhere), boxes) == "device mps"
    quantized = torch.quantize_per_tensor(features.detach(), 0.1, 0, torch.qint8)
    assert roi.declined(quantized, boxes) == ""
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    symbolic = "a symbolic trace (torch.fx)"
    assert roi.declined(proxy, boxes) == roi.declined(features, proxy) == symbolic

    reasons: list[Any] = []

    def traced(x: Tensor) -> Tensor:
        reasons.append(roi.declined(x, boxes))
        return x + 1

    torch.jit.trace(traced, features.detach(), check_trace=False)
    assert reasons == ["torch.jit.trace"]


class Elsewhere(Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("mps")


def test_an_original_kernel_gets_plain_boxes_in_the_dtype_of_the_features() -> None:
    features, boxes = scene(torch.float16)
    given = roi.for_original(features, keep_precision(boxes))
    assert type(given) is Tensor
    assert_bitwise_equal(given, boxes.half())
    # Other boxes are the caller's affair, with the original's own errors.
    assert roi.for_original(features, boxes) is boxes
    as_list = [boxes]
    assert roi.for_original(features, as_list) is as_list


def test_a_notice_is_given_once_a_reason() -> None:
    notices = roi.Notices("me: {reason} is not mine")

    def fallen_back(reason: str) -> None:
        notices.say(reason)

    with pytest.warns(RuntimeWarning) as caught:
        for reason in ("one", "one", "", "two", "one"):
            fallen_back(reason)
    assert [str(w.message) for w in caught] == ["me: one is not mine", "me: two is not mine"]
    assert {w.filename for w in caught} == {__file__}
    notices.forget()
    with pytest.warns(RuntimeWarning, match="one"):
        notices.say("one")


def test_asking_for_the_literal_recipe_warns_of_what_it_does() -> None:
    def patch(literal: bool) -> Recipe:
        return roi.recipe("truncate", literal, "patch")

    with pytest.warns(UserWarning) as caught:
        assert patch(True) == LITERALLY
        assert patch(False) == Recipe("truncate")
    (warning,) = caught
    assert warning.filename == __file__
    for word in ("patch: literal=True", "half", "2048 pixels", "65504 overflow", "2^-25"):
        assert word in str(warning.message)
