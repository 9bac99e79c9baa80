"""The node cfg.MODEL.TRUNCDET: its keys, their defaults, and the check of what a user wrote there.

yacs refuses an unknown key without saying which ones there are, so the node lets a file add any
key, and `read` answers with the list. (A key from the command line that is not there stays yacs's
own error: it asks for existing keys whatever a node allows.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truncdet.integrations._roi import checked

from truncdet import _strict

NODE = "MODEL.TRUNCDET"
DEFAULTS: dict[str, Any] = {
    "ENABLED": False,
    "MODE": "fixed_point",
    "STRICT": False,
    "LITERAL": False,
}
_ME = "truncdet.integrations.detectron2"


@dataclass(frozen=True)
class Settings:
    """What cfg.MODEL.TRUNCDET says, checked."""

    enabled: bool
    mode: str
    strict: bool | str
    literal: bool


def add_truncdet_config(cfg: Any) -> None:
    """Adds the node MODEL.TRUNCDET to a config, before files and command line are merged into it.

    Its keys are ENABLED (False), MODE ('fixed_point'), STRICT (False) and LITERAL (False). Values
    that the node already has are kept.

    Example:
        >>> from detectron2.config import get_cfg
        >>> from truncdet.integrations.detectron2 import add_truncdet_config
        >>> cfg = get_cfg()
        >>> add_truncdet_config(cfg)
        >>> cfg.merge_from_list(["MODEL.TRUNCDET.ENABLED", "True"])
        >>> cfg.MODEL.TRUNCDET.MODE
        'fixed_point'

    Args:
        cfg: a detectron2 CfgNode that is not frozen. LazyConfig has no nodes to add: register a
            `TruncdetHook(mode=...)` with the trainer, or call `truncdet.convert(model)`.

    Raises:
        TypeError: cfg is not a CfgNode.
    """
    from detectron2.config import CfgNode

    model = _model_node(cfg, "add_truncdet_config")
    if "TRUNCDET" not in model:
        model.TRUNCDET = CfgNode(new_allowed=True)
    for key, value in DEFAULTS.items():
        if key not in model.TRUNCDET:
            setattr(model.TRUNCDET, key, value)


def read(cfg: Any, where: str) -> Settings:
    """Returns the settings; ValueError for an unknown key or a wrong value, naming the right ones.

    Args:
        cfg: a config after `add_truncdet_config`.
        where: the public function that asks, for messages.
    """
    node = _model_node(cfg, where).get("TRUNCDET")
    if node is None:
        raise ValueError(
            f"{_ME}.{where}: cfg must have {NODE}, got none; call add_truncdet_config(cfg) first"
        )
    for key in node:
        if key not in DEFAULTS:
            raise ValueError(
                f"{_ME}.{where}: keys of cfg.{NODE} must be among {', '.join(sorted(DEFAULTS))}, "
                f"got {key!r}"
            )
    found = {**DEFAULTS, **node}
    for key in ("ENABLED", "LITERAL"):
        if not isinstance(found[key], bool):
            raise ValueError(
                f"{_ME}.{where}: cfg.{NODE}.{key} must be True or False, got {found[key]!r}"
            )
    check_literal(found["LITERAL"], found["MODE"], f"{_ME}.{where}")
    return Settings(
        enabled=found["ENABLED"],
        mode=checked(found["MODE"], f"{_ME}.{where}"),
        strict=_strict.check_level(found["STRICT"], f"{_ME}.{where}"),
        literal=found["LITERAL"],
    )


def check_literal(literal: object, mode: str, where: str) -> None:
    """Refuses `literal` where it means nothing, without the warning of a recipe in force."""
    if literal and mode != "truncate":
        raise ValueError(
            f"{where}: literal must be False unless mode is 'truncate', got True for mode {mode!r}"
        )


def _model_node(cfg: Any, where: str) -> Any:
    from detectron2.config import CfgNode

    if not isinstance(cfg, CfgNode):
        raise TypeError(
            f"{_ME}.{where}: cfg must be a detectron2 CfgNode, got {type(cfg).__name__}; with a "
            "LazyConfig register a TruncdetHook(mode=...) or call truncdet.convert(model)"
        )
    return cfg.MODEL
