"""The node cfg.MODEL.TRUNCDET: its keys, their defaults, and the check of what a user wrote there.

yacs refuses an unknown key without saying which ones there are, so the node lets a file add any
key, and `read` answers with the list. (A key from the command line that is not there stays yacs's
own error: it asks for existing keys whatever a node allows.)

yacs lets a value replace one of its own type only, and STRICT may be a bool or a word. Its default
is None, which yacs lets anything replace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truncdet.integrations._roi import MODES

NODE = "MODEL.TRUNCDET"
DEFAULTS: dict[str, Any] = {
    "ENABLED": False,
    "MODE": "fixed_point",
    "STRICT": None,
    "LITERAL": False,
}
_STRICT: dict[object, bool | str] = {"off": False, "warn": "warn", "raise": True, None: False}
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

    Its keys are ENABLED (False), MODE ('fixed_point'), STRICT (None, which is off) and LITERAL
    (False). STRICT may be 'off', 'warn', 'raise', or False or True for 'off' and 'raise'; once a
    file has set it to a word, the command line can only set words, and truth values after a truth
    value, as yacs wants it. Values that the node already has are kept.

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
        TypeError: cfg is not a CfgNode, or its MODEL.TRUNCDET is something else.
        ValueError: cfg is frozen, or has no MODEL.
    """
    from detectron2.config import CfgNode

    model = _model_node(cfg, "add_truncdet_config")
    node = _truncdet_node(model, "add_truncdet_config")
    missing = [key for key in DEFAULTS if node is None or key not in node]
    if missing and (model.is_frozen() or (node is not None and node.is_frozen())):
        raise ValueError(
            f"{_ME}.add_truncdet_config: cfg must not be frozen, got one that is; call it before "
            "cfg.freeze(), or cfg.defrost() first"
        )
    if node is None:
        node = model.TRUNCDET = CfgNode(new_allowed=True)
    for key in missing:
        setattr(node, key, DEFAULTS[key])


def read(cfg: Any, where: str) -> Settings:
    """Returns the settings; ValueError for an unknown key or a wrong value, naming the right ones.

    Args:
        cfg: a config after `add_truncdet_config`.
        where: the public function that asks, for messages.
    """
    node = _truncdet_node(_model_node(cfg, where), where)
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
    mode, strict = found["MODE"], found["STRICT"]
    if mode not in MODES:
        why = "" if mode != "snap" else ": RoIAlign's contributions have fractional weights"
        raise ValueError(
            f"{_ME}.{where}: cfg.{NODE}.MODE must be one of {', '.join(MODES)}, got {mode!r}{why}"
        )
    if not isinstance(strict, bool) and strict not in tuple(_STRICT):
        raise ValueError(
            f"{_ME}.{where}: cfg.{NODE}.STRICT must be off, warn, raise, True or False, "
            f"got {strict!r}"
        )
    check_literal(found["LITERAL"], mode, f"{_ME}.{where}")
    return Settings(
        enabled=found["ENABLED"],
        mode=mode,
        strict=strict if isinstance(strict, bool) else _STRICT[strict],
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
    model = cfg.get("MODEL")
    if not isinstance(model, CfgNode):
        raise ValueError(
            f"{_ME}.{where}: cfg must have a node MODEL, as get_cfg() has, got "
            f"{'none' if model is None else repr(model)}"
        )
    return model


def _truncdet_node(model: Any, where: str) -> Any:
    """Returns the node, None if there is none."""
    from detectron2.config import CfgNode

    node = model.get("TRUNCDET")
    if "TRUNCDET" in model and not isinstance(node, CfgNode):
        raise TypeError(
            f"{_ME}.{where}: cfg.{NODE} must be a node with the keys {', '.join(DEFAULTS)}, "
            f"got {node!r}; its ENABLED says whether the hook acts"
        )
    return node
