"""The key `deterministic` of mmdet's extractors: who takes it, what it does, what it refuses."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import _mmdet_needed  # noqa: F401
import _mmdet_tiny as tiny
import pytest
import torch
from mmdet.models.roi_heads.roi_extractors import (
    BaseRoIExtractor,
    GenericRoIExtractor,
    SingleRoIExtractor,
)
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import Tensor
from truncdet.integrations import _mmdet_extractor
from truncdet.integrations import mmdet as mm

import truncdet
from truncdet.testing import assert_bitwise_equal


@MODELS.register_module()
class Subclass(SingleRoIExtractor):
    """A constructor of its own that passes on what it was given."""

    def __init__(self, *args: Any, doubled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if doubled:  # layers that are only final when the outermost constructor is done
            strides = [2 * stride for stride in self.featmap_strides]
            self.roi_layers = self.build_roi_layers(kwargs["roi_layer"], strides)


@MODELS.register_module()
class Deeper(Subclass):
    """No constructor of its own."""


class Own(SingleRoIExtractor):
    """A class that means something else by the name."""

    def __init__(self, deterministic: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.meant = deterministic


CLASSES = {cls.__name__: cls for cls in (SingleRoIExtractor, GenericRoIExtractor, Subclass, Deeper)}
each_class = pytest.mark.parametrize("name", CLASSES)
LAYER = {"type": "RoIAlign", "output_size": 3, "sampling_ratio": 2}


def settings(**changes: Any) -> dict[str, Any]:
    return {"roi_layer": LAYER, "out_channels": 4, "featmap_strides": [4, 8], **changes}


def through_config(name: str, tmp_path: Path, key: str, imports: bool = True) -> Any:
    """Builds an extractor as mmdet does: from a file, through the registry."""
    path = tmp_path / "config.py"
    custom = "custom_imports = dict(imports=['truncdet.integrations.mmdet'])\n" if imports else ""
    path.write_text(
        f"{custom}extractor = dict(type={name!r}, roi_layer=dict(**{LAYER!r}), out_channels=4, "
        f"featmap_strides=[4, 8], {key})\n"
    )
    init_default_scope("mmdet")
    return MODELS.build(Config.fromfile(path).extractor)


def gradient(extractor: BaseRoIExtractor, order: Tensor | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(1, 4, 32, 32, generator=draw).requires_grad_()
    corner = torch.rand(30, 2, generator=draw) * 60
    rois = torch.cat([torch.zeros(30, 1), corner, corner + 40], 1)
    upstream = torch.randn(30, 4, 3, 3, generator=draw)
    if order is not None:
        rois, upstream = rois[order], upstream[order]
    extractor((features, features[..., ::2, ::2]), rois).backward(upstream)
    assert features.grad is not None
    return features.grad


def differs(extractor: BaseRoIExtractor) -> bool:
    first = gradient(extractor)
    orders = (torch.randperm(30, generator=torch.Generator().manual_seed(i)) for i in range(10))
    return any(not torch.equal(gradient(extractor, order), first) for order in orders)


@each_class
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_config_files_turn_it_on(name: str, mode: str, tmp_path: Path) -> None:
    made = through_config(name, tmp_path, f"deterministic=dict(mode={mode!r})")
    assert type(made) is CLASSES[name]
    assert not differs(made)
    assert differs(through_config(name, tmp_path, ""))


@each_class
def test_the_default_mode_is_fixed_point(name: str, tmp_path: Path) -> None:
    expected = gradient(through_config(name, tmp_path, "deterministic=dict(mode='fixed_point')"))
    assert_bitwise_equal(gradient(through_config(name, tmp_path, "deterministic=dict()")), expected)
    assert_bitwise_equal(gradient(CLASSES[name](**settings(deterministic={}))), expected)


@each_class
@pytest.mark.parametrize("key", ["deterministic=dict(mode='off')", "deterministic=None", ""])
def test_off_and_no_key_are_plain_to_the_bit(name: str, key: str, tmp_path: Path) -> None:
    made, plain = through_config(name, tmp_path, key), CLASSES[name](**settings())
    assert_bitwise_equal(gradient(made), gradient(plain))
    assert [type(m) for m in made.modules()] == [type(m) for m in plain.modules()]
    assert not made._forward_pre_hooks


def test_custom_imports_is_all_that_a_fresh_process_needs(tmp_path: Path) -> None:
    program = f"""
import sys
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
assert "truncdet" not in sys.modules
init_default_scope("mmdet")
made = MODELS.build(Config.fromfile({str(tmp_path / "config.py")!r}).extractor)
print(*(type(layer).__name__ for layer in made.roi_layers))
"""
    through_config("SingleRoIExtractor", tmp_path, "deterministic=dict(mode='fixed_point')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["FixedPointRoIAlign"] * 2, done.stderr


def test_the_outermost_constructor_decides_which_layers_there_are() -> None:
    made = Subclass(**settings(deterministic={"mode": "fixed_point"}, doubled=True))
    assert made.roi_layers[0].spatial_scale == 1 / 8
    assert not differs(made)


def test_a_class_made_later_takes_it_too() -> None:
    class Later(GenericRoIExtractor):
        def __init__(self, roi_layer: Any, out_channels: int, featmap_strides: list[int]) -> None:
            super().__init__(
                roi_layer=roi_layer, out_channels=out_channels, featmap_strides=featmap_strides
            )

    assert differs(Later(**settings()))
    assert not differs(Later(**settings(deterministic={"mode": "fixed_point"})))


def test_a_class_with_a_parameter_of_that_name_keeps_it() -> None:
    made = Own(**settings(deterministic="mine"))
    assert made.meant == "mine" and differs(made)


def test_constructors_look_as_before_and_installing_twice_does_no_harm() -> None:
    inits = [cls.__init__ for cls in (BaseRoIExtractor, SingleRoIExtractor, GenericRoIExtractor)]
    _mmdet_extractor.install(BaseRoIExtractor)
    importlib.reload(mm)
    assert inits == [
        cls.__init__ for cls in (BaseRoIExtractor, SingleRoIExtractor, GenericRoIExtractor)
    ]
    names = ["self", "roi_layer", "out_channels", "featmap_strides", "finest_scale", "init_cfg"]
    assert list(inspect.signature(SingleRoIExtractor.__init__).parameters) == names
    made = SingleRoIExtractor(LAYER, 4, [4, 8], 28)
    assert made.finest_scale == 28 and len(made.roi_layers) == 2


def test_state_dicts_copies_and_pickles() -> None:
    config = {"type": "GenericRoIExtractor", **settings()}
    config["pre_cfg"] = {
        "type": "ConvModule", "in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1
    }  # fmt: skip
    plain = MODELS.build(config)
    ours = MODELS.build({**config, "deterministic": {"mode": "fixed_point"}})
    assert list(ours.state_dict()) == list(plain.state_dict()) != []
    ours.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(ours.state_dict(), strict=True)
    expected = gradient(ours)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bitwise_equal(gradient(copied), expected)
        assert not differs(copied)


def test_boxes_stay_float32_beside_half_features() -> None:
    made = SingleRoIExtractor(**settings(featmap_strides=[4], deterministic={}))
    features = torch.randn(1, 4, 16, 600).bfloat16()
    rois = torch.tensor([[0.0, 2049.0, 3.0, 2200.0, 60.0], [0.0, 1001.0, 1.0, 1303.0, 33.0]])
    expected = truncdet.roi_align(features, rois, 3, 0.25, 2, True)
    assert_bitwise_equal(made((features,), rois), expected)
    rounded = truncdet.roi_align(features, rois.bfloat16().float(), 3, 0.25, 2, True)
    assert not torch.equal(rounded, expected)


def test_literal_warns_and_is_the_published_line() -> None:
    with pytest.warns(UserWarning, match="coordinates past 2048 pixels move"):
        made = SingleRoIExtractor(
            **settings(featmap_strides=[4], deterministic={"mode": "truncate", "literal": True})
        )
    plain = SingleRoIExtractor(**settings(featmap_strides=[4])).roi_layers[0]
    features = torch.randn(1, 4, 16, 600)
    rois = torch.tensor([[0.0, 2049.0, 3.0, 2200.0, 60.0]])
    line = plain(features.half().double(), rois.half().double()).float()
    assert_bitwise_equal(made((features,), rois), line)


ERRORS = [
    ({"mode": "fast"}, ValueError, "mode must be one of fixed_point, truncate, off, got 'fast'"),
    ({"mode": "snap"}, ValueError, "mode must not be 'snap' for RoIAlign"),
    ({"mod": "off"}, ValueError, "keys must be among mode, literal, got 'mod'"),
    ({"literal": True}, ValueError, "literal must be False unless mode is 'truncate', got True"),
    ({"literal": 1}, TypeError, "literal must be True or False, got 1"),
    (True, TypeError, "must be a dict with keys among mode, literal, got True"),
    ("fixed_point", TypeError, "must be a dict with keys among mode, literal, got 'fixed_point'"),
]


@each_class
@pytest.mark.parametrize(("wish", "error", "text"), ERRORS)
def test_errors_name_the_class_and_the_choices(name: str, wish: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"{name}: deterministic:? {text}"):
        CLASSES[name](**settings(deterministic=wish))


def test_a_layer_that_cannot_be_swapped_is_an_error_not_a_silence() -> None:
    for name, mode in (("PrRoIPool", "fixed_point"), ("PrRoIPool", "truncate"), POOL):
        pool = {"type": name, "output_size": 3}
        said = f"roi_layer to be one that it can swap for '{mode}', got {name}"
        with pytest.raises(truncdet.TruncdetError, match=said):
            SingleRoIExtractor(**settings(roi_layer=pool, deterministic={"mode": mode}))
        SingleRoIExtractor(**settings(roi_layer=pool, deterministic={"mode": "off"}))


POOL = "RoIPool", "truncate"


def test_other_layers_than_roi_align_can_be_swapped() -> None:
    pool = {"type": "RoIPool", "output_size": 3}
    made = SingleRoIExtractor(
        **settings(roi_layer=pool, deterministic={"mode": "fixed_point"}, out_channels=3)
    )
    features = [torch.randn(1, 3, 16, 16) for _ in made.featmap_strides]
    rois = torch.tensor([[0, 1.0, 1.0, 30.0, 20.0]])
    expected = truncdet.roi_pool(features[0], rois, 3, 1 / made.featmap_strides[0], rounded=False)
    assert_bitwise_equal(made(features, rois), expected)


def shipped() -> dict[str, Path]:
    """One config with extractors from every folder of mmdet's that has one."""
    found: dict[str, Path] = {}
    for path in sorted(tiny.CONFIGS.glob("*/*.py")):
        if path.parent.name not in found and "roi_extractor=" in path.read_text():
            found[path.parent.name] = path
    return found


def extractor_configs(node: Any) -> list[Any]:
    if isinstance(node, dict) and "roi_layer" in node:
        return [node]
    below = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [config for child in below for config in extractor_configs(child)]


def test_the_extractors_of_all_of_mmdets_model_families_take_it() -> None:
    init_default_scope("mmdet")
    count = 0
    assert {"htc", "grid_rcnn", "point_rend", "sparse_rcnn", "groie"} <= shipped().keys()
    for name, path in shipped().items():
        for config in extractor_configs(Config.fromfile(path).to_dict()["model"]):
            ours = {**config, "deterministic": {"mode": "fixed_point"}}
            if config["roi_layer"]["type"] != "RoIAlign":
                with pytest.raises(truncdet.TruncdetError, match="needs roi_layer to be one that"):
                    MODELS.build(ours)
                continue
            layers = {type(layer).__name__ for layer in MODELS.build(ours).roi_layers}
            assert layers == {"FixedPointRoIAlign"}, name
            count += 1
    assert count > 20
