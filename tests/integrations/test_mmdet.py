"""mmdet under the patch: its extractors, mask targets, precision of boxes, and back again."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import _mmdet_needed  # noqa: F401
import mmdet
import mmengine
import numpy as np
import pytest
import torch
from mmcv.ops import RoIAlign
from mmdet.models.roi_heads.roi_extractors import (
    BaseRoIExtractor,
    GenericRoIExtractor,
    SingleRoIExtractor,
)
from mmdet.structures.mask import BitmapMasks
from torch import Tensor
from truncdet.integrations import _mmdet_patch, mmcv
from truncdet.integrations import mmdet as mm

import truncdet
from truncdet.testing import assert_bitwise_equal

OWNERS: dict[str, Any] = {
    "operator": sys.modules["mmcv.ops.roi_align"],
    "operators": sys.modules["mmcv.ops"],
    "layer": RoIAlign,
    "mask targets": sys.modules["mmdet.structures.mask.structures"],
    "base": BaseRoIExtractor,
    "single": SingleRoIExtractor,
    "generic": GenericRoIExtractor,
}


def everything() -> dict[tuple[str, str], Any]:
    """Every attribute of every object that a patch could touch."""
    return {
        (name, key): value for name, owner in OWNERS.items() for key, value in vars(owner).items()
    }


def same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = everything()
    yield
    assert not mm.is_patched() and not mmcv.is_patched()
    assert same(everything(), before)


def extractor(cls: type = SingleRoIExtractor, levels: int = 2, **layer: Any) -> BaseRoIExtractor:
    layer = {"type": "RoIAlign", "output_size": 3, "sampling_ratio": 2, **layer}
    made: BaseRoIExtractor = cls(
        roi_layer=layer, out_channels=4, featmap_strides=[4 * 2**i for i in range(levels)]
    )
    return made


def scene(levels: int = 2, rois: int = 30, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Features of two images of 4096 pixels, and RoIs whose corners half would move."""
    draw = torch.Generator().manual_seed(0)
    features = [
        torch.randn(2, 4, 32 // 2**i, 1024 // 2**i, generator=draw).to(dtype) for i in range(levels)
    ]
    image = torch.randint(0, 2, (rois, 1), generator=draw).float()
    corner = torch.rand(rois, 2, generator=draw) * torch.tensor([3900.0, 10.0])
    size = torch.rand(rois, 2, generator=draw) * torch.tensor([190.0, 110.0]) + 4
    return tuple(features), torch.cat([image, corner, corner + size], 1)


def gradients(run: Callable[..., Tensor], order: Tensor | None = None) -> list[Tensor]:
    features, rois = scene()
    upstream = torch.randn(len(rois), 4, 3, 3, generator=torch.Generator().manual_seed(1))
    if order is not None:
        rois, upstream = rois[order], upstream[order]
    leaves = [feature.requires_grad_() for feature in features]
    run(leaves, rois).backward(upstream)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


ORDERS = [torch.randperm(30, generator=torch.Generator().manual_seed(i)) for i in range(10)]


def differs(run: Callable[..., Tensor]) -> bool:
    """Whether some order of the RoIs changes a bit of a gradient."""
    first = gradients(run)
    return any(
        not torch.equal(a, b)
        for order in ORDERS
        for a, b in zip(gradients(run, order), first, strict=True)
    )


@pytest.mark.parametrize("cls", [SingleRoIExtractor, GenericRoIExtractor])
@pytest.mark.parametrize("use_torchvision", [False, True])
def test_gradients_do_not_depend_on_the_order(cls: type, use_torchvision: bool) -> None:
    before = extractor(cls, use_torchvision=use_torchvision)
    assert differs(before)
    for mode in ("fixed_point", "truncate"):
        with mm.patched(mode):
            assert not differs(before)
            assert not differs(extractor(cls, use_torchvision=use_torchvision))
    assert differs(before)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("pool_mode", ["avg", "max"])
def test_forward_is_close_to_the_original(pool_mode: str, aligned: bool) -> None:
    features, rois = scene()
    pool = extractor(pool_mode=pool_mode, aligned=aligned, sampling_ratio=0)
    expected = pool(features, rois)
    with mm.patched():
        found = pool(features, rois)
    assert float((found - expected).abs().max()) <= 1e-5 * max(float(f.max()) for f in features)


def oracle(features: Tensor, rois: Tensor) -> Tensor:
    return truncdet.roi_align(features, rois, 3, 0.25, 2, True)


@pytest.mark.parametrize("cls", [SingleRoIExtractor, GenericRoIExtractor])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_stay_float32_beside_half_features(cls: type, dtype: torch.dtype) -> None:
    features, rois = scene(levels=1, dtype=dtype)
    expected = oracle(features[0], rois)
    with mm.patched():
        pool = extractor(cls, levels=1)
        for found in (pool(features, rois), pool(feats=features, rois=rois)):
            assert_bitwise_equal(found, expected)
            assert type(found) is Tensor
    # What the cast would have done, so that equality above means something.
    assert not torch.equal(oracle(features[0], rois.to(dtype).float()), expected)


def test_negative_control_the_patch_of_mmcv_alone_leaves_mmdets_cast() -> None:
    features, rois = scene(levels=1, dtype=torch.bfloat16)
    with mmcv.patched():
        found = extractor(levels=1)(features, rois)
    assert_bitwise_equal(found, oracle(features[0], rois.bfloat16().float()))


@pytest.mark.parametrize("scale", [None, 1.5])
def test_every_level_gets_float32_boxes(scale: float | None) -> None:
    features, rois = scene(dtype=torch.bfloat16)
    pool = extractor()
    with mm.patched():
        found = pool(features, rois, roi_scale_factor=scale)
    level = pool.map_roi_levels(rois, 2)
    assert set(level.tolist()) == {0, 1}
    scaled = rois if scale is None else pool.roi_rescale(rois, scale)
    expected = torch.empty_like(found)
    for i in range(2):
        here = level == i
        expected[here] = truncdet.roi_align(features[i], scaled[here], 3, 0.25 / 2**i, 2, True)
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("rois", [0, 30])
def test_autocast_in_training_reaches_the_same_oracle(rois: int) -> None:
    features, boxes = scene(levels=1, rois=rois)
    convolution = torch.nn.Conv2d(4, 4, 1)
    with torch.autocast("cpu", torch.bfloat16), mm.patched():
        under = convolution(features[0])
        assert under.dtype == torch.bfloat16
        found = extractor(levels=1)((under,), boxes)
    assert_bitwise_equal(found, oracle(under, boxes))
    if rois:  # mmdet's own answer to none has no graph
        found.float().sum().backward()
        assert convolution.weight.grad is not None


def test_truncate_truncates_features_and_leaves_rois_alone() -> None:
    features, rois = scene(levels=1)
    pool = extractor(levels=1)
    layer = pool.roi_layers[0]
    few = truncdet.truncate(features[0]).double()
    with mm.patched("truncate"):
        found = pool(features, rois)
    assert_bitwise_equal(found, layer(few, rois.double()).float())


def test_literal_is_the_published_line_and_says_what_it_does() -> None:
    features, rois = scene(levels=1)
    pool = extractor(levels=1)
    line = pool.roi_layers[0](features[0].half().double(), rois.half().double()).float()
    with pytest.warns(UserWarning, match="coordinates past 2048 pixels move"):
        mm.patch("truncate", literal=True)
    try:
        assert_bitwise_equal(pool(features, rois), line)
        mm.patch("truncate")
        assert not torch.equal(pool(features, rois), line)
    finally:
        assert mm.unpatch()


def test_mask_targets_use_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = BitmapMasks(np.ones((2, 16, 16), np.uint8), 16, 16)
    boxes = np.array([[1, 1, 9, 9], [0, 0, 16, 12]], np.float32)

    def targets() -> Any:
        return masks.crop_and_resize(boxes, (4, 4), np.array([0, 1]), "cpu").masks

    calls, function = [], truncdet.roi_align
    monkeypatch.setattr(truncdet, "roi_align", lambda *a, **k: calls.append(1) or function(*a, **k))
    expected = targets()
    assert not calls
    with mm.patched():
        np.testing.assert_array_equal(targets(), expected)
    assert calls


def test_undo_restores_the_very_objects() -> None:
    before = everything()
    mm.patch()
    changed = [key for key, value in everything().items() if before.get(key) is not value]
    assert ("single", "forward") in changed and ("mask targets", "roi_align") in changed
    assert mm.unpatch() is True
    assert same(everything(), before)
    assert mm.unpatch() is False


def test_two_patches_in_a_row_and_one_undo() -> None:
    before = everything()
    for mode in ("fixed_point", "fixed_point", "truncate", "fixed_point"):
        mm.patch(mode)
        assert mm.mode() == mmcv.mode() == mode
    assert mm.unpatch() and same(everything(), before)


def test_an_exception_inside_ends_the_patch() -> None:
    before = everything()
    with pytest.raises(KeyError), mm.patched():
        raise KeyError
    assert same(everything(), before)


def test_blocks_nest() -> None:
    with mm.patched("truncate"):
        with mm.patched():
            assert mm.mode() == "fixed_point"
            with mm.patched("off"):
                assert not mm.is_patched() and not mmcv.is_patched()
            assert mmcv.mode() == "fixed_point"
        assert mm.mode() == mmcv.mode() == "truncate"


def test_mmcvs_own_patch_outlives_ours() -> None:
    with mmcv.patched("truncate"):
        mm.patch()
        assert mmcv.mode() == "fixed_point"
        mm.patch("truncate")
        mm.unpatch()
        assert mmcv.mode() == "truncate"


@pytest.mark.parametrize("mode", ["off", "truncate"])
def test_a_patch_that_fails_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything()

    def fail(*_: Any) -> None:
        raise OSError

    with mm.patched(mode):
        plan = _mmdet_patch._PATCH._plan
        monkeypatch.setattr(_mmdet_patch._PATCH, "_plan", fail)
        with pytest.raises(OSError):
            mm.patch()
        monkeypatch.setattr(_mmdet_patch._PATCH, "_plan", plan)
        assert mm.mode() == mmcv.mode() == mode
        assert differs(extractor()) is (mode == "off")
    assert same(everything(), before)


@pytest.mark.parametrize(
    ("package", "version", "range"),
    [
        (mmdet, "3.2.0", "mmdet must be >= 3.3 and < 3.4"),
        (mmdet, "4.0.0", "mmdet must be >= 3.3 and < 3.4"),
        (mmengine, "0.11.0", "mmengine must be >= 0.10 and < 0.11"),
    ],
)
def test_untested_versions_are_refused(
    package: Any, version: str, range: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(package, "__version__", version)
    before = everything()
    with pytest.raises(truncdet.TruncdetError, match=rf"integrations\.mmdet: {range}.*allow_unt"):
        mm.patch()
    assert same(everything(), before)
    with mm.patched(allow_untested=True):
        assert mm.is_patched()


def test_modes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"mmdet\.patch: mode must not be 'snap' for RoIAlign"):
        mm.patch("snap")
    with pytest.raises(ValueError, match="mode must be one of fixed_point, truncate, off, got 'x'"):
        mm.patch("x")
    with pytest.raises(
        ValueError, match=r"mmdet\.patched: literal must be False unless mode is 'tr"
    ):
        mm.patched(literal=True).__enter__()


def test_patching_and_training_print_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mm.patched():
            gradients(extractor())


def test_the_switch_leaves_no_key_and_no_hook_registered() -> None:
    # In a process of its own: this one has imported what registers them.
    code = (
        "import truncdet\n"
        "from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor, SingleRoIExtractor\n"
        "from mmengine.registry import HOOKS\n"
        "before = dict(vars(BaseRoIExtractor)), dict(vars(SingleRoIExtractor))\n"
        "with truncdet.deterministic():\n"
        "    assert vars(SingleRoIExtractor) != before[1]\n"
        "assert (dict(vars(BaseRoIExtractor)), dict(vars(SingleRoIExtractor))) == before\n"
        "assert HOOKS.get('TruncdetHook') is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
