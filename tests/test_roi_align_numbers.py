"""Integers of any kind, sizes of any kind, and lists of boxes that are shorter than the batch."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet import roi_align
from truncdet.testing import assert_bitwise_equal

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
B = torch.tensor([[0.0, 1.0, 1.0, 6.0, 7.0], [1.0, 0.0, 2.0, 5.0, 5.0]])
SIZES = [np.int64(3), np.int32(3), np.array(3), np.array([3, 3]), [np.int64(3)] * 2, (3, 3)]


@pytest.mark.parametrize("size", SIZES, ids=repr)
@pytest.mark.parametrize("ratio", [2, np.int64(2), np.uint8(2), np.array(2)], ids=repr)
@pytest.mark.parametrize("pool_mode", ["avg", "max"])
def test_numbers_of_numpy(size: Any, ratio: Any, pool_mode: str) -> None:
    expected = roi_align(X, B, 3, 1.0, 2, True, pool_mode)
    assert_bitwise_equal(roi_align(X, B, size, 1.0, ratio, True, pool_mode), expected)
    layer = truncdet.RoIAlign(size, 1.0, ratio, True, pool_mode)
    assert_bitwise_equal(layer(X, B), expected)


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "sampling_ratio must be an int, got float64", {"sampling_ratio": np.float64(2)}),
    (TypeError, "sampling_ratio must be an int, got ndarray", {"sampling_ratio": np.array([2, 2])}),
    (TypeError, "sampling_ratio must be an int, got Tensor", {"sampling_ratio": torch.tensor(2)}),
    (TypeError, "output_size must be an int or two of them, got float32", {"size": np.float32(3)}),
    (TypeError, "output_size must be an int or two of them, got ndarray", {"size": np.eye(2)}),
    (TypeError, "output_size must be an int or two of them, got Tensor", {"size": torch.ones(2)}),
    (TypeError, "output_size must be an int or two of them, got set", {"size": {3}}),
    (ValueError, "output_size must be one or two ints in", {"size": np.array([3, 3, 3])}),
    (ValueError, "output_size must be one or two ints in", {"size": np.array([3, 2.5])}),
    (ValueError, "sampling_ratio must be at most 32768", {"sampling_ratio": np.int64(40000)}),
]


@pytest.mark.parametrize(("error", "text", "given"), WRONG, ids=[text for _, text, _ in WRONG])
def test_what_is_no_integer_is_named(error: Any, text: str, given: dict[str, Any]) -> None:
    given = dict(given)
    with pytest.raises(error, match=text):
        roi_align(X, B, given.pop("size", 3), **given)


def test_a_shorter_list_of_boxes_leaves_the_last_images_without() -> None:
    boxes = [B[:1, 1:]]
    expected = roi_align(X, B[:1], 3)
    assert_bitwise_equal(roi_align(X, boxes, 3), expected)
    assert roi_align(X, [], 3).shape == (0, 3, 3, 3)
    features = X.clone().requires_grad_()
    roi_align(features, boxes, 3).sum().backward()
    assert features.grad is not None and features.grad[0].any() and not features.grad[1].any()
    with pytest.raises(ValueError, match="list of at most one tensor an image, 2, got 3"):
        roi_align(X, boxes * 3, 3)


@pytest.mark.parametrize("mode", ["fixed_point", "truncate", "off"])
def test_both_under_torchvisions_patch(mode: str) -> None:
    given = [B[:1, 1:]]
    plain = torchvision.ops.roi_align(X, given, 3, sampling_ratio=2)
    with tv.patched(mode):
        ours = torchvision.ops.roi_align(X, given, [np.int64(3)] * 2, sampling_ratio=np.int64(2))
    assert torch.allclose(ours, plain, atol=1e-5 if mode != "truncate" else 1e-2)


# A framework, the module of its layer, and the layer's arguments from an int or one of NumPy's.
LAYERS = [
    ("mmcv", "mmcv.ops", "RoIAlign", lambda number: ([number(3)] * 2, 0.5, number(2))),
    ("mmcv", "mmcv.ops", "RoIAlign", lambda number: (3, 0.5, number(2), "max", True, False)),
    ("mmcv", "mmcv.ops", "RoIAlign", lambda number: (3, 0.5, number(2), "avg", True, True)),
    ("detectron2", "detectron2.layers", "ROIAlign", lambda n: ([n(3)] * 2, 0.5, n(2))),
]


@pytest.mark.parametrize(
    ("framework", "module", "name", "arguments"),
    [
        pytest.param(*case, marks=pytest.mark.framework(case[0]), id=f"{case[0]} {number}")
        for number, case in enumerate(LAYERS)
    ],
)
@pytest.mark.parametrize("mode", ["fixed_point", "truncate", "off"])
def test_numbers_of_numpy_under_the_other_patches(
    framework: str, module: str, name: str, arguments: Any, mode: str
) -> None:
    layer = getattr(importlib.import_module(module), name)
    patch = importlib.import_module(f"truncdet.integrations.{framework}")
    with patch.patched(mode):
        expected = layer(*arguments(int))(X, B)
        assert_bitwise_equal(layer(*arguments(np.int64))(X, B), expected)
    truncdet.convert(converted := layer(*arguments(np.int64)), mode)
    assert_bitwise_equal(converted(X, B), expected)
