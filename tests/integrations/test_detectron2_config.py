"""cfg.MODEL.TRUNCDET: defaults, merges, and what is said about wrong keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import pytest
from detectron2.config import CfgNode, LazyConfig, get_cfg
from omegaconf import OmegaConf
from truncdet.integrations.detectron2 import TruncdetHook, add_truncdet_config, build_hook


def config(**values: Any) -> Any:
    cfg = get_cfg()
    add_truncdet_config(cfg)
    for key, value in values.items():
        setattr(cfg.MODEL.TRUNCDET, key, value)
    return cfg


def built(cfg: Any) -> TruncdetHook:
    hook = build_hook(cfg)
    assert isinstance(hook, TruncdetHook)
    return hook


def test_the_node_has_four_keys_and_is_off() -> None:
    cfg = config()
    assert dict(cfg.MODEL.TRUNCDET) == {
        "ENABLED": False,
        "MODE": "fixed_point",
        "STRICT": None,
        "LITERAL": False,
    }
    assert build_hook(cfg) is None
    assert "TRUNCDET" not in get_cfg().MODEL


def test_adding_it_again_keeps_what_is_there() -> None:
    cfg = config(MODE="truncate")
    add_truncdet_config(cfg)
    assert cfg.MODEL.TRUNCDET.MODE == "truncate"


def test_a_file_sets_it(tmp_path: Path) -> None:
    cfg = config()
    file = tmp_path / "config.yaml"
    file.write_text("MODEL:\n  TRUNCDET:\n    ENABLED: True\n    MODE: truncate\n")
    cfg.merge_from_file(str(file))
    assert (built(cfg).mode, built(cfg).literal, built(cfg).strict) == ("truncate", False, False)


def test_the_command_line_sets_it() -> None:
    cfg = config()
    cfg.merge_from_list(["MODEL.TRUNCDET.ENABLED", "True", "MODEL.TRUNCDET.STRICT", "True"])
    assert (built(cfg).mode, built(cfg).strict) == ("fixed_point", True)


STRICT = {"off": False, "warn": "warn", "raise": True, "True": True, "False": False}


@pytest.mark.parametrize("word", STRICT)
def test_strict_is_set_by_a_word_or_a_truth_value(word: str, tmp_path: Path) -> None:
    listed, filed = config(ENABLED=True), config(ENABLED=True)
    listed.merge_from_list(["MODEL.TRUNCDET.STRICT", word])
    file = tmp_path / "config.yaml"
    file.write_text(f"MODEL:\n  TRUNCDET:\n    STRICT: {word if word != 'off' else repr(word)}\n")
    filed.merge_from_file(str(file))
    again = config()
    file.write_text(filed.dump())
    again.merge_from_file(str(file))
    for cfg in (listed, filed, again):
        assert built(cfg).strict == STRICT[word]
        assert type(built(cfg).strict) is type(STRICT[word])


def test_a_word_from_a_file_is_replaced_by_a_word_from_the_command_line(tmp_path: Path) -> None:
    cfg = config(ENABLED=True)
    file = tmp_path / "config.yaml"
    file.write_text("MODEL:\n  TRUNCDET:\n    STRICT: raise\n")
    cfg.merge_from_file(str(file))
    cfg.merge_from_list(["MODEL.TRUNCDET.STRICT", "warn"])
    assert built(cfg).strict == "warn"


@pytest.mark.parametrize("value", [True, None, {"ENABLED": True}, "on"], ids=repr)
def test_something_else_in_the_place_of_the_node_is_named(value: Any) -> None:
    cfg = get_cfg()
    dict.__setitem__(cfg.MODEL, "TRUNCDET", value)
    for function in (add_truncdet_config, build_hook):
        with pytest.raises(
            TypeError, match=r"cfg\.MODEL\.TRUNCDET must be a node with the keys EN"
        ):
            function(cfg)


def test_a_frozen_config_says_what_to_do() -> None:
    cfg = get_cfg()
    cfg.freeze()
    with pytest.raises(ValueError, match=r"add_truncdet_config: cfg must not be frozen, got one"):
        add_truncdet_config(cfg)
    cfg.defrost()
    add_truncdet_config(cfg)
    cfg.freeze()
    add_truncdet_config(cfg)  # nothing is missing


def test_a_config_without_models_says_so() -> None:
    for function in (add_truncdet_config, build_hook):
        with pytest.raises(ValueError, match="cfg must have a node MODEL, as get_cfg"):
            function(CfgNode())


def test_it_survives_dump_clone_and_freeze(tmp_path: Path) -> None:
    cfg = config(ENABLED=True, MODE="truncate", LITERAL=True)
    file = tmp_path / "dumped.yaml"
    file.write_text(cfg.dump())
    again = config()
    again.merge_from_file(str(file))
    again = again.clone()
    again.freeze()
    assert (built(again).mode, built(again).literal) == ("truncate", True)


@pytest.mark.parametrize(("given", "expected"), [(-1, None), (0, 0), (7, 7)])
def test_the_seed_is_that_of_the_config(given: int, expected: int | None) -> None:
    cfg = config(ENABLED=True)
    cfg.SEED = given
    assert built(cfg).seed == expected


KEYS = r"keys of cfg\.MODEL\.TRUNCDET must be among ENABLED, LITERAL, MODE, STRICT, got 'MOD'"


@pytest.mark.parametrize("enabled", [True, False])
def test_an_unknown_key_from_code_or_a_file_is_an_error_that_lists_the_keys(
    enabled: bool, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=KEYS):
        build_hook(config(ENABLED=enabled, MOD="truncate"))
    file = tmp_path / "config.yaml"
    file.write_text(f"MODEL:\n  TRUNCDET:\n    ENABLED: {enabled}\n    MOD: truncate\n")
    cfg = config()
    cfg.merge_from_file(str(file))
    with pytest.raises(ValueError, match=KEYS):
        build_hook(cfg)


def test_an_unknown_key_on_the_command_line_is_refused_by_the_config_itself() -> None:
    with pytest.raises(AssertionError, match=r"Non-existent key: MODEL\.TRUNCDET\.MOD"):
        config().merge_from_list(["MODEL.TRUNCDET.MOD", "truncate"])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"MODE": "exact"},
            r"cfg\.MODEL\.TRUNCDET\.MODE must be one of fixed_point, truncate, off, got 'ex",
        ),
        (
            {"MODE": "snap"},
            r"cfg\.MODEL\.TRUNCDET\.MODE must be one .*'snap': RoIAlign's contributions",
        ),
        ({"MODE": 3}, r"cfg\.MODEL\.TRUNCDET\.MODE must be one of .*, got 3"),
        (
            {"STRICT": "maybe"},
            r"cfg\.MODEL\.TRUNCDET\.STRICT must be off, warn, raise, .*, got 'maybe'",
        ),
        (
            {"STRICT": 1},
            r"cfg\.MODEL\.TRUNCDET\.STRICT must be off, warn, raise, True or .*, got 1",
        ),
        ({"LITERAL": 1}, r"cfg\.MODEL\.TRUNCDET\.LITERAL must be True or False, got 1"),
        ({"LITERAL": True}, "literal must be False unless mode is 'truncate', got True"),
    ],
    ids=str,
)
def test_wrong_values_are_errors_that_list_the_right_ones(
    values: dict[str, Any], message: str, enabled: bool
) -> None:
    with pytest.raises(ValueError, match="build_hook: " + message):
        build_hook(config(ENABLED=enabled, **values))


def test_enabled_itself_must_be_a_truth_value() -> None:
    with pytest.raises(ValueError, match=r"TRUNCDET\.ENABLED must be True or False, got 'yes'"):
        build_hook(config(ENABLED="yes"))


def test_a_config_without_the_node_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"cfg must have MODEL\.TRUNCDET, got none; call add_trun"):
        build_hook(get_cfg())


def test_a_lazy_config_is_told_what_there_is_instead(tmp_path: Path) -> None:
    lazy = OmegaConf.create({"MODEL": {}, "model": {}})
    for function in (add_truncdet_config, build_hook):
        with pytest.raises(TypeError, match=r"CfgNode, got DictConfig; with a LazyConfig register"):
            function(lazy)
    file = tmp_path / "lazy.py"
    file.write_text(
        "from truncdet.integrations.detectron2 import TruncdetHook\n"
        "hook = dict(_target_=TruncdetHook, mode='truncate')\n"
    )
    from detectron2.config import instantiate

    assert instantiate(LazyConfig.load(str(file)).hook).mode == "truncate"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "exact"}, ValueError, "mode must be one of fixed_point, truncate, off, got 'ex"),
        ({"mode": "snap"}, ValueError, "mode must not be 'snap'"),
        ({"strict": "yes"}, ValueError, "strict must be False, 'warn' or True, got 'yes'"),
        ({"literal": True}, ValueError, "literal must be False unless mode is 'truncate', got"),
        ({"literal": "yes"}, TypeError, "literal must be True or False, got 'yes'"),
        ({"literal": 1}, TypeError, "literal must be True or False, got 1"),
        ({"verbose": 1}, TypeError, "verbose must be True or False, got 1"),
        (
            {"moed": 1},
            ValueError,
            "arguments must be among mode, strict, literal, seed, verbose, got 'moed'",
        ),
        ({"seed": 0.5}, TypeError, r"seed must be an int, got 0\.5"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\^63\), got -1"),
    ],
    ids=str,
)
def test_the_hook_checks_its_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match="TruncdetHook: " + message):
        TruncdetHook(**arguments)
