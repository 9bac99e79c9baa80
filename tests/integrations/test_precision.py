"""Boxes that keep their precision: what a cast leaves alone, what stays boxes, what is plain."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from truncdet.integrations._precision import PreciseBoxes, keep_precision, keep_rois, plain

import truncdet
from truncdet.testing import assert_bitwise_equal

# Neither half nor bfloat16 holds these coordinates, and half the second batch index.
ROWS = [[0.0, 1.3, 2.7, 2049.3, 47.1], [2049.0, 1.1, 2.2, 201.3, 147.7]]
HALF = torch.zeros(1, dtype=torch.float16)


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(ROWS, dtype=dtype)


def same_boxes(actual: object, expected: Tensor) -> None:
    """Asserts that these are boxes of these bits: compared as ordinary tensors."""
    assert isinstance(actual, PreciseBoxes)
    assert_bitwise_equal(plain(actual), expected)


NARROWING: dict[str, Callable[[Tensor], Any]] = {
    "half": lambda b: b.half(),
    "bfloat16": lambda b: b.bfloat16(),
    "to dtype": lambda b: b.to(torch.float16),
    "to dtype by name": lambda b: b.to(dtype=torch.bfloat16),
    "to device and dtype": lambda b: b.to("cpu", torch.float16),
    "to like": lambda b: b.to(HALF),
    "to a copy": lambda b: b.to(torch.float16, copy=True),
    "type_as": lambda b: b.type_as(HALF),
    "type": lambda b: b.type(torch.float16),
    "type by name": lambda b: b.type("torch.HalfTensor"),
}


@pytest.mark.parametrize("way", NARROWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_narrowing_casts_only_copy(way: str, dtype: torch.dtype) -> None:
    boxes = rows(dtype)
    result = NARROWING[way](keep_precision(boxes))
    same_boxes(result, rows(dtype))
    result[:, 1:] += 1  # as after a cast, the caller's boxes do not change
    assert_bitwise_equal(boxes, rows(dtype))
    # The cast is one that rounds: on an ordinary tensor it changes the values.
    assert not torch.equal(NARROWING[way](rows(dtype)).to(dtype), rows(dtype))


def test_double_boxes_stay_double_beside_float_features() -> None:
    same_boxes(keep_precision(rows(torch.float64)).float(), rows(torch.float64))


def test_other_conversions_do_what_they_say() -> None:
    boxes = keep_precision(rows())
    same_boxes(boxes.to("cpu"), rows())
    assert boxes.to(torch.float32) is boxes
    assert type(boxes.long()) is Tensor and boxes.long().dtype == torch.int64
    assert boxes.to("meta", torch.float16).device.type == "meta"
    assert boxes.type() == "torch.FloatTensor"
    assert boxes.to(torch.float16).dtype == boxes.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_boxes_that_have_no_precision_to_keep_are_unchanged(dtype: torch.dtype) -> None:
    boxes = rows().to(dtype)
    assert keep_precision(boxes) is boxes


def test_tensors_of_other_subclasses_are_unchanged() -> None:
    class Theirs(Tensor):
        pass

    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3, 5)
    for boxes in (rows().as_subclass(Theirs), fake):
        assert keep_precision(boxes) is boxes
    same_boxes(keep_precision(nn.Parameter(rows())).half(), rows())


def test_it_is_idempotent_and_shares_memory_both_ways() -> None:
    boxes = rows()
    kept = keep_precision(boxes)
    assert keep_precision(kept) is kept and plain(boxes) is boxes
    back = plain(kept)
    assert type(back) is Tensor
    assert back.data_ptr() == kept.data_ptr() == boxes.data_ptr()
    assert back.half().dtype == torch.float16


def test_rows_of_boxes_keep_it() -> None:
    boxes = keep_precision(rows())
    for result, expected in (
        (boxes[boxes[:, 0] > 0], rows()[1:]),
        (boxes[torch.tensor([1])], rows()[1:]),
        (boxes[:1], rows()[:1]),
        (boxes[boxes[:, 0].long() == 0][:, 1:], rows()[:1, 1:]),
    ):
        same_boxes(result.half(), expected)
    boxes[:, 1:] *= 2
    same_boxes(boxes.mul_(1), rows() * torch.tensor([1.0, 2, 2, 2, 2]))


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "a column": lambda b: b[:, 1],
    "one box": lambda b: b[0],
    "a new dimension": lambda b: b[:, None],
    "arithmetic": lambda b: b * 0.5 + b,
    "stack": lambda b: torch.stack((b[:, 0], b[:, 1]), dim=-1),
    "cat": lambda b: torch.cat([b, b]),
    "split": lambda b: b.split(1)[0],
    "transpose": lambda b: b.t(),
    "detach": lambda b: b.detach(),
    "clone": lambda b: b.clone(),
    "double": lambda b: b.double(),
}


@pytest.mark.parametrize("way", COMPUTED)
def test_what_is_computed_of_them_is_ordinary(way: str) -> None:
    result = COMPUTED[way](keep_precision(rows()))
    assert type(result) is Tensor and result.half().dtype == torch.float16
    assert_bitwise_equal(result, COMPUTED[way](rows()))


def test_what_features_or_indices_take_part_in_is_plain() -> None:
    boxes, features = keep_precision(rows()), torch.ones(2, 5)
    for result in (
        boxes * features,
        features[boxes[:, 0].clamp(max=1).long()],
        torch.where(boxes > 0, boxes, features),
        nn.functional.linear(boxes, torch.ones(3, 5)),
        boxes > 0,
        boxes.nonzero(),
        boxes.new_zeros(2, 8, 7, 7),  # room for features, not boxes
        features.type_as(boxes),
        features.copy_(boxes),
    ):
        assert type(result) is Tensor
    pooled = torch.zeros(2, 5)
    pooled[boxes[:, 0] > 0] = boxes[1:].half()
    assert type(pooled) is Tensor
    assert_bitwise_equal(pooled[1:], rows()[1:])


def test_empty_boxes() -> None:
    boxes = keep_precision(torch.zeros(0, 5))
    same_boxes(boxes.half(), torch.zeros(0, 5))
    features = torch.zeros(1, 2, 4, 4, dtype=torch.float16)
    assert truncdet.roi_align(features, plain(boxes.type_as(features)), 3).shape == (0, 2, 3, 3)


def test_grad_modes() -> None:
    boxes = rows().requires_grad_()
    with torch.no_grad():
        same_boxes(keep_precision(boxes).half(), rows())
    with torch.inference_mode():
        same_boxes(keep_precision(rows()).half(), rows())
    keep_precision(boxes).half().sum().backward()
    assert boxes.grad is not None and type(boxes.grad) is Tensor
    assert_bitwise_equal(boxes.grad, torch.ones(2, 5))


def test_copies_and_pickles() -> None:
    boxes = keep_precision(rows())
    memo: dict[int, Any] = {}
    copied = copy.deepcopy([boxes, boxes], memo)
    assert copied[0] is copied[1] and copied[0].data_ptr() != boxes.data_ptr()
    same_boxes(copied[0].half(), rows())
    file = io.BytesIO()
    torch.save(boxes, file)
    file.seek(0)
    # weights_only allows no class of ours: it is saved as an ordinary tensor.
    for loaded in (pickle.loads(pickle.dumps(boxes)), torch.load(file, weights_only=True)):
        assert type(loaded) is Tensor
        assert_bitwise_equal(loaded, rows())


class Seen(nn.Module):
    """Records what its forward was given."""

    def forward(self, feats: Any, rois: Any, *rest: Any, **named: Any) -> Any:
        self.seen = (feats, rois, rest, named)
        return rois.to(torch.float16)


def seen_by(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    module = Seen()
    module.register_forward_pre_hook(keep_rois, with_kwargs=True)
    module(*args, **kwargs)
    return module.seen


LEVELS = (torch.zeros(1, 2, 4, 4, dtype=torch.float16),) * 2


@pytest.mark.parametrize(
    "features", [LEVELS[0], LEVELS, list(LEVELS)], ids=["one", "tuple", "list"]
)
def test_the_hook_keeps_the_boxes_of_layers_and_extractors(features: Any) -> None:
    boxes, scale = rows(), torch.ones(1)
    for args, kwargs in (
        ((features, boxes, scale), {"more": 1}),
        ((features,), {"rois": boxes, "more": 1}),
        ((), {"feats": features, "rois": boxes, "more": 1}),
    ):
        seen, rois, rest, named = seen_by(*args, **kwargs)
        assert seen is features and named == {"more": 1}
        same_boxes(rois, rows())
        assert len(rest) == max(len(args) - 2, 0) and all(item is scale for item in rest)
    assert type(boxes) is Tensor


def test_the_hook_keeps_boxes_under_any_of_their_names() -> None:
    def call(**kwargs: Any) -> Any:
        result = keep_rois(nn.Identity(), (), kwargs)
        return None if result is None else result[1]

    for feats, boxes in (("input", "rois"), ("input", "boxes"), ("x", "boxes"), ("feats", "rois")):
        result = call(**{feats: LEVELS[0], boxes: rows()})
        same_boxes(result[boxes], rows())
        assert set(result) == {feats, boxes}
    assert call(other=LEVELS[0], rois=rows()) is None
    assert call(input=LEVELS[0]) is None


@pytest.mark.parametrize(
    ("features", "boxes"),
    [
        (torch.zeros(1), rows()),
        (torch.zeros(1, dtype=torch.float64), rows()),
        (torch.zeros(1, dtype=torch.int64), rows()),
        (HALF, rows().half()),
        (HALF, rows().long()),
        (HALF, [rows()]),
        ((), rows()),
        ({"0": HALF}, rows()),
        (None, rows()),
    ],
)
def test_the_hook_leaves_everything_else_alone(features: Any, boxes: Any) -> None:
    assert keep_rois(nn.Identity(), (features, boxes), {}) is None
    assert keep_rois(nn.Identity(), (features,), {"rois": boxes}) is None


def test_the_hook_is_copied_and_pickled_with_its_module() -> None:
    module = Seen()
    module.register_forward_pre_hook(keep_rois, with_kwargs=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(HALF, rows())
        same_boxes(other.seen[1], rows())


class Casting(nn.Module):
    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        return rois.type_as(input)


def test_a_trace_records_the_cast() -> None:
    module = Casting()
    module.register_forward_pre_hook(keep_rois, with_kwargs=True)
    same_boxes(module(HALF, rows()), rows())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, (HALF, rows()))
    assert_bitwise_equal(traced(HALF, rows()), rows().half())
    graph = torch.fx.symbolic_trace(module)
    assert_bitwise_equal(graph(HALF, rows()), rows().half())


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_records_the_cast(strict: bool) -> None:
    module = Casting()
    module.register_forward_pre_hook(keep_rois, with_kwargs=True)
    exported = torch.export.export(module, (HALF, rows()), strict=strict)
    assert_bitwise_equal(exported.module()(HALF, rows()), rows().half())


class Extractor(nn.Module):
    """Casts, branches on what boxes hold and pools, as extractors do."""

    def forward(self, feats: Any, rois: Tensor) -> Tensor:
        rois = rois.type_as(feats[0])
        out = feats[0].new_zeros(rois.size(0), 3, 3, 3)
        wide = rois[:, 3] - rois[:, 1] > 500
        for chosen in (wide, ~wide):
            index = chosen.nonzero().squeeze(1)
            if index.numel() > 0:
                out[index] = truncdet.roi_align(feats[0], plain(rois[index]), 3, 1 / 128)
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = Extractor()

    def forward(self, feats: Any, rois: Tensor) -> Tensor:
        return self.extractor([level * 2 for level in feats], rois) + 1


@pytest.mark.parametrize("whole", [False, True], ids=["extractor", "head around it"])
def test_compiled_code_pools_the_same(whole: bool) -> None:
    features = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    boxes = rows() * torch.tensor([0.0, 1, 1, 1, 1])
    head = Head()
    module: nn.Module = head if whole else head.extractor
    rounded = module((features,), boxes)
    head.extractor.register_forward_pre_hook(keep_rois, with_kwargs=True)
    expected = module((features,), boxes)
    assert not torch.equal(expected, rounded)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        result = compiled((features,), boxes)
        assert type(result) is Tensor
        assert_bitwise_equal(result, expected)
    assert_bitwise_equal(compiled(feats=(features,), rois=boxes), expected)
