"""TruncdetHook where something is odd: checkpoints, copies during a run, mmengine's own keys."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import _mmdet_needed  # noqa: F401
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import HOOKS
from test_mmdet_hook import outside, stub
from test_mmdet_hook import untouched as untouched
from truncdet.integrations import mmdet as mm
from truncdet.integrations._layers import swap_of

META: dict[str, tuple[Any, str]] = {
    "no meta": ({}, "was written with {'mode': 'off'}"),
    "meta None": ({"meta": None}, "was written with {'mode': 'off'}"),
    "meta a string": ({"meta": "m"}, "was written with {'mode': 'off'}"),
    "None": ({"meta": {"truncdet": None}}, "was written with {'mode': 'off'}"),
    "a string": ({"meta": {"truncdet": "fixed_point"}}, r"must be a dict, got 'fixed_point'"),
    "a list": ({"meta": {"truncdet": ["mode"]}}, r"must be a dict, got \['mode'\]"),
    "an array": (
        {"meta": {"truncdet": {"mode": torch.ones(2)}}},
        "was written with {'mode': tensor",
    ),
    "another type": ({"meta": {"truncdet": {"strict": 0}}}, "was written with {'strict': 0}"),
}


@pytest.mark.parametrize("kind", META)
def test_odd_checkpoints_give_one_warning(kind: str) -> None:
    checkpoint, message = META[kind]
    runner = stub(torch.nn.Identity(), _resume=True)
    mm.TruncdetHook().after_load_checkpoint(runner, checkpoint)
    (line,) = runner.logger.lines
    assert re.search(message, line)


@pytest.mark.parametrize("checkpoint", [{}, {"meta": None}, {"meta": {}}], ids=repr)
def test_settings_are_saved_beside_any_meta(checkpoint: dict[str, Any]) -> None:
    mm.TruncdetHook().before_save_checkpoint(stub(torch.nn.Identity()), checkpoint)
    assert checkpoint["meta"]["truncdet"]["mode"] == "fixed_point"


def test_a_meta_that_is_no_dict_is_left_alone() -> None:
    checkpoint = {"meta": "m"}
    mm.TruncdetHook().before_save_checkpoint(stub(torch.nn.Identity()), checkpoint)
    assert checkpoint == {"meta": "m"}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_made_during_a_run_has_no_scope(way: Any) -> None:
    hook, runner, before = mm.TruncdetHook(mode="truncate", strict="warn"), stub(), outside()
    hook.before_run(runner)
    during = outside()
    other = way(hook)
    assert (other.mode, other.strict, other.literal, other.verbose) == (
        "truncate",
        "warn",
        False,
        True,
    )
    other.after_run(runner)
    assert outside() == during != before
    hook.after_run(runner)
    assert outside() == before


def test_verbose_is_a_bool() -> None:
    with pytest.raises(TypeError, match="TruncdetHook: verbose must be True or False, got 1"):
        HOOKS.build(dict(type="TruncdetHook", verbose=1))


def test_mmengines_key_for_dropping_what_is_inherited_is_passed_over() -> None:
    # With nothing to drop, mmengine leaves it in.
    cfg = Config(dict(default_hooks=dict()))
    cfg.merge_from_dict(dict(default_hooks=dict(truncdet=dict(type="TruncdetHook", _delete_=True))))
    assert "_delete_" in cfg.default_hooks.truncdet
    hook = HOOKS.build(cfg.default_hooks.truncdet)
    assert hook.mode == "fixed_point" and not hasattr(hook, "_delete_")
    layer = dict(type="RoIAlign", output_size=3, sampling_ratio=2)
    extractor = MODELS.build(
        dict(
            type="SingleRoIExtractor",
            roi_layer=layer,
            out_channels=4,
            featmap_strides=[4],
            deterministic=dict(mode="truncate", _delete_=True),
        )
    )
    assert swap_of(extractor.roi_layers[0]) is not None
